# SPDX-License-Identifier: Apache-2.0
"""Staleness of asynchronous pipelines and its corrections.

In: the weight versions of forward and backward passes. Out: corrected weights and learning rates.
Read `staleness.py` first.
"""
