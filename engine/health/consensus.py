# SPDX-License-Identifier: Apache-2.0
"""Lets the ranks that make an optimizer step together decide alike whether to make it.

A rank that skipped a step alone would leave the others waiting in its collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from wavemare.engine.context import EngineContext

__all__ = ["StepConsensus", "consensus_of"]

_T = TypeVar("_T")


class StepConsensus:
    """Ranks that decide together, and learn the same.

    Args:
        groups: Process groups of this rank, in the same order on all ranks; None stands for all
            ranks. Each group joins what the groups before it have joined, as rows and columns of a
            grid do. A single rank has none.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = tuple(groups)

    @property
    def speaks(self) -> bool:
        """Whether this rank logs a decision for all of them."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def agree(self, seen: Tensor) -> bool:
        """Return whether any rank has seen something; () bool of this rank. All must call it."""
        flag = seen.float()
        for group in self._groups:
            dist.all_reduce(flag, group=group)
        return bool(flag)

    def gather(self, own: Sequence[_T]) -> list[_T]:
        """Return the values of all ranks, in the same order everywhere; all must call it."""
        found = list(own)
        for group in self._groups:
            parts: list[list[_T]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, found, group=group)
            found = [one for part in parts for one in part]
        return found


def consensus_of(engine: EngineContext) -> StepConsensus:
    """Return the ranks that make an engine's optimizer steps together.

    These are all ranks, or the ranks of one stage of an asynchronous pipeline. Replicas have equal
    gradients, but each sees its own activations.
    """
    if engine.settings.pipeline.schedule != "pipemare":
        return StepConsensus([None] if dist.get_world_size() > 1 else [])
    grid, groups = engine.grid, []
    # DeepSpeed has no group for a single rank.
    if engine.dp_world_size > 1:
        groups.append(grid.get_data_parallel_group())
    if grid.get_slice_parallel_world_size() > 1:
        groups.append(grid.get_slice_parallel_group())
    return StepConsensus(groups)
