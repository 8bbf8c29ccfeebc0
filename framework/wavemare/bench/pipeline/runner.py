# SPDX-License-Identifier: Apache-2.0
"""What measured pipelines share: the model in parts, their interface, and the bound."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import set_seed

from wavemare.bench.pipeline.request import PipelineRequest, Waits
from wavemare.bench.ranks import SEED, bench_device, build_gpt
from wavemare.models.chains import gpt2_chain
from wavemare.models.families import LanguageModelLoss
from wavemare.models.layers import PipelineLayer
from wavemare.models.timing import layer_times
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.plan.partition import balanced_cuts
from wavemare.pipeline.plan.plan import COMPUTE, RECEIVES, SENDS, Action, Kind

_BATCHES = 8
_SYNTHETIC_WIDTH = 64
_INPUTS = ("input_ids",)
# Linux may wake a sleeper so late by default.
_TIMER_SLACK_S = 50e-6

Batch = tuple[Tensor, Tensor]


class Workload(ABC):
    """A model in parts, its loss and its micro-batches; the same on all ranks.

    Attributes:
        loss: From (output, labels) to a scalar.
        batches: Micro-batches (inputs, labels), to be repeated.
        activation_shape: Of the tensor between two parts, in fp32.
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    batches: list[Batch]
    activation_shape: tuple[int, ...]

    @abstractmethod
    def parts(self, count: int) -> list[nn.Module]:
        """Return new modules of even costs, with the same initial weights each time."""


class GPTWorkload(Workload):
    """GPT-2 without dropout and with a head of its own, on random tokens.

    All processes must build it at the same time: its layers are timed on all of them.
    """

    def __init__(self, request: PipelineRequest) -> None:
        self._request = request
        model, chain = self._build()
        self._weights = layer_times(model, chain, _INPUTS)
        self.loss = LanguageModelLoss(model.loss_function, request.vocabulary)
        self.activation_shape = (request.batch, request.sequence, request.hidden)
        shape = (_BATCHES, request.batch, request.sequence)
        tokens = torch.randint(0, request.vocabulary, shape, generator=_generator())
        self.batches = [(part, part) for part in tokens]

    def parts(self, count: int) -> list[nn.Module]:
        """Cut a new model by the measured times of its layers."""
        _, chain = self._build()
        cuts = balanced_cuts(self._weights, count)
        return [nn.Sequential(*chain[cuts[i] : cuts[i + 1]]) for i in range(count)]

    def _build(self) -> tuple[Any, list[PipelineLayer]]:
        model = build_gpt(self._request)
        return model, gpt2_chain(model, _INPUTS)


class SyntheticWorkload(Workload):
    """Layers that sleep: many share a core, and real tensors travel between them."""

    def __init__(self, request: PipelineRequest) -> None:
        self._stages = request.stages
        self._waits = request.waits
        self.loss = nn.functional.mse_loss
        self.activation_shape = (request.batch, _SYNTHETIC_WIDTH)
        values = torch.randn((_BATCHES, *self.activation_shape), generator=_generator())
        self.batches = [(part, torch.zeros_like(part)) for part in values]

    def parts(self, count: int) -> list[nn.Module]:
        """Return layers whose waits add up to the same whole for every number of parts."""
        set_seed(SEED)
        waits = Waits(*(seconds * self._stages / count for seconds in self._waits))
        return [TimedWait(waits) for _ in range(count)]


class TimedWait(nn.Module):
    """A linear layer that sleeps in its passes.

    Hooks on the two gradients sleep, so that a split backward pass sleeps in the same parts.

    Args:
        waits: How long.
    """

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.linear = nn.Linear(_SYNTHETIC_WIDTH, _SYNTHETIC_WIDTH)
        self.waits = waits
        self.linear.weight.register_hook(lambda _: sleep(waits.weight_s))

    def forward(self, inputs: Tensor) -> Tensor:
        """Map (batch, 64) to (batch, 64)."""
        # The first stage's input needs no gradient, and sleeps for it as others do.
        own = inputs.view_as(inputs) if inputs.requires_grad else inputs.detach().requires_grad_()
        own.register_hook(lambda _: sleep(self.waits.input_s))
        output: Tensor = self.linear(own)
        sleep(self.waits.forward_s)
        return output


def build_workload(request: PipelineRequest) -> Workload:
    """Return the model of a request; all processes call this together."""
    return SyntheticWorkload(request) if request.synthetic else GPTWorkload(request)


