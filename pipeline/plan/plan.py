# SPDX-License-Identifier: Apache-2.0
"""A pipeline's schedule as data: for each rank the actions that it does, in their order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from wavemare.errors import PlanError, check_number


class Kind(StrEnum):
    """Kinds of actions; the value is the code in a plan's text form."""

    LOAD = "L"
    """Read a micro-batch: inputs on the first stage, labels on the last one."""

    FORWARD = "F"
    """Forward pass with the newest weights."""

    BACKWARD = "B"
    """Whole backward pass."""

    BACKWARD_INPUT = "I"
    """The part of a backward pass that computes the gradient of the stage's input."""

    BACKWARD_WEIGHT = "W"
    """The part that computes the gradients of the stage's weights."""

    SEND_ACTIVATION = "SA"
    """To the next stage."""

    RECV_ACTIVATION = "RA"
    """From the stage before."""

    SEND_GRAD = "SG"
    """To the stage before."""

    RECV_GRAD = "RG"
    """From the next stage."""

    REDUCE = "R"
    """Average the stage's gradients over its data-parallel ranks."""

    NORM = "N"
    """Sum of all layers' squared gradient norms: an all-reduce over the pipeline, in place of the
    messages below."""

    SEND_NORM = "SN"
    """Squared gradient norm of this stage and all later ones, to the stage before."""

    RECV_NORM = "RN"
    """Squared gradient norm of all later stages, from the next stage."""

    SEND_TOTAL = "ST"
    """Squared gradient norm of all stages, to the next stage (synchronous steps only)."""

    RECV_TOTAL = "RT"
    """Squared gradient norm of all stages, from the stage before (synchronous steps only)."""

    STEP = "S"
    """Optimizer step of the stage; makes the weights' next version."""

    CORRECT = "C"
    """Put weights as the forward pass of a micro-batch saw them in place, or an estimate."""

    RESTORE = "U"
    """Put the newest weights back after the backward pass."""

    SUM_OUTPUT = "XO"
    """Sum of a segment's output over ranks, while passes go on; in timelines, not in plans."""

    SUM_GRADIENT = "XG"
    """Sum of the gradient of a segment's input, in the same way."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""Kinds that keep a device busy with a micro-batch."""

INPUT_GRADIENTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_INPUT})
"""Kinds that give the gradient of a stage's input."""

WEIGHT_GRADIENTS = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Kinds that complete a micro-batch's gradients of the weights."""

COLLECTIVES = frozenset({Kind.SUM_OUTPUT, Kind.SUM_GRADIENT})
"""Kinds that run beside a device's passes."""

SENDS = {
    Kind.SEND_ACTIVATION: (Kind.RECV_ACTIVATION, 1),
    Kind.SEND_TOTAL: (Kind.RECV_TOTAL, 1),
    Kind.SEND_GRAD: (Kind.RECV_GRAD, -1),
    Kind.SEND_NORM: (Kind.RECV_NORM, -1),
}
"""For each kind of send the kind of receive that meets it, and where its stage is: +1 next, -1
before. The messages from one rank to another keep their order."""

RECEIVES = {receive: (send, -step) for send, (receive, step) in SENDS.items()}
"""The same from the receiver's side."""

Message = tuple[Kind, int, int]
"""The kind, stage and micro-batch of a send."""

_NUMBER = "([0-9]{1,18})"
_TEXT = re.compile(f"{_NUMBER}([A-Z]+){_NUMBER}(?:@{_NUMBER})?")


