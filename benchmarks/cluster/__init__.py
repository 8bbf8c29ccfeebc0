# SPDX-License-Identifier: Apache-2.0
"""Hosts with links of a known speed, and devices of a known share of a core, on one machine.

Read `emulated` first. In goes a command for each rank; out come its exit code and its output.
"""

from benchmarks.cluster.emulated import EmulatedCluster
from benchmarks.cluster.ranks import RankGroup

__all__ = ["EmulatedCluster", "RankGroup"]
