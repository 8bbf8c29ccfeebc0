# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks pipeline``, and its systems."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.request import GptRequest, NonNegative, Positive, Waits
from wavemare.cli.options import check_names, option
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row
from wavemare.pipeline.config import Schedule

BASELINE = "deepspeed-1f1b"
BOUND = "no-communication-bound"
_FORWARD_MS, _BACKWARD_MS = 10.0, 20.0
_ROUND_MICRO_BATCHES = 8


def _always_one(stages: int, micro_batches: int) -> float:
    return 1.0


def _without_bubble(stages: int, micro_batches: int) -> float:
    # 1F1B takes M + P - 1 slots for the M micro-batches of each stage.
    return (micro_batches + stages - 1) / micro_batches


def _by_plan(schedule: Schedule, limit: float = 1.0) -> Callable[[int, int], float]:
    """Return the ideal of a schedule whose passes F, I and W take equally long."""

    def ideal(stages: int, micro_batches: int) -> float:
        # Imported late: commands that run no plan start faster.
        from wavemare.pipeline.clock.simulate import Costs, simulate
        from wavemare.pipeline.plan.run_plan import RunPlan

        plan = RunPlan(stages, micro_batches, schedule, memory_limit=limit).whole
        each = stages / plan.num_stages
        timeline = simulate(plan, Costs(forward_s=each, backward_s=2 * each, weight_s=each))
        return 3 * (micro_batches + stages - 1) / timeline.makespan_s

    return ideal


@dataclass(frozen=True, kw_only=True)
class System:
    """A pipeline.

    Args:
        ideal: From (stages, micro-batches) to the theoretical ratio to 1F1B with one device per
            stage; None where it depends on more.
        parts_per_stage: Parts of the model on a rank.
        least: From stages to the fewest micro-batches of a step.
        in_rounds: Whether micro-batches come in rounds of as many as there are stages.
        steady: Whether steps overlap, so that only the rate between full steps is meaningful.
        on_request: Whether it is measured only if it is named.
        optimizer: Which steps the weights.
    """

    ideal: Callable[[int, int], float] | None = None
    parts_per_stage: int = 1
    least: Callable[[int], int] = lambda stages: 1
    in_rounds: bool = False
    steady: bool = False
    on_request: bool = False
    optimizer: str = "AdamW"


_GUARDED: Mapping[str, System] = {
    BASELINE: System(ideal=_always_one),
    "deepspeed-dualpipev": System(parts_per_stage=2, least=lambda stages: 2 * stages),
    "torch-1f1b": System(ideal=_always_one, least=lambda stages: stages),
    "torch-interleaved": System(ideal=_by_plan("interleaved"), parts_per_stage=2, in_rounds=True),
    "torch-zbv": System(parts_per_stage=2),
    "wavemare-1f1b": System(ideal=_always_one, on_request=True),
    "wavemare-interleaved": System(
        ideal=_by_plan("interleaved"), parts_per_stage=2, in_rounds=True
    ),
    "wavemare-zb-h1": System(ideal=_by_plan("zb-h1")),
    "wavemare-zbv": System(ideal=_by_plan("zbv"), parts_per_stage=2),
    "wavemare-auto-v": System(ideal=_by_plan("auto"), parts_per_stage=2),
    "wavemare-auto-v-0.63x": System(
        ideal=_by_plan("auto", 0.63),
        parts_per_stage=2,
        least=lambda stages: 2,  # of one micro-batch there is no share
        on_request=True,
    ),
    "wavemare-pipemare": System(ideal=_without_bubble, steady=True),
    "wavemare-pipemare-slack": System(ideal=_without_bubble, steady=True),
    "wavemare-pipemare-auto": System(ideal=_without_bubble, steady=True, optimizer="Muon"),
    "wavemare-1f1b-soap": System(on_request=True, optimizer="SOAP"),
    f"{BASELINE}-muon": System(on_request=True, optimizer="Muon"),
    "torch-zbv-muon": System(parts_per_stage=2, on_request=True, optimizer="Muon"),
    "wavemare-auto-v-muon": System(parts_per_stage=2, on_request=True, optimizer="Muon"),
    "wavemare-pipemare-muon": System(steady=True, on_request=True, optimizer="Muon"),
    "wavemare-pipemare-soap": System(steady=True, on_request=True, optimizer="SOAP"),
    BOUND: System(ideal=_without_bubble, steady=True),
}

OURS = "wavemare-"
"""How the names of wavemare's systems begin."""
UNGUARDED = "-unguarded"
"""How the name of one of them ends if it does not look for numbers that are not finite."""


def _with_unguarded(systems: Mapping[str, System]) -> Iterator[tuple[str, System]]:
    for name, system in systems.items():
        yield name, system
        if name.startswith(OURS):
            yield name + UNGUARDED, replace(system, on_request=True)


SYSTEMS: Mapping[str, System] = dict(_with_unguarded(_GUARDED))
"""By name, in the order of the rows."""

DEFAULT_SYSTEMS = tuple(name for name, system in SYSTEMS.items() if not system.on_request)


