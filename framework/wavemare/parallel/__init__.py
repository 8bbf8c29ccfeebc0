"""One model on several devices: groups of ranks, plans, and the blocks that are split over them.

Names are imported at first use, so that plans can be read and made without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavemare.parallel.grid import ProcessGrid, process_grid, rank_lists
    from wavemare.parallel.mesh import TensorMesh
    from wavemare.parallel.plan import ParallelPlan, Prediction

__all__ = [
    "ParallelPlan",
    "Prediction",
    "ProcessGrid",
    "TensorMesh",
    "process_grid",
    "rank_lists",
]

_HOME = {
    "ParallelPlan": "wavemare.parallel.plan",
    "Prediction": "wavemare.parallel.plan",
    "ProcessGrid": "wavemare.parallel.grid",
    "TensorMesh": "wavemare.parallel.mesh",
    "process_grid": "wavemare.parallel.grid",
    "rank_lists": "wavemare.parallel.grid",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'wavemare.parallel' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
