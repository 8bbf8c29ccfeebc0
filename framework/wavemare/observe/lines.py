# SPDX-License-Identifier: Apache-2.0
"""Files that grow by whole lines while a run trains, and end where they cannot be written."""

from __future__ import annotations

import logging
from contextlib import suppress
from io import FileIO
from pathlib import Path

__all__ = ["Lines", "go_without"]

logger = logging.getLogger("wavemare")

_told: set[Path] = set()
"""Run folders of which this process has said that something cannot be written there."""


def go_without(run: Path, error: OSError) -> None:
    """Warn, once for a run folder, that the training goes on without what failed.

    Args:
        run: The folder.
        error: Why something in it cannot be written: a full disk, for one.
    """
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
