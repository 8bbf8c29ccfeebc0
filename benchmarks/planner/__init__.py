# SPDX-License-Identifier: Apache-2.0
"""``benchmarks planner``: layouts for unlike devices beside equal parts.

Read `run` first. CPU quotas make unlike devices of processes; each job of ranks makes some rows.
"""
