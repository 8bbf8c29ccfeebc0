# SPDX-License-Identifier: Apache-2.0
"""Where a step's time and memory go: passes, waits for collectives, and saved tensors."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import COLLECTIVES, COMPUTE, Action, Kind

__all__ = ["PeakBytes", "StepRecorder", "median_seconds"]

_COST_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.SUM_OUTPUT, Kind.SUM_GRADIENT)


class StepRecorder:
    """Notes the passes of a step, and the waits for collectives between them.

    Attributes:
        events: In order; events of collectives are the waits for them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Note the time of the block."""
        started = time.perf_counter()
        yield
        self.events.append(Event(action, started, time.perf_counter()))

    @property
    def compute_s(self) -> float:
        """Seconds in passes."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COMPUTE)

    @property
    def waiting_s(self) -> float:
        """Seconds in which only collectives ran."""
        return sum(e.end_s - e.start_s for e in self.events if e.action.kind in COLLECTIVES)


def median_seconds(events: Iterable[Event], num_segments: int) -> list[list[float]]:
    """Return the median times (4, num_segments) of forward, backward and both kinds of sums.

    Args:
        events: Of steps without any overlap.
        num_segments: Segments of the model, with the head.
    """
    seconds: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, start_s, end_s in events:
        seconds[action.kind, action.stage].append(end_s - start_s)
    return [
        [median(seconds.get((kind, stage), [0.0])) for stage in range(num_segments)]
        for kind in _COST_KINDS
    ]


class PeakBytes:
    """Counts the memory that autograd keeps: each storage once, weights not at all.

    Args:
        module: Owns the weights.

    Attributes:
        now: Bytes that are kept now.
        peak: The most at any moment.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
        self._holders: Counter[int] = Counter()
        self.now = 0
        self.peak = 0

    def hooks(self) -> Any:
        """Return the context in which saved tensors are counted."""
        return torch.autograd.graph.saved_tensors_hooks(self._keep, lambda held: held.tensor)

    def _keep(self, tensor: Tensor) -> _Held:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._weights:
            return _Held(tensor, None)
        if not self._holders[address]:
            self.now += size
            self.peak = max(self.peak, self.now)
        self._holders[address] += 1

        def drop() -> None:
            self._holders[address] -= 1
            if not self._holders[address]:
                self.now -= size

        return _Held(tensor, drop)


class _Held:
    """A saved tensor; autograd drops it when it needs the tensor no more.

    Args:
        tensor: The saved one.
        drop: Called at the end.
    """

    def __init__(self, tensor: Tensor, drop: Callable[[], None] | None) -> None:
        # An operator's own output would hold the operator, which holds this.
        self.tensor = tensor.detach()
        self._drop = drop

    def __del__(self) -> None:
        if self._drop is not None:
            self._drop()
