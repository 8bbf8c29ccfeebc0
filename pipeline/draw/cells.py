# SPDX-License-Identifier: Apache-2.0
"""A plan as a grid of text: one row per rank, one column per tick."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from wavemare.pipeline.plan.action import COMPUTE, RECEIVES, Action, Kind
from wavemare.pipeline.plan.plan import Plan

__all__ = ["Cell", "grid", "place"]

_IDLE = ".."
_STEP_MARK = "*"
_STUCK_MARK = "?"
_GAP = " "
# Where the pass that a pass needs is: the forward pass before it, the backward pass behind it.
_INPUT = {Kind.FORWARD: -1, Kind.BACKWARD: 1}

_Key = tuple[Kind, int, int, int]


class Cell(NamedTuple):
    """A pass in the grid.

    Args:
        tick: Column.
        action: A forward or backward pass; an optimizer step where no pass comes before it; if
            it is stuck, whatever the rank waits for.
        step: Whether an optimizer step follows it.
        stuck: Whether its input never comes.
    """

    tick: int
    action: Action
    step: bool = False
    stuck: bool = False


def grid(plan: Plan, *, width: int = 80, versions: bool = False) -> str:
    """Draw a plan with one tick for each pass, whatever its duration.

    A pass stands in the first tick after its rank's last pass and after the pass of the neighbour
    that it needs. ``F3`` is the forward pass of micro-batch 3, ``B3`` its backward pass, ``B3*``
    one that an optimizer step follows, ``..`` an idle tick; ``2F3`` names the stage where ranks
    have several. A rank whose next action can never run ends in that action with ``?``.

    Args:
        plan: The plan, with or without its messages.
        width: Characters in a line; a wider grid is folded into blocks.
        versions: Whether to add the version of the weights: ``F3@1``.

    Returns:
        Lines without trailing spaces, the last one without a line feed.
    """
    rows = place(plan)
    several = any(len({action.stage for action in actions}) > 1 for actions in plan.ranks)
    num_ticks = max((row[-1].tick + 1 for row in rows if row), default=0)
    texts = [_texts(row, num_ticks, several=several, versions=versions) for row in rows]
    labels = ["tick", *(f"rank {rank}" for rank in range(len(rows)))]
    columns = [[str(tick) for tick in range(num_ticks)], *texts]
    return "\n".join(_fold(labels, columns, width))


def _texts(row: Sequence[Cell], num_ticks: int, *, several: bool, versions: bool) -> list[str]:
    texts = [_IDLE] * num_ticks
    for tick, (kind, stage, micro_batch, version, wave), step, stuck in row:
        where = stage if several else ""
        seen = f"@{version}" if versions and version >= 0 else ""
        marks = f"/{wave}" * (wave > 0) + _STEP_MARK * step + _STUCK_MARK * stuck
        texts[tick] = f"{where}{kind.value}{micro_batch}{seen}{marks}"
    return texts


def _fold(labels: Sequence[str], columns: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    label_size = max(map(len, labels)) + len(_GAP)
    size = max((len(text) for column in columns for text in column), default=0)
    num_ticks = len(columns[0])
    per_block = max(1, (width - label_size) // (size + len(_GAP)))
    for first in range(0, max(num_ticks, 1), per_block):
        if first:
            yield ""
        for label, texts in zip(labels, columns, strict=True):
            cells = (f"{_GAP}{text:<{size}}" for text in texts[first : first + per_block])
            yield f"{label:<{label_size - len(_GAP)}}{''.join(cells)}".rstrip()


def place(plan: Plan) -> list[list[Cell]]:
    """Return for each rank its passes with their ticks, in the order in which it does them."""
    walk = _Walk(plan.ranks)
    while walk.advance():
        pass
    return walk.finish()


class _Walk:
    """Lets every rank go as far as its inputs allow, again and again."""

    def __init__(self, ranks: Sequence[Sequence[Action]]) -> None:
        self._ranks = ranks
        self._rows: list[list[Cell]] = [[] for _ in ranks]
        self._next = [0] * len(ranks)
        self._now = [0] * len(ranks)
        self._ends: dict[_Key, int] = {}
        self._passes = {_key(action) for actions in ranks for action in actions}

    def advance(self) -> bool:
        """Let each rank go on; return whether any of them did."""
        before = list(self._next)
        for rank, actions in enumerate(self._ranks):
            while self._next[rank] < len(actions) and self._do(rank, actions[self._next[rank]]):
                self._next[rank] += 1
        return self._next != before

    def finish(self) -> list[list[Cell]]:
        """Return the rows, with what the stuck ranks wait for at their ends."""
        for rank, actions in enumerate(self._ranks):
            if self._next[rank] < len(actions):
                waiting = actions[self._next[rank]]
                self._rows[rank].append(Cell(self._now[rank], waiting, stuck=True))
        return self._rows

    def _do(self, rank: int, action: Action) -> bool:
        needed = list(self._needed(action))
        if any(key not in self._ends for key in needed):
            return False
        now = max([self._now[rank], *(self._ends[key] for key in needed)])
        row = self._rows[rank]
        if action.kind in COMPUTE:
            row.append(Cell(now, action))
            now += 1
        elif action.kind is Kind.STEP and row and self._marks(action, row[-1]):
            row[-1] = row[-1]._replace(step=True)
        elif action.kind is Kind.STEP:
            row.append(Cell(now, action, step=True))
            now += 1
        self._now[rank] = self._ends[_key(action)] = now
        return True

    @staticmethod
    def _marks(step: Action, cell: Cell) -> bool:
        """Whether a step is shown at the last cell; stages on one rank take one step together."""
        return not cell.step or cell.action.micro_batch == step.micro_batch

    def _needed(self, action: Action) -> Iterable[_Key]:
        kind, stage, micro_batch, _, wave = action
        if kind in RECEIVES:
            send, distance = RECEIVES[kind]
            yield send, stage + distance, micro_batch, wave
        elif kind in _INPUT:
            key = kind, stage + _INPUT[kind], micro_batch, wave
            if key in self._passes:  # the first forward and the last backward pass need none
                yield key


def _key(action: Action) -> _Key:
    kind, stage, micro_batch, _, wave = action
    return kind, stage, micro_batch, wave