def sleep(seconds: float) -> None:
    """Sleep; the last moment is spent awake, to end in time."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - _TIMER_SLACK_S, 0))
    while time.perf_counter() < end:
        pass


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""The optimizer of all systems: AdamW in fp32."""
GRADIENT_CLIPPING = 0.0
"""None: by default pipelines of DeepSpeed clip, and torch's do not."""
Take = Callable[[], list[Event]]
"""Returns the events since the last call."""
_MESSAGES = frozenset(RECEIVES) | frozenset(SENDS)


@dataclass(frozen=True)
class Place:
    """Where a system runs, and its part of a step.

    Args:
        rank: Of this process; it is the stage as well.
    """

    rank: int
    stages: int
    micro_batches: int

    @property
    def is_last(self) -> bool:
        """Whether this process holds the end of the model (where a rank holds one part)."""
        return self.rank == self.stages - 1


class Runner(ABC):
    """A system, ready to train.

    Attributes:
        take: None where actions cannot be told apart.
    """

    take: Take | None = None

    @abstractmethod
    def step(self) -> None:
        """Train one optimizer step (in steady state: one step's number of micro-batches)."""

    def drain(self) -> None:
        """Finish all micro-batches, so that another system may use the same channels."""
        return None


class Busy(NamedTuple):
    """Seconds of a rank by purpose.

    Args:
        compute_s: In forward and backward passes.
        step_s: In the optimizer.
        message_s: In sends and receives.
    """

    compute_s: float
    step_s: float
    message_s: float


class Recorder:
    """Collects events. Times are `time.perf_counter`'s, which all processes of a host share."""

    def __init__(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._counts: Counter[tuple[Kind, int]] = Counter()
        self._events: list[Event] = []

    def timed(self, kind: Kind, stage: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that records its calls.

        Not all systems name an action's micro-batch: the n-th action of a kind and stage counts as
        that of micro-batch n, or of step n.
        """

        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = function(*args, **kwargs)
            number = self._counts[kind, stage]
            self._counts[kind, stage] += 1
            if kind in (Kind.STEP, Kind.REDUCE):
                number = (number + 1) * self._micro_batches - 1
            self._events.append(Event(Action(kind, stage, number), started, time.perf_counter()))
            return result

        return call

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events


def busy_seconds(events: Iterable[Event]) -> Busy:
    """Add up the times of actions; none of them overlap on a rank."""
    totals = dict.fromkeys(Kind, 0.0)
    for event in events:
        totals[event.action.kind] += event.end_s - event.start_s
    return Busy(
        compute_s=sum(totals[kind] for kind in COMPUTE),
        step_s=totals[Kind.STEP],
        message_s=sum(totals[kind] for kind in _MESSAGES),
    )


class BoundRunner(Runner):
    """A stage's passes and optimizer steps, without any message.

    With all ranks busy at once, this is the best that the machine's cores do side by side.
    """

    def __init__(self, workload: Workload, place: Place) -> None:
        device = bench_device()
        self._part = workload.parts(place.stages)[place.rank].to(device)
        self._optimizer = build_optimizer(self._part)
        self._loss = workload.loss if place.is_last else None
        self._count = place.micro_batches
        self._batches = self._fake_batches(workload, place, device)
        recorder = Recorder(place.micro_batches)
        self.take = recorder.take
        self._timed_forward = recorder.timed(Kind.FORWARD, place.rank, self._forward)
        self._timed_backward = recorder.timed(Kind.BACKWARD, place.rank, self._backward)
        self._timed_update = recorder.timed(Kind.STEP, place.rank, self._update)

    def step(self) -> None:
        """Do the stage's part of a step."""
        for _ in range(self._count):
            inputs, target = next(self._batches)
            self._timed_backward(self._timed_forward(inputs, target), target)
        self._timed_update()

    @staticmethod
    def _fake_batches(workload: Workload, place: Place, device: torch.device) -> Iterator[Batch]:
        """Repeat inputs, and labels or gradients of the output, of the right shapes."""

        def activations() -> Tensor:
            return torch.randn(workload.activation_shape, device=device)

        pairs = []
        for inputs, labels in workload.batches:
            first = inputs.to(device) if place.rank == 0 else activations().requires_grad_()
            pairs.append((first, labels.to(device) if place.is_last else activations()))
        return itertools.cycle(pairs)

    def _forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        if inputs.requires_grad:
            inputs.grad = None
        output: Tensor = self._part(inputs)
        return self._loss(output, target) / self._count if self._loss else output

    def _backward(self, output: Tensor, target: Tensor) -> None:
        output.backward(None if self._loss else target)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def build_optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of some modules' parameters."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    return make(parameters, **ADAMW)