class PipelineRequest(GptRequest):
    """Measure the time per optimizer step of pipelines on the same model.

    Ratios are to stock DeepSpeed's 1F1B.

    For example: python -m benchmarks pipeline --stages 2 --micro-batches 1,4 --json result.json
    """

    measured_by: ClassVar[str] = "benchmarks.pipeline.measure:measure"
    on_cpu: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, Column]] = {
        "M": Column("micro_batches", "g"),
        "system": Column("system"),
        "ms/step": Column("median_s", ".1f", 1000),
        "cpu ms": Column("cpu_s", ".2f", 1000),
        "ratio": Column("ratio", ".2f"),
        "ideal": Column("ideal", ".2f"),
        "bound": Column("bound_fraction", ".3f"),
        "waiting": Column("waiting", ".1%"),
        "busy": Column("busy", ".1%"),
    }

    stages: Annotated[int, Field(ge=2)] = 2
    """Pipeline ranks, one process each."""

    micro_batches: tuple[PositiveInt, ...] = (1, 2, 4, 8)
    """Micro-batches per optimizer step, one or several numbers."""

    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    """Systems to measure."""

    rounds: PositiveInt = 7

    steps_per_round: PositiveInt | None = None
    """Optimizer steps of a system in a round; by default 8 micro-batches, and at least 2 steps."""

    trace: Path | None = None
    """Write the last round's timelines into this folder: a picture, and a trace for Perfetto."""

    synthetic: bool = False
    """Stages sleep instead of computing, so that many share few cores."""

    forward_ms: Positive = _FORWARD_MS
    """With --synthetic: milliseconds of a stage's forward pass."""

    backward_ms: Positive = _BACKWARD_MS
    """With --synthetic: milliseconds of a stage's backward pass."""

    weight_ms: Positive | None = None
    """With --synthetic: the part of --backward-ms for the weight's gradient; by default half."""

    adamw_ms: NonNegative = 0.0
    """With --synthetic: milliseconds of a stage's optimizer step with AdamW."""

    muon_ms: NonNegative = 0.0
    """The same with Muon, and with its error feedback."""

    soap_ms: NonNegative = 0.0
    """The same with SOAP."""

    @property
    def num_ranks(self) -> int:
        """One process for each stage."""
        return self.stages

    @property
    def step_s(self) -> dict[str, float]:
        """The sleep of a synthetic stage in its optimizer step, by the optimizer."""
        milliseconds = {"AdamW": self.adamw_ms, "Muon": self.muon_ms, "SOAP": self.soap_ms}
        return {name: value / 1000 for name, value in milliseconds.items()}

    @property
    def waits(self) -> Waits:
        """The sleep of a synthetic stage."""
        weight_ms = self.backward_ms / 2 if self.weight_ms is None else self.weight_ms
        parts = self.forward_ms, self.backward_ms - weight_ms, weight_ms
        return Waits(*(milliseconds / 1000 for milliseconds in parts))

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        if not self.micro_batches:
            remedy = "Give numbers such as 1,2,4,8"
            raise ConfigError("--micro-batches", [], "there is nothing to measure", remedy)
        check_names("--systems", self.systems, SYSTEMS)
        for name in (name for name in type(self).model_fields if name.endswith("_ms")):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not self.synthetic:
                reason = "only synthetic stages have it"
                raise ConfigError(option(name), value, reason, "Add --synthetic")
        if self.waits.input_s < 0:
            reason = f"it is a part of --backward-ms, {self.backward_ms:g}"
            raise ConfigError("--weight-ms", self.weight_ms, reason, "Give a smaller number")
        parts = max(SYSTEMS[name].parts_per_stage for name in self.systems) * self.stages
        if not self.synthetic and self.layers < parts:
            reason = f"{self.stages} stages of these systems need {parts} blocks"
            raise ConfigError("--layers", self.layers, reason, f"Give {parts} or more")
        if len(self.skipped()) == len(self.systems) * len(self.micro_batches):
            reasons = dict.fromkeys(f"{row['system']}: {row['reason']}" for row in self.skipped())
            raise ConfigError(
                "--micro-batches",
                list(self.micro_batches),
                "; ".join(reasons),
                "Give more micro-batches or other systems",
            )

    def obstacle(self, system: str, micro_batches: int) -> str | None:
        """Return why a system cannot be measured at a number of micro-batches, or None."""
        least = SYSTEMS[system].least(self.stages)
        if micro_batches < least:
            return f"it needs at least {least} micro-batches for {self.stages} stages"
        if SYSTEMS[system].in_rounds and micro_batches % self.stages:
            return f"it needs a multiple of {self.stages} micro-batches"
        return None

    def skipped(self) -> list[dict[str, Any]]:
        """Return the measurements that are impossible, with the reasons."""
        return [
            {"system": name, "stages": self.stages, "micro_batches": count, "reason": reason}
            for count in self.micro_batches
            for name in self.systems
            if (reason := self.obstacle(name, count)) is not None
        ]

    def steps(self, micro_batches: int) -> int:
        """Return the timed optimizer steps of a round."""
        return self.steps_per_round or max(2, math.ceil(_ROUND_MICRO_BATCHES / micro_batches))

    def fill(self, system: str, micro_batches: int) -> int:
        """Return the steps that fill the pipeline before the timed ones, and keep it full after."""
        return math.ceil(self.stages / micro_batches) if SYSTEMS[system].steady else 0

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        stages = ", ".join(f"{1000 * seconds:.1f}" for seconds in result["stage_s"])
        return (
            f"{self.stages} stages of {stages} ms per micro-batch "
            f"(the slowest is {result['imbalance']:.1%} above the mean)"
        )

    def case(self, row: Row) -> str:
        """Return the number of micro-batches."""
        return f"M={row['micro_batches']}"
