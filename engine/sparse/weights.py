# SPDX-License-Identifier: Apache-2.0
"""Under ZeRO 1 and 2 the gather of updated weights, of which only those that changed travel.

An optimizer with momentum or weight decay changes all rows of a table in each step. Some change
only the rows that got gradients. There, each rank compares its partition with a copy from before
the step, so all weights have the bits of DeepSpeed's gather whatever the optimizer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor

from wavemare.comm.sparse import SparseComm
from wavemare.engine.seams import replaced

_LEAST_TABLES = 0.25
"""Share of the weights that are tables, from which rows that stay can make a gather smaller."""

_NEUTRAL: Mapping[type[torch.optim.Optimizer], Sequence[str]] = {
    torch.optim.SGD: ("momentum", "weight_decay"),
    torch.optim.Adagrad: ("weight_decay",),
}
"""Optimizers that leave weights without gradients as they are, if these settings are zero."""


def choose_weights(optimizer: Any, tables: int, weights: int) -> tuple[str, str]:
    """Return whether to gather the ``changed`` weights or ``all``, and why.

    Args:
        optimizer: That steps a rank's partition.
        tables: Number of weights of embeddings.
        weights: Number of all weights.
    """
    settings = _NEUTRAL.get(type(optimizer))
    if settings is None:
        return "all", f"{type(optimizer).__name__} may change rows that got no gradient"
    moved = [name for name in settings if any(group[name] for group in optimizer.param_groups)]
    if moved:
        return "all", f"{moved[0]} changes rows that got no gradient"
    if tables < _LEAST_TABLES * weights:
        return "all", "less than a quarter of the weights are in tables"
    return "changed", "the optimizer leaves the rows of a table alone that got no gradient"


class ChangedWeights:
    """Replaces the gather at the end of the optimizer's step.

    Args:
        optimizer: DeepSpeed's, of ZeRO 1 or 2.
        comms: The collectives of each group of parameters.
    """

    def __init__(self, optimizer: Any, comms: Sequence[SparseComm]) -> None:
        self._optimizer = optimizer
        self._comms = comms
        self._is_common = False
        self._stock_step = optimizer.step
        optimizer.step = self._step

    def forget(self) -> None:
        """Gather everything in the next step: somebody else has written weights."""
        self._is_common = False

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self._optimizer
        if not self._is_common:
            result = self._stock_step(*args, **kwargs)
            self._is_common = not optimizer.overflow  # an overflow gathers nothing
            return result
        groups = zip(self._comms, optimizer.parallel_partitioned_bit16_groups, strict=True)
        before = [partitions[comm.rank].detach().clone() for comm, partitions in groups]
        gather = {"all_gather_dp_groups": partial(self._gather, before)}
        with replaced(stage_1_and_2, gather):
            return self._stock_step(*args, **kwargs)

    def _gather(
        self,
        before: Sequence[Tensor],
        groups_flat: Sequence[Tensor],
        partitioned_param_groups: Sequence[Sequence[Tensor]],
        dp_process_group: Sequence[Any],
        **_: Any,
    ) -> None:
        handles = []
        for number, (comm, flat) in enumerate(zip(self._comms, groups_flat, strict=True)):
            assert dist.get_rank(group=dp_process_group[number]) == comm.rank
            if comm.size > 1:
                size = len(partitioned_param_groups[number][0])
                borders = [size * owner for owner in range(comm.size + 1)]
                handles.append(
                    comm.allgather_(flat.detach(), borders, before=before[number], async_op=True)
                )
        for handle in handles:
            handle.wait()
