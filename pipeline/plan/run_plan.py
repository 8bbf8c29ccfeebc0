# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps that a pipeline engine runs, taken from plans that `check` has proved.

A run is a sequence of optimizer steps. It begins with an empty pipeline and drains it at the end,
or never. The middle steps of a long run are alike: the checked plan has one of them, and the
engine repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.automatic import EQUAL_PASSES
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.chunked import loop, vee
from wavemare.pipeline.plan.lowering import ahead
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.plan.schedules import (
    OVERLAP_SLACK,
    SCHEDULES,
    overlapped_one_f_one_b,
    pipemare,
)

_CHUNKS = 2


def homes_of(config: PipelineConfig, num_ranks: int) -> tuple[int, ...]:
    """Return for each stage of a configuration's schedule its rank."""
    if config.schedule == "interleaved":
        return loop(num_ranks, config.chunks or _CHUNKS)
    return vee(num_ranks) if config.schedule in ("zbv", "auto") else tuple(range(num_ranks))


@dataclass(frozen=True)
class RunPlan:
    """The plan of all runs of one pipeline.

    Args:
        num_stages: Length of the pipeline in ranks.
        micro_batches: Per optimizer step.
        schedule: Of the engine; but for PipeMare each run is one step.
        overlap: See `overlap_forward_backward`.
        norms: Whether stages exchange gradient norms.
        correct: See `Versions`.
        slack: See `ahead`.
        chunks: Stages per rank of an interleaved schedule.
        memory_limit: Of the schedule ``auto``; see `automatic`.
        costs: The same.
    """

    num_stages: int
    micro_batches: int
    schedule: str = "1f1b"
    overlap: bool = False
    norms: bool = False
    correct: bool = False
    slack: int = 0
    chunks: int = 0
    memory_limit: float = 1.0
    costs: Costs = EQUAL_PASSES

    @classmethod
    def of(
        cls, config: PipelineConfig, num_stages: int, micro_batches: int, *, clips: bool
    ) -> RunPlan:
        """Return the plan for a configuration; ``clips`` says whether gradients are clipped."""
        overlap, settings = config.overlap_forward_backward, config.pipemare
        sizes = num_stages, micro_batches, config.schedule
        if not config.is_asynchronous:
            chunks = (config.chunks or _CHUNKS) if config.schedule == "interleaved" else 0
            slack = OVERLAP_SLACK if overlap else 0
            limit = config.memory_share
            if config.memory_bytes is not None:  # the least, until stages are measured
                limit = 1 / min(num_stages, micro_batches)
            return cls(*sizes, overlap=overlap, slack=slack, chunks=chunks, memory_limit=limit)
        return cls(
            *sizes,
            overlap=overlap,
            norms=clips,
            correct=settings.discrepancy_correction.mode not in ("off", "predict"),
            slack=settings.slack,
        )

    def check(self, *, warmup_steps: int = 0, drain_interval: int = 0) -> None:
        """Prove the runs that the settings ask for; others are proved when they begin.

        Args:
            warmup_steps: So many first runs have one step.
            drain_interval: Steps of each run after them; 0 for no end.

        Raises:
            PlanError: A number is out of range, or a plan is wrong.
        """
        if warmup_steps or not self._is_asynchronous:
            _checked(self, 1)
        if self._is_asynchronous:
            _checked(self, min(drain_interval or self._longest, self._longest))

    def step(
        self, stage: int, number: int, left: int | None, *, first: int = 0, version: int = 0
    ) -> Sequence[Action]:
        """Return a stage's actions of one optimizer step.

        Args:
            stage: Counted from 0.
            number: Steps of the run before this one.
            left: Steps until the pipeline is empty, this one included; None if it never is.
            first: First micro-batch of the step.
            version: Of the stage's weights.

        Raises:
            PlanError: A number is out of range, or the plan is wrong.
        """
        num_steps, index = self._place(number, left)
        actions = _step_of(self, stage, num_steps, index)
        return _shifted(actions, first - index * self.micro_batches, version - index)

    def unreceived(self, stage: int, left: int | None) -> range:
        """Return which activations are in flight to this stage when a step ends.

        Args:
            stage: Counted from 0.
            left: See `step`.

        Returns:
            Their micro-batches, counted from the first one of the next step.
        """
        if stage == 0:
            return range(0)
        before, own = (ahead(s, self.num_stages, self.slack) for s in (stage - 1, stage))
        if left is None:
            return range(own, before)
        rest = (left - 1) * self.micro_batches  # of the run, after the step
        return range(min(own, rest), min(before, rest))

    @property
    def whole(self) -> Plan:
        """The plan of a run of one step, proved.

        Raises:
            PlanError: A number is out of range, or the plan is wrong.
        """
        return _checked(self, 1)

    @property
    def _is_asynchronous(self) -> bool:
        return self.schedule == "pipemare"

    @cached_property
    def _delay(self) -> int:
        """The first stage's maximum staleness in optimizer steps."""
        return -(-ahead(0, self.num_stages, self.slack) // self.micro_batches)

    @cached_property
    def _longest(self) -> int:
        """Steps of the longest checked plan: to fill the pipeline, one to repeat, to drain it."""
        return 2 * self._delay + 1

    def _place(self, number: int, left: int | None) -> tuple[int, int]:
        """Return the length of the checked plan with such a step, and the step's index there."""
        longest = self._longest
        if left is not None and number + left <= longest:
            return number + left, number
        from_end = 0 if left is None else longest - left
        return longest, max(min(number, self._delay), from_end)

    def _plan(self, num_steps: int) -> Plan:
        if not self._is_asynchronous:
            make = overlapped_one_f_one_b if self.overlap else SCHEDULES[self.schedule]
            options: dict[str, Any] = {"chunks": self.chunks} if self.chunks else {}
            if self.schedule == "auto":
                options = {"costs": self.costs, "memory_limit": self.memory_limit}
            return make(self.num_stages, self.micro_batches, num_steps, **options)
        return pipemare(
            self.num_stages,
            self.micro_batches,
            num_steps,
            norms=self.norms,
            correct=self.correct,
            slack=self.slack,
            overlap=self.overlap,
        )


@lru_cache(maxsize=16)
def _checked(run: RunPlan, num_steps: int) -> Plan:
    plan = run._plan(num_steps)
    check(plan)
    return plan


@lru_cache(maxsize=64)
def _step_of(run: RunPlan, stage: int, num_steps: int, index: int) -> Sequence[Action]:
    """Return a stage's actions of one step of a checked plan."""
    actions = _checked(run, num_steps).ranks[stage]
    ends = [0, *(n + 1 for n, action in enumerate(actions) if action.kind is Kind.STEP)]
    return actions[ends[index] : ends[index + 1]]


def _shifted(actions: Sequence[Action], micro_batches: int, versions: int = 0) -> Sequence[Action]:
    if not micro_batches and not versions:
        return actions
    return [
        Action(kind, stage, number + micro_batches, version + versions, wave)
        for kind, stage, number, version, wave in actions
    ]
