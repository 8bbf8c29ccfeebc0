# SPDX-License-Identifier: Apache-2.0
"""The grid of pipelines that are replicas with local steps: DeepSpeed's, once for each replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from deepspeed import comm as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from wavemare.engine.seams import replaced

_AXIS = "replica"


class ReplicaTopology(ProcessTopology):
    """Consecutive ranks are a replica, within which the order is DeepSpeed's.

    Args:
        replicas: That step alone.
        stages: Of each pipeline.
        data: Pipelines of a replica, which reduce gradients in each step.
        tensor: Ranks that share each layer.
    """

    def __init__(self, replicas: int, stages: int, data: int, tensor: int) -> None:
        sizes = {_AXIS: replicas, "pipe": stages, "data": data}
        sizes |= {"model": tensor} if tensor > 1 else {}  # DeepSpeed names files by it
        super().__init__(axes=[*sizes], dims=[*sizes.values()])

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), *args: Any, **kwargs: Any
    ) -> str:
        """Return a rank's part of a file's name, as in a run of one replica."""
        return str(super().get_rank_repr(rank, [*omit_axes, _AXIS], *args, **kwargs))


class ReplicaGrid(PipelineParallelGrid):
    """DeepSpeed's grid, whose pipelines end in their replica; parameters are DeepSpeed's.

    Attributes:
        replicas: The ranks at this one's place in all replicas, as an axis.
    """

    replicas: Any = None

    def __init__(self, topology: ReplicaTopology, process_group: Any = None) -> None:
        super().__init__(topology, process_group)
        # DeepSpeed's own group has the ranks of all replicas.
        for replica in range(topology.get_dim(_AXIS)):
            for data in range(self.data_parallel_size):
                ranks = sorted(topology.filter_match(**{_AXIS: replica, "data": data}))
                group = dist.new_group(ranks)
                if self.global_rank in ranks:
                    self.ds_model_proc_group, self.ds_model_world_size = group, len(ranks)
                    self.ds_model_rank = ranks.index(self.global_rank)


@contextmanager
def grid_of(topology: Any) -> Iterator[None]:
    """Let a ``PipelineModule`` that is built inside have the grid that its topology needs."""
    found = {"PipelineParallelGrid": ReplicaGrid} if isinstance(topology, ReplicaTopology) else {}
    with replaced(import_module("deepspeed.runtime.pipe.module"), found):
        yield


@contextmanager
def groups_of_each(topology: Any) -> Iterator[None]:
    """Make process groups that each replica numbers by its own ranks, for all replicas alike.

    All ranks must make all groups.
    """
    if not isinstance(topology, ReplicaTopology):
        yield
        return
    module, world = import_module("deepspeed.runtime.pipe.module"), dist.get_world_size()
    make, size = dist.new_group, world // topology.get_dim(_AXIS)
    first = dist.get_rank() // size * size

    def new_group(ranks: Sequence[int]) -> Any:
        made = {f: make([r - first + f for r in ranks]) for f in range(0, world, size)}
        return made[first]

    with replaced(module.dist, {"new_group": new_group}):
        yield
