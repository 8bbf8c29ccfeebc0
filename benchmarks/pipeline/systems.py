# SPDX-License-Identifier: Apache-2.0
"""Measured pipelines: the no-communication bound, and systems ready to train.

These are pipelines of DeepSpeed, of ``torch.distributed.pipelining`` and of wavemare.
"""

from __future__ import annotations

import io
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import wavemare
from benchmarks.pipeline.request import BASELINE, BOUND, SYSTEMS, UNGUARDED
from benchmarks.pipeline.workloads import Batch, Workload
from benchmarks.ranks import bench_device
from wavemare.engine.optim.optimizers import make_muon
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.optim.soap_muon import SOAP
from wavemare.pipeline.plan.orders import loop, vee
from wavemare.pipeline.plan.plan import COMPUTE, RECEIVES, SENDS, Action, Kind
from wavemare.pipeline.plan.run_plan import homes_of

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
        optimizer: Of this rank.
    """

    take: Take | None = None
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def step(self) -> Tensor | None:
        """Train one optimizer step (in steady state: one step's number of micro-batches).

        Returns:
            The mean loss, on the ranks that know it.
        """

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
        self.optimizer = build_optimizer(workload, "AdamW", self._part)
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
        self.optimizer.step()
        self.optimizer.zero_grad()


def build_optimizer(workload: Workload, kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a module's parameters."""
    params = workload.optimizer_params(kind)
    if kind == "Muon":
        return make_muon(module, params)(module.parameters())
    make: Callable[..., torch.optim.Optimizer] = SOAP if kind == "SOAP" else torch.optim.AdamW
    return make(module.parameters(), **params)


_KINDS = {
    schedule.LoadMicroBatch: Kind.LOAD,
    schedule.ForwardPass: Kind.FORWARD,
    schedule.BackwardPass: Kind.BACKWARD,
    schedule.SendActivation: Kind.SEND_ACTIVATION,
    schedule.RecvActivation: Kind.RECV_ACTIVATION,
    schedule.SendGrad: Kind.SEND_GRAD,
    schedule.RecvGrad: Kind.RECV_GRAD,
    schedule.ReduceGrads: Kind.REDUCE,
    schedule.OptimizerStep: Kind.STEP,
}


class EngineRunner(Runner):
    """A pipeline engine that trains by ``train_batch``."""

    def __init__(
        self, engine: Any, batches: Sequence[Any], take: Callable[[], list[Event]]
    ) -> None:
        self.engine = engine
        self.optimizer = engine.basic_optimizer
        self.take = take
        self._batches = itertools.cycle(batches)

    def step(self) -> Tensor | None:
        """Train one batch; return its loss."""
        loss: Tensor = self.engine.train_batch(self._batches)
        return loss

    def drain(self) -> None:
        """Finish all micro-batches of an asynchronous pipeline."""
        if hasattr(self.engine, "drain"):
            self.engine.drain()


class TorchRunner(Runner):
    """A schedule of torch, this rank's part of the model, and its optimizer."""

    def __init__(
        self,
        schedule: Any,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        workload: Workload,
        place: Place,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._schedule = schedule
        self.module = module
        self.optimizer = optimizer
        self._count = place.micro_batches
        self._batches = itertools.cycle(workload.batches)
        self._is_first = is_first
        self._is_last = is_last

    def step(self) -> Tensor | None:
        """Run the schedule over a whole batch, and step; return the loss where the model ends."""
        pairs = list(itertools.islice(self._batches, self._count))
        device = bench_device()
        inputs, labels = (torch.cat(parts).to(device) for parts in zip(*pairs, strict=True))
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if self._is_first else []),
            target=labels if self._is_last else None,
            losses=losses,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean().detach() if losses else None


def _build_torch(
    workload: Workload,
    place: Place,
    *,
    schedule: Callable[..., Any],
    homes: Callable[[int], Sequence[int]],
    optimizer: str = "AdamW",
) -> Runner:
    """Build a schedule; ``homes`` is from the number of ranks to the rank of each part."""
    device = bench_device()
    ranks = homes(place.stages)
    parts = workload.parts(len(ranks))
    own = {index: parts[index].to(device) for index, rank in enumerate(ranks) if rank == place.rank}
    stages = [PipelineStage(part, index, len(ranks), device) for index, part in own.items()]
    made = schedule(
        stages if len(ranks) > place.stages else stages[0],
        place.micro_batches,
        loss_fn=workload.loss,
    )
    ends = {"is_first": 0 in own, "is_last": len(ranks) - 1 in own}
    whole = nn.ModuleList(own.values())
    return TorchRunner(
        made, whole, build_optimizer(workload, optimizer, whole), workload, place, **ends
    )


def _build_deepspeed(
    workload: Workload,
    place: Place,
    *,
    kind: Any = deepspeed.PipelineModule,
    chunks: int = 1,
    optimizer: str = "AdamW",
) -> Runner:
    """Build DeepSpeed's engine; each rank holds so many parts."""
    module = _module(kind, workload, place, parts=chunks * place.stages)
    config = _config(workload, place)
    given = {}
    if optimizer == "Muon":  # the same as in the other systems, not DeepSpeed's own
        del config["optimizer"]
        given["optimizer"] = make_muon(module, workload.optimizer_params(optimizer))
    engine = _initialize(deepspeed.initialize, module, config, **given)
    return EngineRunner(engine, workload.batches, record_actions(engine, place).take)


def build_wavemare(
    workload: Workload,
    place: Place,
    *,
    optimizer: str = "AdamW",
    guard: Mapping[str, Any] | None = None,
    **options: Any,
) -> Runner:
    """Build our engine.

    Args:
        workload: The model, its loss and its micro-batches.
        place: Of this rank.
        optimizer: Which steps; if the policy makes Muon of AdamW, Muon.
        guard: Section ``guard``.
        options: Of section ``pipeline``.
    """
    pipeline = {"stages": place.stages, **options}
    homes = homes_of(PipelineConfig.parse(pipeline), place.stages)
    make = partial(ChunkedPipelineModule, homes=homes)
    module = _module(make, workload, place, parts=len(homes))
    config = _config(workload, place)
    config["wavemare"] = {"pipeline": pipeline, "guard": dict(guard or {})}
    if options.get("pipemare", {}).get("optimizer_policy") == "auto":
        config["optimizer"]["params"]["lr"] = workload.optimizer_params(optimizer)["lr"]
    elif optimizer != "AdamW":
        params = workload.optimizer_params(optimizer)
        config["optimizer"] = {"type": optimizer, "params": params}
    engine = _initialize(wavemare.initialize, module, config)
    return EngineRunner(engine, workload.batches, record_engine(engine))


_STASHING = {"discrepancy_correction": {"mode": "exact"}}
_BUILDERS: Mapping[str, Callable[..., Runner]] = {
    BASELINE: _build_deepspeed,
    "deepspeed-dualpipev": partial(_build_deepspeed, kind=DualPipeVModule, chunks=2),
    "torch-1f1b": partial(_build_torch, schedule=Schedule1F1B, homes=range),
    "torch-interleaved": partial(
        _build_torch, schedule=ScheduleInterleaved1F1B, homes=partial(loop, chunks=2)
    ),
    "torch-zbv": partial(_build_torch, schedule=ScheduleZBVZeroBubble, homes=vee),
    "wavemare-1f1b": partial(build_wavemare, schedule="1f1b"),
    "wavemare-interleaved": partial(build_wavemare, schedule="interleaved"),
    "wavemare-zb-h1": partial(build_wavemare, schedule="zb-h1"),
    "wavemare-zbv": partial(build_wavemare, schedule="zbv"),
    "wavemare-auto-v": partial(build_wavemare, schedule="auto"),
    "wavemare-auto-v-0.63x": partial(build_wavemare, schedule="auto", memory_limit="0.63x"),
    "wavemare-pipemare": partial(build_wavemare, schedule="pipemare"),
    "wavemare-pipemare-slack": partial(build_wavemare, schedule="pipemare", pipemare={"slack": 1}),
    "wavemare-pipemare-auto": partial(
        build_wavemare,
        schedule="pipemare",
        optimizer="Muon",
        pipemare={"optimizer_policy": "auto"},
    ),
    "wavemare-1f1b-soap": partial(build_wavemare, schedule="1f1b", optimizer="SOAP"),
    f"{BASELINE}-muon": partial(_build_deepspeed, optimizer="Muon"),
    "torch-zbv-muon": partial(
        _build_torch, schedule=ScheduleZBVZeroBubble, homes=vee, optimizer="Muon"
    ),
    "wavemare-auto-v-muon": partial(build_wavemare, schedule="auto", optimizer="Muon"),
    "wavemare-pipemare-muon": partial(
        build_wavemare, schedule="pipemare", optimizer="Muon", pipemare=_STASHING
    ),
    "wavemare-pipemare-soap": partial(
        build_wavemare, schedule="pipemare", optimizer="SOAP", pipemare=_STASHING
    ),
    BOUND: BoundRunner,
}
BUILDERS: Mapping[str, Callable[[Workload, Place], Runner]] = {
    **_BUILDERS,
    **{
        name: partial(_BUILDERS[name.removesuffix(UNGUARDED)], guard={"nonfinite": "off"})
        for name in SYSTEMS
        if name.endswith(UNGUARDED)
    },
}
"""By the name of the system. All ranks build a system together."""


def _module(kind: Any, workload: Workload, place: Place, *, parts: int) -> Any:
    with redirect_stdout(io.StringIO()):  # DeepSpeed prints its topology
        return kind(
            layers=workload.parts(parts),
            num_stages=place.stages,
            loss_fn=workload.loss,
            partition_method="uniform",  # one part for each stage, or two
        )


def _config(workload: Workload, place: Place) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": len(workload.batches[0][0]),
        "gradient_accumulation_steps": place.micro_batches,
        "optimizer": {
            "type": "AdamW",
            "params": {**workload.optimizer_params("AdamW"), "torch_adam": True},
        },
        "steps_per_print": None,
        **workload.settings,
    }


def _initialize(
    initialize: Callable[..., Any], module: Any, config: dict[str, Any], **given: Any
) -> Any:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return initialize(model=module, model_parameters=parameters, config=config, **given)[0]


def record_engine(engine: Any) -> Take:
    """Have our engine record its actions; return a function that takes the events so far."""
    engine.recorder.keeping = True

    def take() -> list[Event]:
        events, engine.recorder.events = engine.recorder.events, []
        return list(events)

    return take


def record_actions(engine: Any, place: Place) -> Recorder:
    """Record each instruction of an engine of DeepSpeed by wrapping its table of instructions."""
    recorder = Recorder(place.micro_batches)

    def noted(kind: Kind, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, **arguments: Any) -> Any:
            # Of the two parts of a V-shaped pipeline's rank, phase 1 is the later one.
            second = arguments.get("phase", 0) == 1
            stage = 2 * place.stages - 1 - place.rank if second else place.rank
            return recorder.timed(kind, stage, method)(self, **arguments)

        return call

    engine._INSTRUCTION_MAP = {
        instruction: noted(_KINDS[instruction], method) if instruction in _KINDS else method
        for instruction, method in engine._INSTRUCTION_MAP.items()
    }
    return recorder
