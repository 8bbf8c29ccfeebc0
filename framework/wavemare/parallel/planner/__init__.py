# SPDX-License-Identifier: Apache-2.0
"""Layouts for clusters of unlike devices: what they cost, and which one is best.

A model and a cluster go in, layouts with predictions come out; nothing here needs a device but
``probe.py``. Read ``search.py`` first.
"""

from wavemare.parallel.planner.cluster import Cluster, Device, Link, read_cluster
from wavemare.parallel.planner.search import LayoutSearch, find_layouts

__all__ = ["Cluster", "Device", "LayoutSearch", "Link", "find_layouts", "read_cluster"]
