# SPDX-License-Identifier: Apache-2.0
"""Plans and timelines as CSV, one line per action."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import replace

from wavemare.errors import PlanError
from wavemare.pipeline.action import Action, Kind
from wavemare.pipeline.plan import Plan
from wavemare.pipeline.timeline import Timeline

__all__ = ["plan_from_csv", "to_csv"]

_DIGITS = 6
_COLUMNS = ("rank", "index", "kind", "stage", "micro_batch", "version", "wave")
_TIMES = ("start_s", "end_s")
_COUNT = " ranks="
_KINDS = {kind.name.lower(): kind for kind in Kind}


def to_csv(subject: Plan | Timeline) -> str:
    """Return a table of all actions: rank, index, kind, stage, micro_batch, version and wave.

    Args:
        subject: A timeline's table has start_s and end_s in seconds as well. A plan's begins with
            a comment, ``# plan ...``, from which `plan_from_csv` takes what the lines do not say.

    Returns:
        Lines that end in a line feed; the first one after the comment names the columns.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    if isinstance(subject, Plan):
        header = str(replace(subject, ranks=())).rstrip()
        file.write(f"# {header}{_COUNT}{len(subject.ranks)}\n")
        writer.writerow(_COLUMNS)
        for rank, actions in enumerate(subject.ranks):
            writer.writerows([rank, index, *_fields(a)] for index, a in enumerate(actions))
    else:
        writer.writerow([*_COLUMNS, *_TIMES])
        for rank, events in enumerate(subject.ranks):
            writer.writerows(
                # repr keeps every bit of a time, which is a float.
                [rank, index, *_fields(event.action), repr(event.start_s), repr(event.end_s)]
                for index, event in enumerate(events)
            )
    return file.getvalue()


def plan_from_csv(text: str) -> Plan:
    """Read a plan's table.

    Raises:
        PlanError: A line is malformed or out of order; the message names it.
    """
    comment, _, table = text.partition("\n")
    header, found, count = comment.removeprefix("# ").strip().partition(_COUNT)
    if not found or not (count.isascii() and count.isdecimal() and len(count) <= _DIGITS):
        reason = "the first line does not say which plan this is"
        raise PlanError("plan", comment[:80], reason, f"Write '# plan schedule=...{_COUNT}4'")
    plan = Plan.parse(header)
    ranks: list[list[Action]] = [[] for _ in range(int(count))]
    for line, row in _rows(table):
        rank, index, action = _action(line, row)
        if rank not in range(len(ranks)) or index != len(ranks[rank]):
            reason = f"line {line} is not the next action of one of the {len(ranks)} ranks"
            raise PlanError("plan", ",".join(row), reason, "Number ranks and actions from 0")
        ranks[rank].append(action)
    return replace(plan, ranks=tuple(map(tuple, ranks)))


def _fields(action: Action) -> list[str | int]:
    kind, *numbers = action
    return [kind.name.lower(), *numbers]


def _rows(table: str) -> Iterator[tuple[int, list[str]]]:
    """Return the lines below the names of the columns, with their numbers in the file."""
    rows: Iterable[list[str]] = csv.reader(io.StringIO(table))
    for line, row in enumerate(_readable(rows), 2):
        if line == 2 and tuple(row) != _COLUMNS:  # noqa: PLR2004
            reason = "the second line does not name the columns"
            raise PlanError("plan", ",".join(row), reason, f"Write '{','.join(_COLUMNS)}'")
        if line > 2 and row:  # noqa: PLR2004
            yield line, row


def _readable(rows: Iterable[list[str]]) -> Iterator[list[str]]:
    try:
        yield from rows
    except csv.Error as error:  # a field that is too long, for example
        raise PlanError("plan", "...", str(error), "Write a table of actions") from None


def _action(line: int, row: list[str]) -> tuple[int, int, Action]:
    try:
        rank, index, kind, *numbers = row
        stage, micro_batch, version, wave = map(int, numbers)
        return int(rank), int(index), Action(_KINDS[kind], stage, micro_batch, version, wave)
    except (ValueError, KeyError):
        reason = f"line {line} is no action"
        remedy = f"Write {', '.join(_COLUMNS)}; kinds: {', '.join(_KINDS)}"
        raise PlanError("plan", ",".join(row), reason, remedy) from None
