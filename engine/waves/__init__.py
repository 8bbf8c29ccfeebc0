# SPDX-License-Identifier: Apache-2.0
"""Wavelet: two micro-batches of one rank, one in its forward and one in its backward pass.

In: a model whose collectives call `passes.wait`. Out: gradients as those of plain accumulation.
Read `passes.py` first.
"""
