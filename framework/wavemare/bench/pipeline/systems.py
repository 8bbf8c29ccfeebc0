# SPDX-License-Identifier: Apache-2.0
"""Pipelines of DeepSpeed, of ``torch.distributed.pipelining`` and of wavemare, ready to train."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

import wavemare
from wavemare.bench.pipeline.request import BASELINE, BOUND
from wavemare.bench.pipeline.runner import (
    ADAMW,
    GRADIENT_CLIPPING,
    BoundRunner,
    Place,
    Recorder,
    Runner,
    Take,
    Workload,
    build_optimizer,
)
from wavemare.bench.ranks import bench_device
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.pipeline.clock.simulate import Event
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.chunked import loop, vee
from wavemare.pipeline.plan.plan import Kind
from wavemare.pipeline.plan.run_plan import homes_of

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
        self.take = take
        self._batches = itertools.cycle(batches)

    def step(self) -> None:
        """Train one batch."""
        self.engine.train_batch(self._batches)

    def drain(self) -> None:
        """Finish all micro-batches of an asynchronous pipeline."""
        if hasattr(self.engine, "drain"):
            self.engine.drain()


class TorchRunner(Runner):
    """A schedule of torch, and an optimizer."""

    def __init__(
        self,
        schedule: Any,
        optimizer: torch.optim.Optimizer,
        workload: Workload,
        place: Place,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        self._schedule = schedule
        self.optimizer = optimizer
        self._count = place.micro_batches
        self._batches = itertools.cycle(workload.batches)
        self._is_first = is_first
        self._is_last = is_last

    def step(self) -> None:
        """Run the schedule over a whole batch, and step."""
        pairs = list(itertools.islice(self._batches, self._count))
        device = bench_device()
        inputs, labels = (torch.cat(parts).to(device) for parts in zip(*pairs, strict=True))
        self._schedule.step(
            *([inputs] if self._is_first else []),
            target=labels if self._is_last else None,
            return_outputs=False,
        )
        self.optimizer.step()
        self.optimizer.zero_grad()


def _build_torch(
    workload: Workload,
    place: Place,
    *,
    schedule: Callable[..., Any],
    homes: Callable[[int], Sequence[int]],
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
    return TorchRunner(made, build_optimizer(*own.values()), workload, place, **ends)


def _build_deepspeed(
    workload: Workload, place: Place, *, kind: Any = deepspeed.PipelineModule, chunks: int = 1
) -> Runner:
    """Build DeepSpeed's engine; each rank holds so many parts."""
    module = _module(kind, workload, place, parts=chunks * place.stages)
    engine = _initialize(deepspeed.initialize, module, _config(workload, place))
    return EngineRunner(engine, workload.batches, record_actions(engine, place).take)


def _build_wavemare(
    workload: Workload,
    place: Place,
    *,
    soap: bool = False,
    guard: Mapping[str, Any] | None = None,
    **options: Any,
) -> Runner:
    """Build our engine; ``options`` are those of its pipeline."""
    pipeline = {"stages": place.stages, **options}
    homes = homes_of(PipelineConfig.parse(pipeline), place.stages)
    make = partial(ChunkedPipelineModule, homes=homes)
    module = _module(make, workload, place, parts=len(homes))
    config = _config(workload, place)
    config["wavemare"] = {"pipeline": pipeline, "guard": dict(guard or {})}
    if soap:  # stock DeepSpeed has no such optimizer
        config["optimizer"] = {"type": "SOAP", "params": ADAMW}
    engine = _initialize(wavemare.initialize, module, config)
    return EngineRunner(engine, workload.batches, record_engine(engine))


BUILDERS: Mapping[str, Callable[[Workload, Place], Runner]] = {
    BASELINE: _build_deepspeed,
    "deepspeed-dualpipev": partial(_build_deepspeed, kind=DualPipeVModule, chunks=2),
    "torch-1f1b": partial(_build_torch, schedule=Schedule1F1B, homes=range),
    "torch-interleaved": partial(
        _build_torch, schedule=ScheduleInterleaved1F1B, homes=partial(loop, chunks=2)
    ),
    "torch-zbv": partial(_build_torch, schedule=ScheduleZBVZeroBubble, homes=vee),
    "wavemare-interleaved": partial(_build_wavemare, schedule="interleaved"),
    "wavemare-zb-h1": partial(_build_wavemare, schedule="zb-h1"),
    "wavemare-zbv": partial(_build_wavemare, schedule="zbv"),
    "wavemare-auto-v": partial(_build_wavemare, schedule="auto"),
    "wavemare-auto-v-0.63x": partial(_build_wavemare, schedule="auto", memory_limit="0.63x"),
    "wavemare-auto-v-unguarded": partial(
        _build_wavemare, schedule="auto", guard={"nonfinite": "off"}
    ),
    "wavemare-pipemare": partial(_build_wavemare, schedule="pipemare"),
    "wavemare-pipemare-slack": partial(_build_wavemare, schedule="pipemare", pipemare={"slack": 1}),
    "wavemare-pipemare-auto": partial(
        _build_wavemare, schedule="pipemare", pipemare={"optimizer_policy": "auto"}
    ),
    "wavemare-pipemare-unguarded": partial(
        _build_wavemare, schedule="pipemare", guard={"nonfinite": "off"}
    ),
    "wavemare-1f1b-soap": partial(_build_wavemare, schedule="1f1b", soap=True),
    BOUND: BoundRunner,
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
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "torch_adam": True}},
        "gradient_clipping": GRADIENT_CLIPPING,
        "steps_per_print": None,
    }


def _initialize(initialize: Callable[..., Any], module: Any, config: dict[str, Any]) -> Any:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return initialize(model=module, model_parameters=parameters, config=config)[0]


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