class Action(NamedTuple):
    """One action of one stage. Its text form is, for example, ``2F5@1``.

    Args:
        kind: What is done.
        stage: Counted from 0 over all ranks; a rank may have several. For `REDUCE`, `NORM` and
            `STEP` of a rank with several: its first.
        micro_batch: Counted from 0 over the whole run. For `REDUCE`, `STEP` and the norms: the last
            micro-batch of the optimizer step.
        version: Of the stage's weights, counted in its optimizer steps: the newest when the action
            starts; for `CORRECT`, the version that the micro-batch's forward pass used. -1 where
            nobody has filled it in.
    """

    kind: Kind
    stage: int
    micro_batch: int
    version: int = -1

    @property
    def place(self) -> tuple[int, int]:
        """Its stage and micro-batch."""
        return self.stage, self.micro_batch

    def __str__(self) -> str:
        version = f"@{self.version}" if self.version >= 0 else ""
        return f"{self.stage}{self.kind.value}{self.micro_batch}{version}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Raises:
            PlanError: The text is no action.
        """
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in _KINDS:
            codes = ", ".join(kind.value for kind in Kind)
            remedy = f"Write STAGE CODE MICRO_BATCH [@VERSION], as in 2F5@1; codes: {codes}"
            raise PlanError("action", text, "this is no action", remedy)
        stage, code, micro_batch, version = match.groups()
        number = int(version) if version is not None else -1
        return cls(_KINDS[code], int(stage), int(micro_batch), number)


def message_of(action: Action) -> Message:
    """Return what a send and its receive have in common."""
    kind, stage, micro_batch, _ = action
    if kind in RECEIVES:
        kind, step = RECEIVES[kind]
        stage += step
    return kind, stage, micro_batch


_KINDS = {kind.value: kind for kind in Kind}


_GRADIENTS = Kind.SEND_GRAD, Kind.RECV_GRAD
_DIGITS = 18
_HEADER = ("schedule", "stages", "micro_batches", "steps", "send_slots")
_HOMES = "homes"  # written if there are any


@dataclass(frozen=True)
class RankPlan:
    """A rank's part of a plan, with all that an engine would otherwise derive in each step.

    Args:
        actions: What the rank does, in its order.
        receives: The messages that it receives; those of one sender in the sender's order.
        loads: Its loads.
        carriers: Kind, stage and micro-batch of the last gradient message of each stage, as the
            rank sends or receives it. All losses are known before such a message is sent.
        send_slots: See `Plan`.
        is_split: Whether the plan splits backward passes.
    """

    actions: tuple[Action, ...]
    receives: tuple[Action, ...]
    loads: tuple[Action, ...]
    carriers: frozenset[tuple[Kind, int, int]]
    send_slots: int
    is_split: bool


@dataclass(frozen=True)
class Plan:
    """What every rank does; immutable, and equal to what its text form parses to.

    Args:
        schedule: Name of the schedule; white space in it becomes underscores.
        num_stages: Number of pipeline stages.
        micro_batches: Micro-batches per optimizer step.
        num_steps: Optimizer steps; 0 for inference.
        ranks: For each rank its actions.
        send_slots: How many messages from one rank to another may be unreceived before a send
            waits; 1 or more.
        homes: For each stage its rank; stages on one rank exchange no messages. Left out, and
            empty here, where each rank has the stage of its number.
    """

    schedule: str
    num_stages: int
    micro_batches: int
    num_steps: int
    ranks: tuple[tuple[Action, ...], ...]
    send_slots: int = 1
    homes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # White space would end the name in the text form.
        object.__setattr__(self, "schedule", "_".join(self.schedule.split()))
        if self.num_stages == len(self.ranks) and self.homes == tuple(range(self.num_stages)):
            object.__setattr__(self, "homes", ())

    def __hash__(self) -> int:
        # Caches look plans up; to hash all actions would take longer than what they keep.
        return hash((self.schedule, self.num_stages, self.micro_batches, self.num_steps))

    @property
    def rank_of(self) -> Sequence[int]:
        """For each stage its rank."""
        return self.homes or range(self.num_stages)

    @cached_property
    def is_split(self) -> bool:
        """Whether a backward pass is split."""
        return any(a.kind is Kind.BACKWARD_INPUT for rank in self.ranks for a in rank)

    @cached_property
    def has_norms(self) -> bool:
        """Whether its optimizer steps sum the norms of all ranks by `Kind.NORM`."""
        return any(a.kind is Kind.NORM for rank in self.ranks for a in rank)

    @cached_property
    def flushes(self) -> bool:
        """Whether `check` asks for an empty pipeline at each optimizer step."""
        return bool(self.homes) or self.is_split or self.has_norms

    def of_rank(self, rank: int) -> RankPlan:
        """Return a rank's part, prepared once for each rank."""
        if rank not in self._parts:
            actions, receives = self.ranks[rank], tuple(self._receives[rank])
            grads = (a for a in (*actions, *receives) if a.kind in _GRADIENTS)
            last = {a[:2]: a.micro_batch for a in grads}  # of receives, the sender's last
            self._parts[rank] = RankPlan(
                actions=actions,
                receives=receives,
                loads=tuple(action for action in actions if action.kind is Kind.LOAD),
                carriers=frozenset((*place, micro_batch) for place, micro_batch in last.items()),
                send_slots=self.send_slots,
                is_split=self.is_split,
            )
        return self._parts[rank]

    @cached_property
    def _parts(self) -> dict[int, RankPlan]:
        return {}

    @cached_property
    def _receives(self) -> list[list[Action]]:
        """For each rank its receives, in the order in which each sender sends."""
        found: list[list[Action]] = [[] for _ in self.ranks]
        rank_of = self.rank_of
        for actions in self.ranks:
            for action in actions:
                if action.kind in SENDS:
                    kind, distance = SENDS[action.kind]
                    stage = action.stage + distance
                    found[rank_of[stage]].append(Action(kind, stage, action.micro_batch))
        return found

    def __str__(self) -> str:
        values = (
            self.schedule,
            self.num_stages,
            self.micro_batches,
            self.num_steps,
            self.send_slots,
        )
        header = " ".join(f"{key}={value}" for key, value in zip(_HEADER, values, strict=True))
        header += f" {_HOMES}={','.join(map(str, self.homes))}" if self.homes else ""
        lines = [f"plan {header}"]
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
        homes = values[_HOMES].split(",") if _HOMES in values else ()
        return cls(
            schedule=values["schedule"],
            num_stages=_number(values, "stages"),
            micro_batches=_number(values, "micro_batches"),
            num_steps=_number(values, "steps"),
            send_slots=_number(values, "send_slots"),
            homes=tuple(_number({_HOMES: home}, _HOMES) for home in homes),
            ranks=tuple(_rank(line, number) for number, line in enumerate(lines[1:])),
        )


