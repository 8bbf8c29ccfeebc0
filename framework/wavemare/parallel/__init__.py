# SPDX-License-Identifier: Apache-2.0
"""One model on several devices: annotations, layouts, tensor parallelism and the planner.

Annotations or the planner make a `Layout`, and ``wavemare.initialize`` builds the engine that it
describes; read ``layout/execute.py`` first. Layouts can be read and made without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.parallel.annotations import pipeline, replica, split, stage
    from wavemare.parallel.grid import ProcessGrid, process_grid, rank_lists
    from wavemare.parallel.mesh import TensorMesh
    from wavemare.parallel.names import annotate
    from wavemare.parallel.plan import ParallelPlan, Prediction
    from wavemare.parallel.planner.api import plan

__all__ = [
    "ParallelPlan",
    "Prediction",
    "ProcessGrid",
    "TensorMesh",
    "annotate",
    "pipeline",
    "plan",
    "process_grid",
    "rank_lists",
    "replica",
    "split",
    "stage",
]

_HOME = {
    "ParallelPlan": "plan",
    "Prediction": "plan",
    "ProcessGrid": "grid",
    "TensorMesh": "mesh",
    "annotate": "names",
    "pipeline": "annotations",
    "plan": "planner.api",
    "process_grid": "grid",
    "rank_lists": "grid",
    "replica": "annotations",
    "split": "annotations",
    "stage": "annotations",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
