# SPDX-License-Identifier: Apache-2.0
"""Gradient reductions of DeepSpeed's engines through the sparse collective.

In: gradients of a backward pass. Out: their mean over the data-parallel ranks. Read `attach.py`
first.
"""
