# SPDX-License-Identifier: Apache-2.0
"""Lowers the order of forward and backward passes to everything that a rank does.

Each function maps the actions of one stage to new ones. The order is `add_steps`,
`Versions.annotate`, `add_communication`, and then `overlap_forward_backward` where a stage runs
two passes together, or `defer_sends` where sends block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from wavemare.pipeline.plan.action import Action, Kind

__all__ = [
    "Pair",
    "Versions",
    "add_communication",
    "add_steps",
    "defer_sends",
    "in_pairs",
    "overlap_forward_backward",
]

_BETWEEN = frozenset({Kind.SEND_GRAD, Kind.RECV_ACTIVATION, Kind.LOAD})


def add_steps(
    actions: Iterable[Action],
    num_stages: int,
    *,
    ends: Container[int],
    norms: bool = False,
    synchronous: bool = False,
) -> Iterator[Action]:
    """Add an optimizer step after each backward pass that completes one.

    Args:
        actions: Of one stage.
        num_stages: Length of the pipeline.
        ends: The last micro-batches of the optimizer steps.
        norms: Whether stages exchange gradient norms. Each stage then knows the norm of all later
            stages for this very step.
        synchronous: Whether the step empties the pipeline. The norm of all stages then travels
            back, so that it is exact on every stage.
    """
    for action in actions:
        yield action
        if action.kind is not Kind.BACKWARD or action.micro_batch not in ends:
            continue
        stage, micro_batch = action.stage, action.micro_batch
        yield Action(Kind.REDUCE, stage, micro_batch)
        if norms and stage < num_stages - 1:
            yield Action(Kind.RECV_NORM, stage, micro_batch)
        if norms and stage > 0:
            yield Action(Kind.SEND_NORM, stage, micro_batch)
        if norms and synchronous and stage > 0:
            yield Action(Kind.RECV_TOTAL, stage, micro_batch)
        if norms and synchronous and stage < num_stages - 1:
            yield Action(Kind.SEND_TOTAL, stage, micro_batch)
        yield Action(Kind.STEP, stage, micro_batch)


class Versions:
    """Fills in the version of a stage's weights that each action meets; keeps count over calls.

    Args:
        correct: Whether to put `CORRECT` and `RESTORE` around the backward passes of micro-batches
            whose forward pass saw older weights.
    """

    def __init__(self, *, correct: bool = False) -> None:
        self._correct = correct
        self._newest = 0
        self._forward: dict[int, int] = {}

    def annotate(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Return the actions with their versions."""
        for action in actions:
            kind, stage, micro_batch, _, wave = action
            newest = self._newest
            if kind is Kind.FORWARD:
                self._forward[micro_batch] = newest
            elif kind is Kind.STEP:
                self._newest += 1
            elif kind is Kind.BACKWARD:
                seen = self._forward.pop(micro_batch, newest)
                if self._correct and seen < newest:
                    yield Action(Kind.CORRECT, stage, micro_batch, seen, wave)
                    yield Action(kind, stage, micro_batch, newest, wave)
                    yield Action(Kind.RESTORE, stage, micro_batch, newest, wave)
                    continue
            yield Action(kind, stage, micro_batch, newest, wave)


def add_communication(actions: Iterable[Action], num_stages: int) -> Iterator[Action]:
    """Add loading, receives and sends around the passes of one stage."""
    for action in actions:
        kind, stage, micro_batch, version, wave = action
        first, last = stage == 0, stage == num_stages - 1
        if kind is Kind.FORWARD:
            if not first:
                yield Action(Kind.RECV_ACTIVATION, stage, micro_batch, version, wave)
            if first or last:
                yield Action(Kind.LOAD, stage, micro_batch, version, wave)
            yield action
            if not last:
                yield Action(Kind.SEND_ACTIVATION, stage, micro_batch, version, wave)
        elif kind is Kind.BACKWARD:
            if not last:
                yield Action(Kind.RECV_GRAD, stage, micro_batch, version, wave)
            yield action
            if not first:
                yield Action(Kind.SEND_GRAD, stage, micro_batch, version, wave)
        else:
            yield action


def defer_sends(actions: Iterable[Action], num_stages: int) -> Iterator[Action]:
    """Put a send of activations behind a receive of gradients that the next stage serves first.

    Two neighbours whose sends block would wait for each other otherwise. The next stage, which
    forwards one micro-batch less ahead, goes backward before it takes the activation of a
    micro-batch that this stage forwards furthest ahead.
    """
    held: Action | None = None
    for action in actions:
        if held is not None:
            furthest = action.micro_batch + num_stages - 1 - action.stage
            if action.kind is Kind.RECV_GRAD and held.micro_batch >= furthest:
                yield action
                yield held
                held = None
                continue
            yield held
            held = None
        if action.kind is Kind.SEND_ACTIVATION:
            held = action
        else:
            yield action
    if held is not None:
        yield held


def overlap_forward_backward(actions: Iterable[Action]) -> Iterator[Action]:
    """Put each backward pass right before the forward pass that follows it, to run them together.

    Their receives come before both passes and their sends after both. A pass stays alone if an
    optimizer step or a change of weights separates it from the next pass.
    """
    row = list(actions)
    place = 0
    while place < len(row):
        last = _following_forward(row, place)
        if last is None:
            yield row[place]
            place += 1
            continue
        between = row[place + 1 : last]
        yield from (action for action in between if action.kind is not Kind.SEND_GRAD)
        yield row[place]
        yield row[last]
        yield from (action for action in between if action.kind is Kind.SEND_GRAD)
        place = last + 1


def _following_forward(row: Sequence[Action], place: int) -> int | None:
    """Return the index of a backward pass's partner; None if there is none."""
    if row[place].kind is not Kind.BACKWARD:
        return None
    for later in range(place + 1, len(row)):
        if row[later].kind not in _BETWEEN:
            return later if row[later].kind is Kind.FORWARD else None
    return None


class Pair(NamedTuple):
    """A backward pass and the forward pass after it, run together."""

    backward: Action
    forward: Action

    def __str__(self) -> str:
        return f"Pair {self.backward} {self.forward}"


def in_pairs(actions: Iterable[Action]) -> list[Action | Pair]:
    """Return the actions, with each adjacent backward and forward pass as a `Pair`."""
    result: list[Action | Pair] = []
    for action in actions:
        before = result[-1] if result and action.kind is Kind.FORWARD else None
        if isinstance(before, Action) and before.kind is Kind.BACKWARD:
            result[-1] = Pair(before, action)
        else:
            result.append(action)
    return result
