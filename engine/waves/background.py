# SPDX-License-Identifier: Apache-2.0
"""Dense gradients reduced in the background, with the interface of sparse ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from wavemare.engine.context import EngineContext

__all__ = ["BackgroundReduction"]


class BackgroundReduction:
    """Averages an engine's gradients over its data ranks between `begin` and `end`.

    Args:
        engine: Without ZeRO.
        parameters: Those that are trained; all ranks in the same order.
    """

    def __init__(self, engine: EngineContext, parameters: Sequence[nn.Parameter]) -> None:
        self._group = engine.data_parallel_group
        self._divisor = engine.dp_world_size if engine.gradient_average else 1
        self._parameters = list(parameters)
        self._flat: Tensor | None = None
        self._work: Any = None

    def begin(self) -> None:
        """Start to reduce the gradients; they may be replaced, and missing ones count as zero."""
        self._flat = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                for p in self._parameters
            ]
        )
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def end(self) -> None:
        """Wait, and set the gradients to their means."""
        assert self._flat is not None
        if self._work is not None:  # none where there is one rank
            self._work.wait()
        self._flat.div_(self._divisor)
        parts = self._flat.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._flat = self._work = None
