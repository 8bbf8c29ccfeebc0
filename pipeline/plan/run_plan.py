# SPDX-License-Identifier: Apache-2.0
"""The optimizer steps that a pipeline engine runs, taken from plans that `check` has proved.

A run is a sequence of optimizer steps. It begins with an empty pipeline and drains it at its end,
if it has one. The middle steps of a long run are alike: the checked plan has one of them, and the
engine repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path

from wavemare.pipeline.clock.simulate import Costs
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.automatic import EQUAL_PASSES
from wavemare.pipeline.plan.check import check
from wavemare.pipeline.plan.files import GivenPlan, plan_of, read_plan
from wavemare.pipeline.plan.orders import ahead
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.plan.schedules import CHUNKS, SCHEDULES

_SCHEDULE_KEY = "wavemare.pipeline.schedule"


def homes_of(config: PipelineConfig, num_ranks: int) -> tuple[int, ...]:
    """Return for each stage of a configuration's schedule its rank; not for plans in files."""
    return SCHEDULES[config.schedule].homes(num_ranks, config.chunks or CHUNKS)


@dataclass(frozen=True)
class RunPlan:
    """The plan of all runs of one pipeline.

    Args:
        num_stages: Number of ranks of the pipeline, each of which may have several stages of the
            model. The name is that of DeepSpeed's engine.
        micro_batches: Per optimizer step.
        schedule: Its name in `SCHEDULES`; except with PipeMare, each run is one step.
        norms: Whether stages exchange gradient norms.
        correct: See `lower`.
        slack: See `ahead`.
        chunks: Stages per rank of an interleaved schedule.
        memory_limit: Of the schedule ``auto``; see `automatic`.
        costs: The same.
        plan: A proved plan of one step, in place of the schedule's.
    """

    num_stages: int
    micro_batches: int
    schedule: str = "1f1b"
    norms: bool = False
    correct: bool = False
    slack: int = 0
    chunks: int = CHUNKS
    memory_limit: float = 1.0
    costs: Costs = EQUAL_PASSES
    plan: Plan | None = None

    @classmethod
    def of(
        cls,
        config: PipelineConfig,
        num_ranks: int,
        micro_batches: int,
        *,
        clips: bool,
        plan: GivenPlan | None = None,
    ) -> RunPlan:
        """Return the plan for a configuration.

        Args:
            config: The section ``pipeline``.
            num_ranks: Length of the pipeline.
            micro_batches: Per optimizer step.
            clips: Whether gradients are clipped.
            plan: The caller's, in place of the schedule; see `plan_of`.

        Raises:
            ConfigError: The schedule is a file that cannot be read.
            PlanError: The plan given, or that in the file, is wrong.
        """
        sizes = num_ranks, micro_batches
        if plan is not None:
            return cls(*sizes, plan=plan_of(plan, *sizes))
        if config.file is not None:
            given = read_plan(Path(config.file), _SCHEDULE_KEY)
            return cls(*sizes, plan=plan_of(given, *sizes, key=_SCHEDULE_KEY))
        if not config.is_asynchronous:
            chunks = config.chunks or CHUNKS
            return cls(
                *sizes,
                config.schedule,
                slack=config.slack or 0,
                chunks=chunks,
                memory_limit=config.memory_share,
            )
        settings = config.pipemare
        return cls(
            *sizes,
            config.schedule,
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
        if warmup_steps or not self.is_asynchronous:
            _checked(self, 1)
        if self.is_asynchronous:
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

    def read_ahead(self, left: int | None) -> int:
        """Return how many micro-batches of later steps the first stage has read when a step ends.

        Args:
            left: See `step`.
        """
        most = ahead(0, self.num_stages, self.slack)
        return most if left is None else min(most, (left - 1) * self.micro_batches)

    @property
    def whole(self) -> Plan:
        """The plan of a run of one step, proved.

        Raises:
            PlanError: A number is out of range, or the plan is wrong.
        """
        return _checked(self, 1)

    @property
    def homes(self) -> tuple[int, ...]:
        """For each stage its rank."""
        if self.plan is not None:
            return tuple(self.plan.rank_of)
        return SCHEDULES[self.schedule].homes(self.num_stages, self.chunks)

    @property
    def send_slots(self) -> int:
        """The plan's `Plan.send_slots`, of runs of any length."""
        return self.whole.send_slots

    @property
    def is_asynchronous(self) -> bool:
        """Whether stages step by themselves, and the pipeline is not emptied at each step."""
        return self.plan is None and not SCHEDULES[self.schedule].flushes

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

    def _make(self, num_steps: int) -> Plan:
        """Make the plan of a run of so many steps; a given plan has one."""
        if self.plan is not None:
            return self.plan
        row = SCHEDULES[self.schedule]
        options = {f.name: getattr(self, f.name) for f in fields(self) if f.name in row.options}
        return row.make(self.num_stages, self.micro_batches, num_steps, **options)


@lru_cache(maxsize=16)
def _checked(run: RunPlan, num_steps: int) -> Plan:
    plan = run._make(num_steps)
    if plan is not run.plan:
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
        Action(kind, stage, number + micro_batches, version + versions)
        for kind, stage, number, version in actions
    ]
