# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks for which no rank waits until it needs them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class PendingSums:
    """All-reduces of a few numbers on the host, started now and read later.

    All ranks of the group start the same sums in the same order. A rank that is ahead does not
    wait for the others before it calls `wait`.

    Args:
        group: Process group with a backend for the host's memory, such as gloo.
        is_own: Whether `close` destroys it.

    Attributes:
        group: The process group of the sums.
        count: How many this rank has started.
    """

    def __init__(self, group: Any, *, is_own: bool = False) -> None:
        self._is_own = is_own
        self.group, self.count = group, 0
        self._started: deque[tuple[Tensor, Any]] = deque()

    @classmethod
    def of_pipelines(cls, grid: Any) -> PendingSums:
        """Return the sums over the ranks of each pipeline of a grid; all ranks must call it."""
        group = grid.get_pipe_parallel_group()
        if "cpu" in dist.get_backend_config(group):
            return cls(group)
        # Named by torch's count of groups, which all ranks have alike: each makes every group.
        made = {tuple(ranks): dist.new_group(ranks, backend="gloo") for ranks in grid.pipe_groups}
        own = next(ranks for ranks in made if dist.get_rank() in ranks)
        return cls(made[own], is_own=True)

    def __len__(self) -> int:
        """How many sums `wait` has not returned yet."""
        return len(self._started)

    def start(self, values: Sequence[float]) -> None:
        """Start to add these numbers, in float64, to those of the other ranks."""
        total = torch.tensor(values, dtype=torch.float64)
        self.count += 1
        self._started.append((total, dist.all_reduce(total, group=self.group, async_op=True)))

    def catch_up(self, most: int, length: int) -> None:
        """Start sums of so many zeros until there are as many as on the rank that has most."""
        while self.count < most:
            self.start([0.0] * length)

    def wait(self, keep: int = 0) -> list[list[float]]:
        """Wait for all sums but the newest ``keep``, and return them; the oldest is the first.

        No sum is returned twice.
        """
        found = []
        while len(self._started) > keep:
            total, work = self._started.popleft()
            work.wait()
            found.append(total.tolist())
        return found

    def close(self) -> None:
        """Forget the sums that were not read, and destroy the group if it is an own one."""
        self._started.clear()
        if self._is_own and dist.is_initialized():
            self._is_own = False
            dist.destroy_process_group(self.group)
