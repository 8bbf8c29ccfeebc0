# SPDX-License-Identifier: Apache-2.0
"""The order of forward and backward passes on one stage: one rule for all our schedules.

Before the backward pass of micro-batch ``m``, stage ``s`` of ``P`` has forwarded all micro-batches
up to ``m + P - 1 - s`` (`ahead`), as far as they may be forwarded yet. Without a limit this is
PipeMare's continuous pipeline, whose only idle time is the first fill; with a limit at the end of
every optimizer step it is 1F1B, which empties the pipeline at each step.
"""

from __future__ import annotations

from collections.abc import Iterator

from wavemare.errors import PlanError
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.lowering import Versions, add_communication, add_steps

__all__ = ["Stream", "ahead", "compute_order"]


def ahead(stage: int, num_stages: int, slack: int = 0) -> int:
    """Return how many micro-batches a stage forwards ahead of its backward passes.

    It is also the delay of the stage's gradients in micro-batches (d_i of PipeMare's delay model
    for a pipeline that does one pass at a time).

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        slack: Micro-batches more than the passes need, for each stage that comes after. Without
            any, a micro-batch's way to the next stage and back takes all the time that there is,
            and the latency of its messages comes on top of it.
    """
    return (num_stages - 1 - stage) * (1 + slack)


def compute_order(
    stage: int,
    num_stages: int,
    *,
    first: int,
    last: int,
    forwarded: int,
    stop: int | None,
    slack: int = 0,
) -> Iterator[Action]:
    """Return the passes of one optimizer step of one stage.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        first: First micro-batch of the step.
        last: One behind the step's last micro-batch.
        forwarded: How many micro-batches of the run the stage has forwarded.
        stop: How many of the run it may forward; None for no limit.
        slack: See `ahead`.
    """
    for micro_batch in range(first, last):
        limit = micro_batch + ahead(stage, num_stages, slack) + 1
        if stop is not None and stop < limit:
            limit = stop
        for forward in range(forwarded, limit):
            yield Action(Kind.FORWARD, stage, forward)
        forwarded = max(forwarded, limit)
        yield Action(Kind.BACKWARD, stage, micro_batch)


class Stream:
    """The endless plan of one stage, taken one optimizer step at a time.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        norms: Whether the stages tell each other their gradient norms.
        correct: Whether backward passes of stale micro-batches use corrected weights.
        slack: See `ahead`.

    Attributes:
        first: First micro-batch of the next step.
        forwarded: How many micro-batches the stage has forwarded.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        micro_batches: int,
        *,
        norms: bool = False,
        correct: bool = False,
        slack: int = 0,
    ) -> None:
        if not 0 <= stage < num_stages:
            reason = f"a pipeline of {num_stages} stages has no such stage"
            raise PlanError("stage", stage, reason, f"Give 0 to {num_stages - 1}")
        if micro_batches < 1:
            reason = "an optimizer step has at least one micro-batch"
            raise PlanError("micro_batches", micro_batches, reason, "Give 1 or more")
        self.stage = stage
        self.num_stages = num_stages
        self.micro_batches = micro_batches
        self.norms = norms
        self.slack = slack
        self.first = 0
        self.forwarded = 0
        self.versions = Versions(correct=correct)
        self._empty_at = 0

    def window(self, stop: int | None = None) -> list[Action]:
        """Return the stage's actions up to the end of its next optimizer step.

        Args:
            stop: How many micro-batches of the run may be forwarded yet; None for no limit. If it
                is the end of the step, the pipeline is empty after it.

        Raises:
            PlanError: More have been forwarded already.
        """
        if stop is not None and stop < self.forwarded:
            reason = f"{self.forwarded} micro-batches have been forwarded already"
            raise PlanError("stop", stop, reason, "Give a later boundary")
        last = self.first + self.micro_batches
        synchronous = self._empty_at == self.first and stop == last
        actions: Iterator[Action] = compute_order(
            self.stage,
            self.num_stages,
            first=self.first,
            last=last,
            forwarded=self.forwarded,
            stop=stop,
            slack=self.slack,
        )
        actions = add_steps(
            actions,
            self.num_stages,
            ends=range(last - 1, last),
            norms=self.norms,
            synchronous=synchronous,
        )
        actions = self.versions.annotate(actions)
        window = list(add_communication(actions, self.num_stages))
        limit = last + ahead(self.stage, self.num_stages, self.slack)
        self.forwarded = max(self.forwarded, limit if stop is None else min(limit, stop))
        self.first = last
        if stop == last:
            self._empty_at = last
        return window
