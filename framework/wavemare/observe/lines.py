# SPDX-License-Identifier: Apache-2.0
"""Files of one JSON object per line: they grow while a run trains, and are read by the report."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from wavemare.errors import DataError

__all__ = ["Lines", "go_without", "numbered", "read_lines", "read_metrics"]

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
