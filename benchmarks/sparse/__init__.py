# SPDX-License-Identifier: Apache-2.0
"""``benchmarks sparse``: ways to sum a sparse gradient over ranks, and whole training steps.

Read `measure` first, or `step` for ``--step``. All systems get the same gradient or batches.
"""
