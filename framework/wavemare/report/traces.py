# SPDX-License-Identifier: Apache-2.0
"""The timelines that ranks recorded, on one clock."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from wavemare.engine.observe.recorder import FOLDER, FORMAT
from wavemare.errors import DataError, PlanError
from wavemare.files import parse_json
from wavemare.pipeline.plan.plan import COLLECTIVES, COMPUTE, RECEIVES, SENDS, Action, Kind

_KEYS = {"format", "rank", "stage", "first_step", "device", "steps", "spans"}
_PAIR = "Pair "
_MESSAGES = frozenset(SENDS) | frozenset(RECEIVES)


class Span(NamedTuple):
    """An action of a rank, with its time.

    Args:
        text: An action in its text form, or words.
        start_s: Seconds since the beginning of the trace.
        end_s: The same.
        bytes: In use at its end; 0 if that is not known.
    """

    text: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass(frozen=True)
class RankTrace:
    """The timeline of one rank.

    Args:
        stage: Of the pipeline; 0 without one.
        first_step: The first step that was noted, from 1.
        device: ``cpu`` where `Span.bytes` is resident memory, else the accelerator's name.
        steps: Start and end of each step, at least one, in seconds as those of spans.
        spans: In the order in which they began; one that lies within another stands after it.
    """

    rank: int
    stage: int
    first_step: int
    device: str
    steps: tuple[tuple[float, float], ...]
    spans: tuple[Span, ...]

    @property
    def busy(self) -> float:
        """Share of the time from its first step to the end of its last in which it computed."""
        start, end = self.steps[0][0], self.steps[-1][1]
        spans = (s for s in self.spans if category(s.text) in ("forward", "backward", "step"))
        seconds = sum(max(0.0, min(s.end_s, end) - max(s.start_s, start)) for s in spans)
        return seconds / (end - start) if end > start else 0.0


@dataclass(frozen=True)
class Trace:
    """The timelines of all ranks, at least one; time 0 is the start of the earliest step."""

    ranks: tuple[RankTrace, ...]

    @property
    def bubble(self) -> float:
        """Mean share of the time in which ranks did not compute."""
        return 1 - sum(rank.busy for rank in self.ranks) / len(self.ranks)


def category(text: str) -> str:
    """Return the category of a span: ``forward``, ``backward``, ``step``, ``message`` or ``other``.

    Collectives between passes count as messages.
    """
    if text.startswith(_PAIR):
        return "backward"
    try:
        action = Action.parse(text)
    except PlanError:  # words
        return "other"
    if action.kind in COMPUTE or action.kind is Kind.STEP:
        return action.kind.name.lower()
    return "message" if action.kind in _MESSAGES | COLLECTIVES else "other"


def read_traces(folder: Path, *, world_size: int | None = None) -> Trace | None:
    """Read the timelines that the ranks of a run recorded.

    A run that was resumed with fewer ranks may have parts of before: those of other steps, or of
    ranks that there are no more, are passed over.

    Args:
        folder: The run's.
        world_size: Number of its ranks, if that is known.

    Returns:
        None if there is nothing.

    Raises:
        DataError: A file is damaged, or of another version.
    """
    parts = [_read(file) for file in sorted((folder / FOLDER).glob("rank_*.json"))]
    parts = [p for p in parts if p.steps and (world_size is None or p.rank < world_size)]
    if not parts:
        return None
    newest = max(parts, key=lambda part: part.steps[0][0])
    parts = [part for part in parts if part.first_step == newest.first_step]
    origin = min(part.steps[0][0] for part in parts)
    return Trace(tuple(_shifted(rank, origin) for rank in sorted(parts, key=lambda r: r.rank)))


def _shifted(rank: RankTrace, origin: float) -> RankTrace:
    return RankTrace(
        rank.rank,
        rank.stage,
        rank.first_step,
        rank.device,
        tuple((start - origin, end - origin) for start, end in rank.steps),
        tuple(Span(s.text, s.start_s - origin, s.end_s - origin, s.bytes) for s in rank.spans),
    )


def _read(file: Path) -> RankTrace:
    try:
        return _parse(parse_json(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error) if isinstance(error, ValueError) else "it is not what a rank noted"
        remedy = "Remove the file, and the report says that it is missing; or train again"
        raise DataError("timeline", str(file), reason, remedy) from None


def _parse(content: Any) -> RankTrace:
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise ValueError("it is not what a rank noted")
    if content["format"] != FORMAT:
        raise ValueError(
            f"it has the format {content['format']!r}, and this version knows {FORMAT}"
        )
    steps = tuple((_time(start), _time(end)) for start, end in content["steps"])
    spans = tuple(
        Span(str(text), _time(start), _time(end), int(used))
        for text, start, end, used in content["spans"]
    )
    rank, stage, first_step = (int(content[key]) for key in ("rank", "stage", "first_step"))
    return RankTrace(rank, stage, first_step, str(content["device"]), steps, spans)


def _time(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(value)
    return float(value)
