# SPDX-License-Identifier: Apache-2.0
"""One model split over the ranks, a plan of each system, and where the time of a step goes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavemare.bench.ranks import SEED, bench_device, build_gpt
from wavemare.bench.wave.request import BASELINE, DOMINO, IN_PHASE, TICK_TOCK, WaveRequest
from wavemare.engine.waves.executor import Hooks, WaveExecutor
from wavemare.engine.waves.segments import profile_segments
from wavemare.errors import CommError
from wavemare.models.segments import tensor_segments
from wavemare.parallel.tensor.split import split_model
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, Action, Kind
from wavemare.pipeline.wave.schedule import accumulation_step, in_phase_step, tick_tock_step

HALVES = "halves"
"""Accumulation of halved micro-batches: not a system, it measures the cost of halving."""
# Sums of halves are rounded in another order.
_TOLERANCE = 1e-4

_COST_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.SUM_OUTPUT, Kind.SUM_GRADIENT)

_Batch = dict[str, Tensor]
Record = Callable[[Action], AbstractContextManager[Any]]


class _Step(NamedTuple):
    actions: tuple[Action, ...]
    batches: list[_Batch]


class Systems:
    """Runs optimizer steps of each system, without the optimizer; all ranks must call together.

    Attributes:
        num_segments: With the head.
        sums_per_micro_batch: Collectives that the executor starts for one.
    """

    def __init__(self, request: WaveRequest) -> None:
        self.device = bench_device()
        self.model = build_gpt(request, ties=True).to(self.device)
        split_model(self.model, dist.group.WORLD)
        self._segments = segments = tensor_segments(self.model)
        self.num_segments = len(segments.names)
        up = [*(segment.sums_output for segment in segments.body), False]
        down = [*(segment.sums_gradient for segment in segments.body), segments.head_sums_gradient]
        self.sums_per_micro_batch = sum(up) + sum(down)
        sums: Any = {"sums_output": up, "sums_gradient": down}  # for each segment
        whole = _build_batches(request, self.device)
        halves = [_batch(part) for batch in whole for part in batch["input_ids"].chunk(2)]
        count, num_segments = request.micro_batches, self.num_segments
        self._steps = {
            BASELINE: _Step(accumulation_step(num_segments, count), whole),
            IN_PHASE: _Step(in_phase_step(num_segments, count, **sums), whole),
            DOMINO: _Step(in_phase_step(num_segments, 2 * count, **sums), halves),
            TICK_TOCK: _Step(tick_tock_step(num_segments, count, **sums), whole),
            HALVES: _Step(accumulation_step(num_segments, 2 * count), halves),
        }
        self._profile = profile_segments(segments, self.model, whole[0])

    def clear(self) -> None:
        """Drop the gradients."""
        self.model.zero_grad()

    def step(self, name: str, record: Record) -> None:
        """Compute the gradients of a step, and add them to the present ones."""
        actions, batches = self._steps[name]

        def scale(loss: Tensor) -> Tensor:
            return loss / len(batches)

        hooks = Hooks(record=record, scale=scale)
        executor = WaveExecutor(self._segments, self.model, self._profile, hooks)
        executor.run(actions, iter(batches))

    def gradients(self) -> list[Tensor]:
        """Return copies of the gradients, in the order of the model's weights."""
        return [
            weight.grad.clone() for weight in self.model.parameters() if weight.grad is not None
        ]


def check_gradients(name: str, own: list[Tensor], expected: list[Tensor]) -> bool:
    """Compare a system's gradients with accumulation's.

    Returns:
        Whether they are equal bit for bit.

    Raises:
        CommError: They differ by more than rounding, or tick-tock's at all.
    """
    equal = all(map(torch.equal, own, expected))
    gaps = [
        float((a - b).norm() / b.norm().clamp(min=1e-30))
        for a, b in zip(own, expected, strict=True)
    ]
    if max(gaps) > _TOLERANCE or (name == TICK_TOCK and not equal):
        reason = f"its gradients are off by {max(gaps):g} of their norm"
        raise CommError("system", name, reason, "Report this: its measurements mean nothing")
    return equal


def _build_batches(request: WaveRequest, device: torch.device) -> list[_Batch]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (request.micro_batches, request.batch, request.sequence)
    tokens = torch.randint(0, request.vocabulary, shape, generator=generator).to(device)
    return [_batch(part) for part in tokens]


def _batch(tokens: Tensor) -> _Batch:
    return {"input_ids": tokens, "labels": tokens}


class StepRecorder:
    """Records the passes of a step, and the waits for collectives between them.

    Attributes:
        events: In order; events of collectives are the waits for them.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []

    @contextmanager
    def record(self, action: Action) -> Iterator[None]:
        """Record the time of the block."""
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
    """A saved tensor; autograd drops it when it needs the tensor no more."""

    def __init__(self, tensor: Tensor, drop: Callable[[], None] | None) -> None:
        # An operator's own output would hold the operator, which holds this.
        self.tensor = tensor.detach()
        self._drop = drop

    def __del__(self) -> None:
        if self._drop is not None:
            self._drop()
