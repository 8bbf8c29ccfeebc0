# SPDX-License-Identifier: Apache-2.0
"""``benchmarks wave``: optimizer steps of a tensor-parallel GPT under plans of waves.

Read `measure` first. Links get the speed at which collectives take a given share of a step.
"""
