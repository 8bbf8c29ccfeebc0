# SPDX-License-Identifier: Apache-2.0
"""The checks of ``wavemare doctor``: one file per subject, functions that yield findings."""
