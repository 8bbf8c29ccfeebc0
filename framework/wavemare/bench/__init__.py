# SPDX-License-Identifier: Apache-2.0
"""Measurements: systems side by side, in one run, on the same work.

``wavemare bench`` starts the ranks and shows what they measured. All systems live in the same
processes and take turns in short rounds, so that a slow minute of the machine slows all of them.
"""
