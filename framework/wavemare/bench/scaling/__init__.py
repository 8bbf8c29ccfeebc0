# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench scaling``: what a few measured processes say about many."""
