# SPDX-License-Identifier: Apache-2.0
"""The schedule ``auto``: measures passes, and searches the plan that suits them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from deepspeed.accelerator import get_accelerator

from wavemare.engine.launch.group import gather
from wavemare.engine.observe.choices import tell_choice
from wavemare.engine.observe.progress import PROGRESS
from wavemare.pipeline.clock.simulate import Costs, Event, measured_costs, simulate
from wavemare.pipeline.plan.run_plan import RunPlan

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine

_MEASURED_STEPS = 3
"""They follow the first step, which is a warm-up."""


class PlanSearch:
    """Measures steps 2 to 4 of a run; from then on the plan for these times is taken.

    Meanwhile the host waits for the accelerator after each action.

    Args:
        engine: Its ranks search together.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine
        self._costs: Costs | None = None
        self._left = 1 + _MEASURED_STEPS
        self._events: list[Event] = []

    def applied_to(self, run: RunPlan) -> RunPlan:
        """Return a plan for the times that are known."""
        return run if self._costs is None else replace(run, costs=self._costs)

    def after_step(self) -> None:
        """Count a step, and search once all are measured; all ranks call it."""
        if not self._left:
            return
        self._left -= 1
        recorder = self._engine.recorder
        if self._left == _MEASURED_STEPS:
            recorder.begin_keeping(clock=_now)
            return
        self._events += recorder.events
        recorder.events = []
        if not self._left:
            recorder.end_keeping()
            with PROGRESS.doing("the search of a schedule"):
                ranks = gather(self._events)
                # All pipelines take the times of the first one, and so the same plan.
                self._choose([ranks[rank] for rank in self._engine.grid.pipe_groups[0]])

    def forget_step(self) -> None:
        """Drop the times of a step that had no data."""
        if 0 < self._left <= _MEASURED_STEPS:
            self._engine.recorder.events = []

    def _choose(self, events: list[list[Event]]) -> None:
        """Take the plan for what passes took, if it is faster; all ranks find the same one."""
        before = self._engine.plan
        costs = measured_costs(events, before.rank_of)
        before_s = simulate(before, costs).makespan_s
        self._costs = costs
        after_s = simulate(self._engine.plan, costs).makespan_s
        if after_s >= before_s:
            after_s, self._costs = before_s, None
        kept = self._costs is None
        changed = "kept" if kept else "changed"
        earlier = "" if kept else f", {1e3 * before_s:.4g} ms before"
        tell_choice(
            "schedule",
            f"measured the passes and {changed} their order",
            f"{1e3 * after_s:.4g} ms per step predicted{earlier}",
        )


def _now() -> float:
    """Return the seconds on the host's clock once the passes that are queued have ended."""
    stream = get_accelerator().current_stream()  # not all streams: others wait for messages
    if stream is not None:
        stream.synchronize()
    return time.perf_counter()
