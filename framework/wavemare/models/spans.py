# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights, copied and compared from file to file through one small buffer.

A processor's cache holds the buffer. So bytes move at the speed of ``cp``, where tensors would
first have to be mapped or allocated, page by page. `Copied` takes checksums while bytes are copied,
so that a comparison reads the copy alone.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import cycle
from pathlib import Path

import numpy as np
import xxhash

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


class Copied:
    """Checksums of the bytes that were copied, by the places that they came from."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int], tuple[int, int]] = {}

    def note(self, span: Span, checksum: int) -> None:
        """Keep the checksum of a span that was read."""
        self._known[span.file, span.start] = span.length, checksum

    def of(self, spans: Sequence[Span]) -> list[tuple[int, int]] | None:
        """Return lengths and checksums of the parts in which spans were read.

        None if a byte of them was not read, or only together with others.
        """
        found = []
        for span in spans:
            at, last = span.start, span.start + span.length
            while at < last:
                length, checksum = self._known.get((span.file, at), (0, 0))
                if not length or at + length > last:
                    return None
                found.append((length, checksum))
                at += length
        return found


def chunks(spans: Sequence[Span], copied: Copied | None = None) -> Iterator[memoryview]:
    """Yield the bytes of spans, part by part; one is read while a caller works with the last.

    The part after the next one takes the place of the last.

    Args:
        spans: The places.
        copied: Gets the checksum of each span.

    Raises:
        CheckpointError: A file is missing, or shorter than it was.
    """
    with closing(_parts(spans, copied, buffers=2)) as parts:
        if sum(span.length for span in spans) <= _BUFFER:
            yield from parts
            return
        with ThreadPoolExecutor(1, "bytes") as pool:
            coming = pool.submit(next, parts, None)
            while (part := coming.result()) is not None:
                coming = pool.submit(next, parts, None)
                yield part


def _parts(
    spans: Sequence[Span], copied: Copied | None = None, *, buffers: int = 1
) -> Generator[memoryview, None, None]:
    """Yield the bytes of spans, part by part; buffers take turns."""
    size = min(sum(span.length for span in spans), _BUFFER)
    turns = cycle([memoryview(bytearray(size)) for _ in range(buffers)])
    buffer, filled = next(turns), 0
    path, file = None, -1
    try:
        for span in spans:
            if span.file != path:
                if file >= 0:
                    os.close(file)
                path, file = span.file, -1
                file = _opened(path)
            checksum = xxhash.xxh3_64()
            at, last = span.start, span.start + span.length
            while at < last:
                count = _read(span.file, file, buffer[filled : filled + last - at], at)
                if copied is not None:
                    checksum.update(buffer[filled : filled + count])
                at, filled = at + count, filled + count
                if filled == len(buffer):
                    yield buffer
                    buffer, filled = next(turns), 0
            if copied is not None:
                copied.note(span, checksum.intdigest())
        if filled:
            yield buffer[:filled]
    finally:
        if file >= 0:
            os.close(file)


def equal(one: Sequence[Span], other: Sequence[Span], copied: Copied | None = None) -> bool:
    """Whether the same bytes stand in both.

    Args:
        one: Spans.
        other: Other ones.
        copied: If it knows the first spans, they are not read.

    Raises:
        CheckpointError: See `chunks`.
    """
    if sum(span.length for span in one) != sum(span.length for span in other):
        return False
    known = copied.of(one) if copied is not None else None
    if known is not None:
        return _has(other, known)
    for pair in zip(_parts(one), _parts(other), strict=True):
        kind = np.uint64 if len(pair[0]) == _BUFFER else np.uint8
        left, right = (np.frombuffer(part, kind) for part in pair)
        if (left != right).any():
            return False
    return True


def _has(spans: Sequence[Span], known: Sequence[tuple[int, int]]) -> bool:
    """Whether bytes, cut into parts of known lengths, have these checksums."""
    first = 0
    for length, expected in known:
        checksum = xxhash.xxh3_64()
        for part in _parts(within(spans, first, length)):
            checksum.update(part)
        if checksum.intdigest() != expected:
            return False
        first += length
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
