# SPDX-License-Identifier: Apache-2.0
"""The order of forward and backward passes on one stage: one rule for all our schedules.

Before the backward pass of micro-batch ``m``, stage ``s`` of ``P`` has forwarded all micro-batches
up to ``m + P - 1 - s`` (`ahead`), unless a limit stops it. Without a limit this is PipeMare's
continuous pipeline, which idles only while it fills. With a limit at the end of every optimizer
step it is 1F1B, which empties the pipeline at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from wavemare.errors import PlanError
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.lowering import Versions, add_communication, add_steps

__all__ = ["StageSchedule", "ahead"]


@cache
def ahead(stage: int, num_stages: int, slack: int = 0) -> int:
    """Return how many micro-batches a stage forwards ahead of its backward passes.

    It is also the delay of the stage's gradients in micro-batches (d_i of PipeMare's delay model
    for a pipeline that does one pass at a time).

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        slack: Extra micro-batches for each later stage. Without slack, a micro-batch has just
            enough time to reach the next stage and return, and message latency adds to it.
    """
    return (num_stages - 1 - stage) * (1 + slack)


class StageSchedule:
    """The endless schedule of one stage, taken one optimizer step at a time.

    Args:
        stage: Counted from 0.
        num_stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        norms: Whether the stages exchange their gradient norms.
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
        self._stage = stage
        self._num_stages = num_stages
        self._micro_batches = micro_batches
        self._norms = norms
        self._ahead = ahead(stage, num_stages, slack)
        self._versions = Versions(correct=correct)
        self._empty_at = 0
        self.first = 0
        self.forwarded = 0

    def step(self, stop: int | None = None) -> list[Action]:
        """Return the stage's actions up to the end of its next optimizer step.

        Args:
            stop: How many micro-batches of the run may be forwarded; None for no limit. If it is
                the end of the step, the pipeline is empty after it.

        Raises:
            PlanError: More have been forwarded already.
        """
        if stop is not None and stop < self.forwarded:
            reason = f"{self.forwarded} micro-batches have been forwarded already"
            raise PlanError("stop", stop, reason, "Give a later boundary")
        last = self.first + self._micro_batches
        actions = add_steps(
            self._passes(last, stop),
            self._num_stages,
            ends={last - 1},
            norms=self._norms,
            synchronous=self._empty_at == self.first and stop == last,
        )
        actions = self._versions.annotate(actions)
        result = list(add_communication(actions, self._num_stages))
        self.first = last
        if stop == last:
            self._empty_at = last
        return result

    def _passes(self, last: int, stop: int | None) -> Iterator[Action]:
        for micro_batch in range(self.first, last):
            limit = micro_batch + self._ahead + 1
            if stop is not None:
                limit = min(limit, stop)
            for forward in range(self.forwarded, limit):
                yield Action(Kind.FORWARD, self._stage, forward)
            self.forwarded = max(self.forwarded, limit)
            yield Action(Kind.BACKWARD, self._stage, micro_batch)
