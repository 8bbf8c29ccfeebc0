# SPDX-License-Identifier: Apache-2.0
"""Replicas that are cut at layers of their own: who has which layers, and who sums what.

The bounds of all replicas together cut the chain into *segments*. In each replica one rank has all
of a segment. These ranks are a group: they begin with the same weights, and average gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.pipe.chunks import numbered_layers
from wavemare.pipeline.plan.partition import segments

_BUCKET = 500_000_000
"""Numbers of one all-reduce, as in DeepSpeed's pipelines."""


class SharedSegments:
    """The process groups of the segments of a pipeline's layers.

    All ranks must construct it together.

    Args:
        cuts: For each replica the bounds of its stages.
        grid: DeepSpeed's, of one stage per rank.
    """

    def __init__(self, cuts: Sequence[Sequence[int]], grid: Any) -> None:
        self.cuts = tuple(map(tuple, cuts))
        self._found = segments(cuts)
        topology, parts = grid.topology(), grid.get_slice_parallel_world_size()
        made: dict[tuple[int, ...], Any] = {}
        own: list[Any] = []
        for first, _ in self._found:
            stages = [sum(bound <= first for bound in bounds[1:]) for bounds in self.cuts]
            for part in range(parts):
                axes = {"model": part} if parts > 1 else {}
                ranks = tuple(
                    topology.get_rank(pipe=stage, data=replica, **axes)
                    for replica, stage in enumerate(stages)
                )
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks))
                if grid.global_rank in ranks:
                    own.append((first, ranks, made[ranks]))
        self._groups = {first: (ranks[0], group) for first, ranks, group in own}

    @property
    def groups(self) -> list[Any]:
        """This rank's groups, each once."""
        return list({id(group): group for _, group in self._groups.values()}.values())

    def _segment_of(self, layer: int) -> int:
        return next(first for first, end in self._found if first <= layer < end)

    def parameters(self, module: Any) -> Iterator[tuple[int, Any, list[Any]]]:
        """Yield for each segment of this rank, in order, a rank, the group and the parameters.

        The rank is that of the first replica. Parameters of a loss belong to the last layer.
        """
        layer_of: dict[int, int] = {}
        for number, layer in numbered_layers(module):
            for parameter in layer.parameters():
                layer_of.setdefault(id(parameter), number)
        last = self._found[-1][1] - 1
        placed = [(self._segment_of(layer_of.get(id(p), last)), p) for p in module.parameters()]
        placed.sort(key=lambda entry: entry[0])  # stable: all ranks have one order in a segment
        for first, entries in groupby(placed, key=lambda entry: entry[0]):
            source, group = self._groups[first]
            yield source, group, [parameter for _, parameter in entries]

    def broadcast(self, module: Any) -> None:
        """Give all replicas the first one's weights; all ranks call it."""
        for source, group, parameters in self.parameters(module):
            for parameter in parameters:
                dist.broadcast(parameter.data, source, group=group)

    def reduce(self, module: Any, average: Callable[[list[Tensor], Any, int], None]) -> None:
        """Average gradients over the replicas; all ranks call it.

        Args:
            module: Whose gradients.
            average: DeepSpeed's ``allreduce_no_retain``, of tensors of one type.
        """
        for _, group, parameters in self.parameters(module):
            gradients = [p.grad for p in parameters if p.grad is not None]
            for _, alike in groupby(gradients, key=lambda gradient: gradient.dtype):
                average(list(alike), group, _BUCKET)
