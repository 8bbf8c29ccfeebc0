# SPDX-License-Identifier: Apache-2.0
"""``benchmarks losses``: the loss of real pipelines over time, in turns."""
