# SPDX-License-Identifier: Apache-2.0
"""Files of one JSON object per line: they grow while a run trains, and are read by the report.

`Events` are what happens to a rank beside its metrics: memory, checkpoints, warnings.
"""

from __future__ import annotations

import json
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from wavemare.errors import DataError

logger = logging.getLogger("wavemare")

_told: set[Path] = set()
"""Run folders of which this process has said that something cannot be written there."""


def go_without(run: Path, error: OSError) -> None:
    """Warn, once for a run folder, that the training goes on without what failed."""
    if run in _told:
        return
    _told.add(run)  # first: the warning is an event, which may fail as well
    logger.warning(
        "%s cannot be written (%s): the training goes on, but its metrics, events or timeline end "
        "here. Make room before the next checkpoint is saved",
        error.filename or run,
        error.strerror or error,
    )


class Lines:
    """Whole lines at the end of a file, each with the operating system when `add` returns.

    Where one cannot be written, the file ends with the one before, and `go_without` says so:
    telemetry is no reason to end a training.

    Args:
        file: Made at the first line, with the folders above it.
        run: The run folder, for the warning.
    """

    def __init__(self, file: Path, run: Path) -> None:
        self._file = file
        self._run = run
        self._stream: FileIO | None = None
        self._ended = False

    def add(self, lines: str) -> None:
        """Add lines, each with its end."""
        if self._ended or not lines:
            return
        try:
            self._write(lines.encode())
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file; a later `add` opens it again."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            try:
                stream.close()
            except OSError as error:  # some network file systems tell of a full disk only now
                self._give_up(error)

    def _write(self, data: bytes) -> None:
        if self._stream is None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._stream = FileIO(str(self._file), "ab")
        size = self._stream.seek(0, 2)
        left = memoryview(data)
        try:
            while left:
                left = left[self._stream.write(left) :]
        except OSError:
            # What comes after a torn line, in a run that is resumed, would be no line either.
            with suppress(OSError):
                self._stream.truncate(size)
            raise

    def _give_up(self, error: OSError) -> None:
        self._ended = True  # first: the warning may come here again
        if error.filename is None:
            error.filename = str(self._file)
        go_without(self._run, error)
        self.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read a ``metrics.jsonl``, whose objects have a ``"step"``.

    Raises:
        DataError: See `read_lines`.
    """
    return read_lines(file, lambda line: isinstance(line.get("step"), int), "metrics")


def read_lines(
    file: Path, valid: Callable[[dict[str, Any]], bool], what: str
) -> list[dict[str, Any]]:
    """Read a file of JSON objects, one per line.

    A last line without its end, left by a process that was killed as it wrote, is passed over.

    Args:
        file: The file.
        valid: Whether an object is of the kind that the file holds.
        what: What the file holds, for the error.

    Raises:
        DataError: A line is no such object, or the file is no text; the message names it.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (UnicodeDecodeError, OSError) as error:
        reason = f"these {what} cannot be read ({getattr(error, 'strerror', None) or 'no text'})"
        remedy = "Remove the file, or start a run in a new folder"
        raise DataError(what, str(file), reason, remedy) from None
    values = []
    for number, text in enumerate(lines[:-1], start=1):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or not valid(value):
            reason = f"this line of {what} is not a JSON object with a step"
            remedy = "Remove the line, or start a run in a new folder"
            raise DataError(f"{file}:{number}", text, reason, remedy)
        values.append(value)
    return values


def numbered(metrics: Mapping[str, float], name: str) -> dict[int, float]:
    """Return the values of ``NAME_0``, ``NAME_1``, ... by their number, in its order."""
    found = {
        int(key.removeprefix(f"{name}_")): value
        for key, value in metrics.items()
        if key.startswith(f"{name}_") and key.removeprefix(f"{name}_").isdecimal()
    }
    return dict(sorted(found.items()))


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
