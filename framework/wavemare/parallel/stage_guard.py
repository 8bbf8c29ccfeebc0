# SPDX-License-Identifier: Apache-2.0
"""Watching a balanced pipeline: whether stages take as long as was measured before training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe import schedule
from numpy.typing import NDArray
from torch import distributed as dist

from wavemare.engine.window import INSTRUCTIONS
from wavemare.parallel.balance import plan_stages
from wavemare.parallel.guard import STEPS
from wavemare.parallel.plan import ParallelPlan
from wavemare.pipeline.action import Kind

__all__ = ["StageGuard", "StageVerdict"]

_ERROR = 0.2
# Of DeepSpeed's schedule and of ours.
_PASSES = {
    schedule.ForwardPass: Kind.FORWARD,
    schedule.BackwardPass: Kind.BACKWARD,
    INSTRUCTIONS[Kind.FORWARD]: Kind.FORWARD,
    INSTRUCTIONS[Kind.BACKWARD]: Kind.BACKWARD,
}


class StageVerdict(NamedTuple):
    """What was measured of a pipeline's plan.

    Args:
        predicted_s: For each stage the predicted seconds of a micro-batch, both passes.
        measured_s: The measured ones of its slowest replica, medians.
        plan: A better plan by what was measured; None if the present one is as good.
    """

    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    plan: ParallelPlan | None

    @property
    def error(self) -> float:
        """The largest relative error of a prediction."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return max(abs(measured / predicted - 1) for predicted, measured in pairs)

    def __str__(self) -> str:
        stages = ", ".join(
            f"stage {stage}: {measured * 1e3:.3g} ms (predicted {predicted * 1e3:.3g})"
            for stage, (predicted, measured) in enumerate(
                zip(self.predicted_s, self.measured_s, strict=True)
            )
        )
        return f"micro-batch, {stages}; off by {self.error:.0%} at most"


class StageGuard:
    """Times the passes of the first 20 steps, and plans anew if a stage is off by more than 20 %.

    Weights stay where they are: the new plan is for a start from a universal checkpoint.

    Args:
        engine: A pipeline that runs the plan.
        plan: With its prediction.
        table: Of `measure_layers`: seconds, (ranks, layers).
        batch: DeepSpeed's three batch sizes by their keys.
    """

    def __init__(
        self,
        engine: Any,
        plan: ParallelPlan,
        table: NDArray[np.float64],
        batch: Mapping[str, int],
    ) -> None:
        self._engine, self._plan, self._table, self._batch = engine, plan, table, batch
        self._steps = 0
        self._seconds: dict[Kind, list[float]] = {Kind.FORWARD: [], Kind.BACKWARD: []}
        self._methods = engine._INSTRUCTION_MAP
        self._time_tokens(True)
        engine._INSTRUCTION_MAP = {
            instruction: self._timed(_PASSES[instruction], method)
            if instruction in _PASSES
            else method
            for instruction, method in self._methods.items()
        }

    def after_step(self) -> StageVerdict | None:
        """Count an optimizer step; return the verdict when the plan has just been judged."""
        self._steps += 1
        if self._steps != STEPS:
            return None
        self._engine._INSTRUCTION_MAP = self._methods
        self._time_tokens(False)
        own = sum(median(seconds[1:] or seconds) for seconds in self._seconds.values())
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return self._judge(np.array(found))

    def _judge(self, found: NDArray[np.float64]) -> StageVerdict:
        plan = self._plan
        assert plan.predicted is not None  # it was made by measuring
        assert plan.cuts is not None
        measured = found.reshape(plan.stages, plan.data_parallel)
        verdict = StageVerdict(plan.predicted.stage_s, tuple(measured.max(axis=1).tolist()), None)
        if verdict.error <= _ERROR:
            return verdict
        table = self._table.copy()
        for rank, seconds in enumerate(found):
            stage, replica = divmod(rank, plan.data_parallel)
            layers = table[rank, plan.cuts[stage] : plan.cuts[stage + 1]].sum()
            share = plan.shares[replica] / plan.micro_batch
            table[rank] *= seconds / (layers * share)
        better = plan_stages(
            table,
            self._batch,
            stages=plan.stages,
            schedule=plan.schedule,
            zero_stage=plan.zero_stage,
        )
        return verdict if better.digest == plan.digest else verdict._replace(plan=better)

    def _timed(self, kind: Kind, method: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            started = self._now()
            method(*args, **kwargs)
            self._seconds[kind].append(self._now() - started)

        return run

    def _now(self) -> float:
        """Return the seconds so far, without those in which replicas have summed their tokens."""
        get_accelerator().synchronize()
        balance = self._engine._balance
        return time.perf_counter() - (0.0 if balance is None else balance.waited_s)

    def _time_tokens(self, timed: bool) -> None:
        if self._engine._balance is not None:
            self._engine._balance.timed = timed
