# SPDX-License-Identifier: Apache-2.0
"""One model on several devices: annotations, layouts, tensor parallelism and the planner.

Annotations or the planner make a `Layout`, and ``wavemare.initialize`` builds the engine that it
describes; read ``layout/execute.py`` first. Layouts can be read and made without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

if TYPE_CHECKING:
    from wavemare.parallel.layout.annotations import pipeline, replica, split, stage
    from wavemare.parallel.layout.grid import ProcessGrid, process_grid, rank_lists
    from wavemare.parallel.layout.layout import Layout, Prediction
    from wavemare.parallel.layout.names import annotate

__all__ = [
    "Layout",
    "Prediction",
    "ProcessGrid",
    "annotate",
    "pipeline",
    "process_grid",
    "rank_lists",
    "replica",
    "split",
    "stage",
]

_HOME = {
    "Layout": "layout.layout",
    "Prediction": "layout.layout",
    "ProcessGrid": "layout.grid",
    "annotate": "layout.names",
    "pipeline": "layout.annotations",
    "process_grid": "layout.grid",
    "rank_lists": "layout.grid",
    "replica": "layout.annotations",
    "split": "layout.annotations",
    "stage": "layout.annotations",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
