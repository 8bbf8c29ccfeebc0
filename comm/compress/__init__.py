# SPDX-License-Identifier: Apache-2.0
"""Compressors that choose the blocks to send, and error feedback for the rest.

In: a bucket. Out: the blocks that travel in this step. Read `compressors.py` first.
"""
