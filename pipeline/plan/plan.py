# SPDX-License-Identifier: Apache-2.0
"""A pipeline's schedule as data: for each rank the actions that it does, in their order."""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.errors import PlanError
from wavemare.pipeline.plan.action import Action

__all__ = ["Plan", "check_numbers"]

_DIGITS = 18
_HEADER = ("schedule", "stages", "micro_batches", "steps", "send_slots")
_DELAY = "step_delay"  # written if there is one


@dataclass(frozen=True)
class Plan:
    """What every rank does; immutable, and equal to what its text form parses to.

    Args:
        schedule: Name of the schedule.
        num_stages: Number of pipeline stages.
        micro_batches: Micro-batches per optimizer step.
        num_steps: Optimizer steps; 0 for inference.
        ranks: For each rank its actions. A single rank has all stages, which then are the segments
            of a model and exchange no messages.
        send_slots: How many messages of one direction a rank may leave unreceived before a send
            waits: 0 where a send waits for its receive (DeepSpeed's blocking sends).
        step_delay: How many optimizer steps may be missing when backward passes of the next one
            begin: their gradients are reduced, and applied later.
    """

    schedule: str
    num_stages: int
    micro_batches: int
    num_steps: int
    ranks: tuple[tuple[Action, ...], ...]
    send_slots: int = 0
    step_delay: int = 0

    @property
    def on_one_rank(self) -> bool:
        """Whether one rank has all stages."""
        return len(self.ranks) == 1

    def __str__(self) -> str:
        values = (
            self.schedule,
            self.num_stages,
            self.micro_batches,
            self.num_steps,
            self.send_slots,
        )
        header = " ".join(f"{key}={value}" for key, value in zip(_HEADER, values, strict=True))
        delay = f" {_DELAY}={self.step_delay}" if self.step_delay else ""
        lines = [f"plan {header}{delay}"]
        for rank, actions in enumerate(self.ranks):
            lines.append(f"{rank}: {' '.join(map(str, actions))}".rstrip())
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Plan:
        """Read the text form; empty lines and lines that start with ``#`` are passed over.

        Raises:
            PlanError: The header or a line is malformed; the message names it.
        """
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if not lines:
            raise PlanError("plan", text, "there is no line", "Give the text that 'plan show' has")
        values = _header(lines[0])
        return cls(
            schedule=values["schedule"],
            num_stages=_number(values, "stages"),
            micro_batches=_number(values, "micro_batches"),
            num_steps=_number(values, "steps"),
            send_slots=_number(values, "send_slots"),
            step_delay=_number(values, _DELAY),
            ranks=tuple(_rank(line, number) for number, line in enumerate(lines[1:])),
        )


def check_numbers(num_stages: int, micro_batches: int, num_steps: int) -> None:
    """Refuse numbers of which no plan can be made.

    Raises:
        PlanError: There is no stage or no micro-batch, or the number of steps is negative.
    """
    for key, value in {"stages": num_stages, "micro_batches": micro_batches}.items():
        if value < 1:
            raise PlanError(key, value, "a plan has at least one", "Give 1 or more")
    if num_steps < 0:
        raise PlanError("steps", num_steps, "it is negative", "Give 0 or more")


def _header(line: str) -> dict[str, str]:
    word, *pairs = line.split()
    values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    keys = {*_HEADER, *values.keys() & {_DELAY}}
    if word != "plan" or set(values) != keys or len(pairs) != len(keys):
        example = "plan " + " ".join(f"{key}=..." for key in _HEADER)
        raise PlanError("plan", line, "this is no header of a plan", f"Write '{example}'")
    return {_DELAY: "0", **values}


def _number(values: dict[str, str], key: str) -> int:
    text = values[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise PlanError(key, text[:40], "it is not a whole number", "Give 0 or more")
    return int(text)


def _rank(line: str, number: int) -> tuple[Action, ...]:
    rank, colon, actions = line.partition(":")
    if not colon or rank != str(number):
        raise PlanError("plan", line[:40], f"this is not the line of rank {number}", "Number them")
    return tuple(map(Action.parse, actions.split()))
