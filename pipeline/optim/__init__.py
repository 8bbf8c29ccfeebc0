# SPDX-License-Identifier: Apache-2.0
"""Optimizers that step whole matrices.

In: parameters and gradients, also as flat partitions. Out: updated parameters. Read
`matrix_optimizer.py` first.
"""
