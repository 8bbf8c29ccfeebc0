# SPDX-License-Identifier: Apache-2.0
"""How many bytes autograd keeps for backward passes at each moment, for each wave."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wavemare.pipeline.plan.action import Action
from wavemare.pipeline.wave.memory import Live

__all__ = ["LiveBytes", "Moment"]


class Moment(NamedTuple):
    """What is kept at a time.

    Args:
        time_s: By the clock.
        live: Bytes.
    """

    time_s: float
    live: Live


class LiveBytes:
    """Counts the memory that autograd keeps: a storage once, that of weights not at all.

    What is kept counts for the wave whose pass has kept it first, until all who keep it are gone.

    Args:
        module: Owns the weights.
        clock: Seconds from any origin.

    Attributes:
        curve: After each action.
        peak: The most there has been at any moment, of both waves together.
    """

    def __init__(self, module: nn.Module, clock: Callable[[], float] = time.perf_counter) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._kept: dict[int, _Storage] = {}
        self._live = [0, 0]
        self._wave = 0
        self._clock = clock
        self.curve: list[Moment] = []
        self.peak = 0

    @property
    def now(self) -> int:
        """Bytes that are kept now."""
        return sum(self._live)

    def hooks(self) -> Any:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda held: held.tensor)

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Count what is kept meanwhile for the wave of an action."""
        self._wave = action.wave
        yield
        self.curve.append(Moment(self._clock(), Live(*self._live)))

    def _keep(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._weights:
            return _Held(tensor, None)
        if address not in self._kept:
            self._kept[address] = _Storage(self._wave, storage.nbytes())
            self._live[self._wave] += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._kept[address].holders += 1
        return _Held(tensor, lambda: self._drop(address))

    def _drop(self, address: int) -> None:
        kept = self._kept[address]
        kept.holders -= 1
        if not kept.holders:
            self._live[kept.wave] -= kept.nbytes
            del self._kept[address]


class _Storage:
    """Memory that is kept, by so many saved tensors."""

    def __init__(self, wave: int, nbytes: int) -> None:
        self.wave = wave
        self.nbytes = nbytes
        self.holders = 0


class _Held:
    """Stands for a saved tensor; autograd drops it when it needs the tensor no more.

    Args:
        tensor: What is saved.
        dropped: Called at the end.
    """

    def __init__(self, tensor: Tensor, dropped: Callable[[], None] | None) -> None:
        # An operator's own output would hold the operator, which holds this.
        self.tensor = tensor.detach()
        self._dropped = dropped

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped()
