# SPDX-License-Identifier: Apache-2.0
"""``benchmarks local-steps``: seconds per step over slow links, and steps to a loss."""
