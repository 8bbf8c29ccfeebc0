# SPDX-License-Identifier: Apache-2.0
"""Finds out when a run no longer moves, says which rank is to blame, and ends it."""
