# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipeline engines, and ours, as measured systems."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from typing import Any

import deepspeed
from deepspeed.runtime.pipe import schedule

import wavemare
from wavemare.bench.recorder import EventSource, Recorder
from wavemare.bench.runner import ADAMW, Place, Runner
from wavemare.bench.workload import Workload
from wavemare.engine.observe.recorder import Recorder as EngineRecorder
from wavemare.pipeline.clock.timeline import Event
from wavemare.pipeline.plan.action import Kind

__all__ = [
    "build_dualpipev",
    "build_one_f_one_b",
    "build_pipemare",
    "build_soap",
    "record_actions",
]

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
    """An engine that trains by ``train_batch``.

    Args:
        engine: A pipeline engine.
        workload: Where the micro-batches come from.
        recorder: What notes the engine's actions.
    """

    def __init__(self, engine: Any, workload: Workload, recorder: EventSource) -> None:
        self.engine = engine
        self.recorder = recorder
        self._batches = itertools.cycle(workload.batches)

    def step(self) -> None:
        """Train one batch."""
        self.engine.train_batch(self._batches)


class AsynchronousRunner(EngineRunner):
    """Our engine, which has micro-batches under way between steps."""

    def __init__(self, engine: Any, workload: Workload) -> None:
        engine.recorder.keeping = True
        super().__init__(engine, workload, _Kept(engine.recorder))

    def settle(self) -> None:
        """Empty the pipeline."""
        self.engine.drain()


class _Kept:
    """The engine's own recorder as a source of events."""

    def __init__(self, recorder: EngineRecorder) -> None:
        self._recorder = recorder

    def take(self) -> list[Event]:
        events, self._recorder.events = self._recorder.events, []
        return events


def build_one_f_one_b(workload: Workload, place: Place) -> Runner:
    """Return stock DeepSpeed's pipeline."""
    module = _module(deepspeed.PipelineModule, workload, place, parts=place.stages)
    engine = _initialize(deepspeed.initialize, module, _config(workload, place))
    return EngineRunner(engine, workload, record_actions(engine, place))


def build_soap(workload: Workload, place: Place) -> Runner:
    """Return 1F1B with SOAP: ours, as stock DeepSpeed has no such optimizer."""
    module = _module(deepspeed.PipelineModule, workload, place, parts=place.stages)
    config = _config(workload, place) | {"optimizer": {"type": "SOAP", "params": ADAMW}}
    config["wavemare"] = {"pipeline": {"schedule": "1f1b", "stages": place.stages}}
    engine = _initialize(wavemare.initialize, module, config)
    engine.recorder.keeping = True
    return EngineRunner(engine, workload, _Kept(engine.recorder))


def build_dualpipev(workload: Workload, place: Place) -> Runner:
    """Return stock DeepSpeed's DualPipeV, each rank holding two of twice as many parts."""
    from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

    module = _module(DualPipeVModule, workload, place, parts=2 * place.stages)
    engine = _initialize(deepspeed.initialize, module, _config(workload, place))
    return EngineRunner(engine, workload, record_actions(engine, place))


def build_pipemare(
    workload: Workload, place: Place, *, guard: Mapping[str, Any] | None = None, **pipemare: Any
) -> Runner:
    """Return our asynchronous pipeline.

    Args:
        workload: What is trained.
        place: Where this process stands.
        guard: Section against wrong numbers.
        pipemare: Settings of the schedule, such as ``slack=1``, which hides the latency of
            messages, or ``optimizer_policy="auto"``.
    """
    module = _module(deepspeed.PipelineModule, workload, place, parts=place.stages)
    pipeline = {"schedule": "pipemare", "stages": place.stages, "pipemare": pipemare}
    section = {"pipeline": pipeline, "guard": dict(guard or {})}
    config = {**_config(workload, place), "wavemare": section}
    return AsynchronousRunner(_initialize(wavemare.initialize, module, config), workload)


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
        # Pipelines clip by default, which the systems that are not DeepSpeed's would not do.
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }


def _initialize(initialize: Callable[..., Any], module: Any, config: dict[str, Any]) -> Any:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return initialize(model=module, model_parameters=parameters, config=config)[0]


def record_actions(engine: Any, place: Place) -> Recorder:
    """Note each instruction of an engine; the table that it looks them up in is wrapped.

    Args:
        engine: A pipeline engine of DeepSpeed's schedules.
        place: Where this process stands.
    """
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
