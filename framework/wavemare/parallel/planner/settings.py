# SPDX-License-Identifier: Apache-2.0
"""What a search may choose from, and what it takes for granted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavemare.errors import PlanError

__all__ = ["Settings"]

_LARGEST_BATCH = 2**31


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and assumptions of a search.

    Args:
        global_batch: Samples of one optimizer step.
        margin: Part of each device's memory that stays free, 0 to below 1.
        overlap: Part of ZeRO 3's gathers and reductions that passes hide, 0 to 1; DeepSpeed's
            other stages reduce behind the backward pass, unless ``overlap_comm`` is set.
        pipemare: Whether asynchronous pipelines are offered. They change the mathematics.
        waves: Whether waves are offered.
        recompute: Whether recomputed activations are offered.
        zero_stages: Stages of ZeRO that are offered.
        max_stages: The longest pipeline.
        max_tensor_parallel: The most ranks that share a layer.
        keep: How many plans are returned.

    Raises:
        PlanError: A number is out of range.
    """

    global_batch: int
    margin: float = 0.05
    overlap: float = 0.5
    pipemare: bool = False
    waves: bool = True
    recompute: bool = True
    zero_stages: tuple[int, ...] = (0, 1, 2, 3)
    max_stages: int = 16
    max_tensor_parallel: int = 8
    keep: int = 5

    def __post_init__(self) -> None:
        for name in ("global_batch", "max_stages", "max_tensor_parallel", "keep"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise PlanError(name, value, "it is no whole number of at least 1", "Give one")
        if self.global_batch > _LARGEST_BATCH:
            reason = "no search through its parts would end"
            remedy = f"Give at most {_LARGEST_BATCH}"
            raise PlanError("global_batch", self.global_batch, reason, remedy)
        if not _is_part(self.margin) or self.margin == 1:
            raise PlanError("margin", self.margin, "it is not from 0 to below 1", "Give a part")
        if not _is_part(self.overlap):
            raise PlanError("overlap", self.overlap, "it is not from 0 to 1", "Give a part")
        stages = self.zero_stages
        if not isinstance(stages, Sequence) or not stages or any(s not in range(4) for s in stages):
            reason = "these are no stages of ZeRO"
            raise PlanError("zero_stages", self.zero_stages, reason, "Give some of 0, 1, 2 and 3")


def _is_part(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1
