# SPDX-License-Identifier: Apache-2.0
"""The ranks that judge an optimizer step: they decide alike, and know the same of it.

A rank that left out a step, or looked for a cause, by itself would wait for ever: the others are in
the collectives of what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

__all__ = ["Judges", "judges_of"]

_T = TypeVar("_T")


class Judges:
    """Ranks that decide together. Who decides and who is told are the same, by construction.

    Args:
        groups: Process groups of this rank, None for that of all ranks; a rank by itself has none.
            Each joins what those before it have joined, as the rows of a grid and then its columns
            do: all ranks must give theirs in the same order.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = tuple(groups)

    @property
    def speaks(self) -> bool:
        """Whether it is this rank that tells of a decision, for all of them."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def agree(self, seen: Tensor) -> bool:
        """Return whether any of them has seen something; all must call it.

        Args:
            seen: Whether this rank has; () bool, on a device of the groups' backend.
        """
        flag = seen.float()
        for group in self._groups:
            dist.all_reduce(flag, group=group)
        return bool(flag)

    def gather(self, own: Sequence[_T]) -> list[_T]:
        """Return what all of them have, the same in the same order for each; all must call it.

        Args:
            own: What this rank has; can be pickled.
        """
        found = list(own)
        for group in self._groups:
            parts: list[list[_T]] = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(parts, found, group=group)
            found = [one for part in parts for one in part]
        return found


def judges_of(engine: Any) -> Judges:
    """Return the ranks that make an engine's optimizer steps together.

    These are all, but each stage of an asynchronous pipeline steps by itself. They agree also where
    reduced gradients are alike: activations that a replica has seen are its own.

    Args:
        engine: Complete.
    """
    if engine._sections.pipeline.schedule != "pipemare":
        return Judges([None] if dist.get_world_size() > 1 else [])
    grid, groups = engine.grid, []
    # DeepSpeed has no group for a single rank.
    if engine.dp_world_size > 1:
        groups.append(grid.get_data_parallel_group())
    if grid.get_slice_parallel_world_size() > 1:
        groups.append(grid.get_slice_parallel_group())
    return Judges(groups)
