# SPDX-License-Identifier: Apache-2.0
"""Plans for clusters of unlike devices: what they cost, and which one is best.

A model and a cluster go in, layouts with predictions come out; nothing here needs a device but
``probe.py``. Read ``search.py`` first.
"""

from wavemare.parallel.planner.cluster import Cluster, Device, Link, read_cluster
from wavemare.parallel.planner.search import PlanSearch, plan

__all__ = ["Cluster", "Device", "Link", "PlanSearch", "plan", "read_cluster"]
