# SPDX-License-Identifier: Apache-2.0
"""Which processes hold one model between them, and which hold replicas that read other data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import distributed

from wavemare.engine.config.resolve import WavemareConfig

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


@dataclass(frozen=True)
class Ranks:
    """The place of this process: within its model, and among the replicas of the model.

    The processes of one model read the same samples and draw the same random numbers for them.
    Replicas read different samples.

    Args:
        model: Global ranks of the processes that hold this process's model, ascending.
        replicas: Global ranks of the processes at this one's place in all replicas, in the order of
            the data that they read.
        rank: Global rank of this process.
        model_group: The processes of ``model``; None before an engine has made the groups, or if
            this process holds a model alone.
        replica_group: The processes of ``replicas``; None before an engine has made the groups.
            With ``wavemare.local_steps`` it holds those of them that step together.
        apart_group: With ``wavemare.local_steps``, the processes at this one's place in the
            replicas that step alone; else None.
        job: The place of this job among those that train the same model on other data.
        jobs: Their number; more than 1 with ``wavemare.local_steps.elastic``.
    """

    model: Sequence[int]
    replicas: Sequence[int]
    rank: int
    model_group: Any = None
    replica_group: Any = None
    apart_group: Any = None
    job: int = 0
    jobs: int = 1

    @classmethod
    def planned(cls, ours: WavemareConfig, *, rank: int, world_size: int, count: int = 1) -> Ranks:
        """Return the place of a process before there is an engine.

        Neighbours share tensors, then come replicas, and stages are the farthest apart; with
        ``wavemare.local_steps`` so within those that step alone.

        Args:
            ours: The section ``wavemare``.
            rank: Of the process.
            world_size: Number of processes; ``count`` times a multiple of ``ours.model_ranks``.
            count: Of the replicas that step alone.
        """
        tensor, stages = ours.tensor_parallel.size, ours.pipeline.stages
        size = world_size // count
        start, stride = rank // size * size, size // stages  # from a stage to the next one
        stage, place = divmod(rank - start, stride)
        replica, part = divmod(place, tensor)
        first = start + replica * tensor
        return cls(
            model=[s * stride + first + t for s in range(stages) for t in range(tensor)],
            replicas=[
                other + r
                for other in range(0, world_size, size)
                for r in range(stage * stride + part, (stage + 1) * stride, tensor)
            ],
            rank=rank,
        )

    @classmethod
    def of(cls, engine: EngineMixin) -> Ranks:
        """Return the place of this process in an engine that DeepSpeed has built."""
        grid, rank = engine.mpu, int(distributed.get_rank())
        find = getattr(grid, "get_model_parallel_group", None)  # one of sequences has none
        model_group = None if find is None else find()
        model = [rank] if model_group is None else _members(model_group)
        replica_group = engine.data_parallel_group
        replicas, others = _members(replica_group), {}
        if engine.is_elastic:
            others = {"job": engine.replica, "jobs": engine.num_replicas}
        elif engine.num_replicas > 1:  # the grid is that of one of them
            size = distributed.get_world_size() // engine.num_replicas
            first = engine.replica * size
            starts = range(0, engine.num_replicas * size, size)
            replicas = [other - first + start for start in starts for other in replicas]
            others = {"apart_group": grid.replicas.group}
        if len(model) == 1:
            model_group = None
        return cls(model, replicas, rank, model_group, replica_group, **others)

    @property
    def model_world_size(self) -> int:
        """How many processes hold one model."""
        return len(self.model)

    @property
    def is_first(self) -> bool:
        """Whether this process is the first one of its model."""
        return self.rank == self.model[0]

    @property
    def data_rank(self) -> int:
        """The place of this process's model among those that read other data."""
        return self.job * len(self.replicas) + self.replicas.index(self.rank)

    @property
    def data_world_size(self) -> int:
        """How many models read other data."""
        return self.jobs * len(self.replicas)


def _members(group: Any) -> list[int]:
    return [int(rank) for rank in distributed.get_process_group_ranks(group)]
