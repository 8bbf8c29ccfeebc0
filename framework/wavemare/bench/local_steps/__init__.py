# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench local-steps``: training over slow links, in seconds per step and to a loss.

Read `measure` first.
"""
