# SPDX-License-Identifier: Apache-2.0
"""The pipeline systems that can be measured: what each allows and what theory promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BASELINE", "BOUND", "DEFAULT_SYSTEMS", "SYSTEMS", "System"]

BASELINE = "deepspeed-1f1b"
BOUND = "no-communication-bound"


def _always_one(stages: int, micro_batches: int) -> float:
    return 1.0


def _without_bubble(stages: int, micro_batches: int) -> float:
    # 1F1B takes M + P - 1 slots for the M micro-batches of each stage.
    return (micro_batches + stages - 1) / micro_batches


@dataclass(frozen=True, kw_only=True)
class System:
    """One system.

    Args:
        name: As in the results.
        ideal: From (stages, micro-batches) to the ratio to 1F1B that theory allows with one device
            per stage; None where it depends on more than these two.
        parts_per_stage: How many pieces of the model a rank holds: 2 for V-shaped pipelines.
        least: From stages to the fewest micro-batches of a step; below it the system refuses.
        steady: Whether a step's work overlaps the next one's, so that only the rate in the middle
            of several steps means something.
        splits_backward: Whether it runs the two halves of a backward pass at different times.
        on_request: Whether it is measured only where it is named.
    """

    name: str
    ideal: Callable[[int, int], float] | None
    parts_per_stage: int = 1
    least: Callable[[int], int] = lambda stages: 1
    steady: bool = False
    splits_backward: bool = False
    on_request: bool = False

    def obstacle(self, stages: int, micro_batches: int, *, synthetic: bool) -> str | None:
        """Return why the system cannot be measured so; None if it can.

        Args:
            stages: Number of pipeline ranks.
            micro_batches: Per optimizer step.
            synthetic: Whether layers are timed waits.
        """
        least = self.least(stages)
        if micro_batches < least:
            return f"it needs at least {least} micro-batches for {stages} stages"
        if synthetic and self.splits_backward:
            return "it splits the backward pass, which a timed wait cannot follow"
        return None


SYSTEMS = {
    system.name: system
    for system in (
        System(name=BASELINE, ideal=_always_one),
        System(
            name="deepspeed-dualpipev",
            ideal=None,
            parts_per_stage=2,
            least=lambda stages: 2 * stages,
        ),
        System(name="torch-1f1b", ideal=_always_one, least=lambda stages: stages),
        System(name="torch-zbv", ideal=None, parts_per_stage=2, splits_backward=True),
        System(name="wavemare-pipemare", ideal=_without_bubble, steady=True),
        System(name="wavemare-pipemare-slack", ideal=_without_bubble, steady=True),
        System(name="wavemare-pipemare-auto", ideal=_without_bubble, steady=True),
        System(
            name="wavemare-pipemare-unguarded",
            ideal=_without_bubble,
            steady=True,
            on_request=True,
        ),
        System(name="wavemare-1f1b-soap", ideal=None, on_request=True),
        System(name=BOUND, ideal=_without_bubble, steady=True),
    )
}
"""All systems by name, in the order in which they are shown."""

DEFAULT_SYSTEMS = tuple(name for name, system in SYSTEMS.items() if not system.on_request)
