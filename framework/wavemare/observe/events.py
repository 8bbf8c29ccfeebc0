# SPDX-License-Identifier: Apache-2.0
"""What happens to a rank beside its metrics: memory, checkpoints, warnings; one file for each."""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from wavemare.errors import DataError
from wavemare.observe.lines import Lines, read_lines

__all__ = ["FOLDER", "KINDS", "Events", "read_events"]

FOLDER = "events"
"""Of the run folder; it has a file ``rank_NNNNN.jsonl`` for each rank that had something to say."""
KINDS = {
    "memory": {"bytes"},
    "checkpoint": {"tag", "seconds"},
    "warning": {"text", "source"},
}
"""What there is, with the values that belong to it."""
_LOGGERS = ("wavemare", "DeepSpeed")


class Events:
    """The events of one rank, one JSON object per line.

    Nothing is written before `open`: until rank 0 has moved an older run aside, the folder is that
    run's. What is noted before is held back. Where it cannot be written, it is left out (`Lines`).

    Attributes:
        step: The optimizer step in which a warning is said to come; whoever trains keeps it.
        warnings: How many warnings there were.
        latest: The text of the latest one.
    """

    def __init__(self, folder: Path, *, rank: int, clock: Callable[[], float] = time.time) -> None:
        self._lines = Lines(Path(folder) / FOLDER / f"rank_{rank:05d}.jsonl", Path(folder))
        self._clock = clock
        self._held: list[str] | None = []
        self._handler = _Handler(self._hear)
        self._show: Callable[..., Any] | None = None
        self.step = 0
        self.warnings = 0
        self.latest = ""

    def note(self, kind: str, step: int, **values: object) -> None:
        """Add an event of one of `KINDS`, with the values that belong to it."""
        event = {"step": step, "time": self._clock(), "kind": kind, **values}
        line = json.dumps(event) + "\n"
        if self._held is not None:
            self._held.append(line)
        else:
            self._lines.add(line)

    def open(self) -> None:
        """Write what was held back, and from now on at once; a further call does nothing."""
        if self._held is not None:
            held, self._held = self._held, None
            self._lines.add("".join(held))

    def listen(self) -> None:
        """Record warnings from now on; they are also shown as before. Further calls do nothing."""
        if self._show is not None:
            return
        for name in _LOGGERS:
            logging.getLogger(name).addHandler(self._handler)
        self._show = warnings.showwarning
        warnings.showwarning = self._warned

    def close(self) -> None:
        """Listen no longer, and close the file."""
        for name in _LOGGERS:
            logging.getLogger(name).removeHandler(self._handler)
        if warnings.showwarning == self._warned and self._show is not None:
            warnings.showwarning = self._show
            self._show = None
        self._lines.close()

    def _warned(
        self, message: Any, category: type[Warning], filename: str, *rest: Any, **named: Any
    ) -> None:
        self._hear(str(message), category.__name__)
        assert self._show is not None
        self._show(message, category, filename, *rest, **named)

    def _hear(self, text: str, source: str) -> None:
        self.warnings += 1
        self.latest = text
        self.note("warning", self.step, text=text, source=source)


class _Handler(logging.Handler):
    """Passes on what a logger warns of."""

    def __init__(self, hear: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        """Pass on a record: its text, and its logger's name with the level."""
        self._hear(record.getMessage(), f"{record.name} {record.levelname.lower()}")
        # Python shows by itself what no handler takes, and so nothing as soon as this one is there.
        handlers = list(_handlers_of(logging.getLogger(record.name)))
        alone = all(isinstance(handler, _Handler) for handler in handlers)
        if alone and handlers[0] is self and logging.lastResort is not None:
            logging.lastResort.handle(record)


def _handlers_of(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    """Yield the handlers that a logger's records come to."""
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def read_events(folder: Path) -> list[dict[str, Any]]:
    """Read the events of all ranks of a run, in the order of their times, each with its ``rank``.

    Raises:
        DataError: A line is no event; the message names it.
    """
    events = []
    for file in sorted((folder / FOLDER).glob("rank_*.jsonl")):
        digits = file.stem.removeprefix("rank_")
        if not digits.isdecimal():
            reason = "no rank has a file of this name"
            raise DataError("events", str(file), reason, "Remove the file")
        rank = int(digits)
        events += [{**event, "rank": rank} for event in read_lines(file, _is_event, "events")]
    return sorted(events, key=lambda event: event["time"])


def _is_event(line: dict[str, Any]) -> bool:
    return (
        isinstance(line.get("step"), int)
        and isinstance(line.get("time"), int | float)
        and isinstance(line.get("kind"), str)
        and line["kind"] in KINDS
        and KINDS[line["kind"]] <= line.keys()
    )
