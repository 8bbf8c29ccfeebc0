# SPDX-License-Identifier: Apache-2.0
"""One model on several devices: groups of ranks, plans, and the blocks that are split over them.

Names are imported at first use, so that plans can be read and made without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavemare.lazy import at_first_use

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
    "ParallelPlan": "plan",
    "Prediction": "plan",
    "ProcessGrid": "grid",
    "TensorMesh": "mesh",
    "process_grid": "grid",
    "rank_lists": "grid",
}

__getattr__ = at_first_use(__name__, _HOME)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
