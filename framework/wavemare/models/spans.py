# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, copied and compared from file to file through one small buffer.

A processor's cache holds the buffer. So bytes move at the speed of ``cp``, where tensors would
first have to be mapped or allocated, page by page.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from wavemare.errors import CheckpointError
from wavemare.models.source import Span

_BUFFER = 2**19  # bytes


def within(spans: Sequence[Span], first: int, length: int) -> list[Span]:
    """Return a part of what stands in spans, counted in bytes."""
    found, last = [], first + length
    for span in spans:
        start, end = max(first, 0), min(last, span.length)
        if start < end:
            found.append(Span(span.file, span.start + start, end - start))
        first, last = first - span.length, last - span.length
    return found


def chunks(spans: Iterable[Span]) -> Iterator[memoryview]:
    """Yield the bytes of spans, part by part; the next part takes the place of the last.

    Raises:
        CheckpointError: A file is missing, or shorter than it was.
    """
    buffer, filled = memoryview(bytearray(_BUFFER)), 0
    path, file = None, -1
    try:
        for span in spans:
            if span.file != path:
                if file >= 0:
                    os.close(file)
                path, file = span.file, -1
                file = _opened(path)
            at, last = span.start, span.start + span.length
            while at < last:
                count = _read(span.file, file, buffer[filled : filled + last - at], at)
                at, filled = at + count, filled + count
                if filled == len(buffer):
                    yield buffer
                    filled = 0
        if filled:
            yield buffer[:filled]
    finally:
        if file >= 0:
            os.close(file)


def equal(one: Sequence[Span], other: Sequence[Span]) -> bool:
    """Whether the same bytes stand in both.

    Raises:
        CheckpointError: See `chunks`.
    """
    if sum(span.length for span in one) != sum(span.length for span in other):
        return False
    for pair in zip(chunks(one), chunks(other), strict=True):
        kind = np.uint64 if len(pair[0]) == _BUFFER else np.uint8
        left, right = (np.frombuffer(part, kind) for part in pair)
        if (left != right).any():
            return False
    return True


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error


def _read(path: Path, file: int, target: memoryview, at: int) -> int:
    try:
        count = os.preadv(file, [target], at)
    except OSError as error:
        raise _unreadable(path, error.strerror) from error
    if not count:
        raise _unreadable(path, "it ends too early")
    return count


def _unreadable(path: Path, why: str | None) -> CheckpointError:
    reason = f"it cannot be read ({why})"
    return CheckpointError("weights", str(path), reason, "Copy the file again")