def check_numbers(num_stages: int, micro_batches: int, num_steps: int) -> None:
    """Refuse numbers of which no plan can be made.

    Raises:
        PlanError: There is no stage or no micro-batch, or the number of steps is negative.
    """
    check_number(PlanError, "stages", num_stages, 1, whole=True)
    check_number(PlanError, "micro_batches", micro_batches, 1, whole=True)
    check_number(PlanError, "steps", num_steps, whole=True)


def _header(line: str) -> dict[str, str]:
    word, *pairs = line.split()
    values = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    keys = {*_HEADER, *values.keys() & {_HOMES}}
    if word != "plan" or set(values) != keys or len(pairs) != len(keys):
        example = "plan " + " ".join(f"{key}=..." for key in _HEADER)
        raise PlanError("plan", line, "this is no header of a plan", f"Write '{example}'")
    return values


def _number(values: dict[str, str], key: str) -> int:
    text = values[key]
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        raise PlanError(key, text[:40], "it is not a whole number", "Give 0 or more")
    return int(text)


def _rank(line: str, number: int) -> tuple[Action, ...]:
    rank, colon, actions = line.partition(":")
    if not colon or rank != str(number):
        remedy = f"Begin line {number} with '{number}:', from 0"
        raise PlanError("plan", line[:40], f"this is not the line of rank {number}", remedy)
    return tuple(map(Action.parse, actions.split()))
