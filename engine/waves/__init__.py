# SPDX-License-Identifier: Apache-2.0
"""Wavelet: two micro-batches of one rank, one in its forward and one in its backward pass.

In: a model as a list of segments and a plan of waves. Out: gradients as those of plain
accumulation. Read `wavelet.py` first.
"""
