# SPDX-License-Identifier: Apache-2.0
"""Plans for clusters of unlike devices: what they cost, and which one is best."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.parallel.planner.api import plan
    from wavemare.parallel.planner.chains import model_costs
    from wavemare.parallel.planner.cluster import Cluster, Device, Link
    from wavemare.parallel.planner.cluster_file import read_cluster
    from wavemare.parallel.planner.costs import ModelCosts
    from wavemare.parallel.planner.predict import Settings
    from wavemare.parallel.planner.probe import probe_cluster
    from wavemare.parallel.planner.search import PlanSearch, search_plans

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "ModelCosts",
    "PlanSearch",
    "Settings",
    "model_costs",
    "plan",
    "probe_cluster",
    "read_cluster",
    "search_plans",
]

_HOME = {
    "Cluster": "cluster",
    "Device": "cluster",
    "Link": "cluster",
    "ModelCosts": "costs",
    "PlanSearch": "search",
    "Settings": "predict",
    "model_costs": "chains",
    "plan": "api",
    "probe_cluster": "probe",
    "read_cluster": "cluster_file",
    "search_plans": "search",
}

__getattr__ = at_first_use(__name__, _HOME)
