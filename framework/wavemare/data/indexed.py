# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed data: ``PREFIX.bin`` holds tokens, ``PREFIX.idx`` says where each stands.

`open_indexed` reads it. `IndexedWriter` writes it sequence by sequence, `merge_indexed` from other
data sets.

The index is, in little-endian order: the magic, the version, a code of the tokens' type, the number
of sequences and of document bounds (34 bytes in all), the length of each sequence in tokens, its
position in bytes, and the first sequence of each document (with an end mark). Multimodal data,
whose index has one byte more per sequence, is refused.
"""

from __future__ import annotations

import os
import shutil
import struct
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from wavemare.data.sources import as_prefix, with_extension
from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError, os_errors
from wavemare.files import temporary_sibling

_MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of an index."""

_VERSION = 1
"""The only version of the format that there has been."""

_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, number of sequences, number of document bounds."""

_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Types of tokens by their code."""

_FLOATS = {6: "float64", 7: "float32"}
_COPY_BYTES = 1 << 24
_LARGEST_LENGTH = np.iinfo(np.int32).max


@dataclass(frozen=True)
class IndexedData:
    """Megatron data, opened and checked; all arrays stay on disk until they are used.

    Attributes:
        prefix: The path without ``.bin`` and ``.idx``.
        tokens: All tokens, integer [num_tokens].
        lengths: Tokens of each sequence, int32 [num_sequences].
        starts: Where each sequence starts, and the end of the last, int64 [num_sequences + 1].
        bounds: First sequence of each document, and the end, int64 [num_documents + 1].
    """

    prefix: Path
    tokens: NDArray[Any]
    lengths: NDArray[np.int32]
    starts: NDArray[np.int64]
    bounds: NDArray[np.int64]

    def store(self, vocab_size: int | None = None, *, sequences: bool = False) -> TokenStore:
        """Return the tokens by document, or by sequence, as Megatron's GPT reads them."""
        offsets = self.starts if sequences else self.starts[self.bounds]
        return TokenStore(self.tokens, offsets, vocab_size=vocab_size, name=str(self.prefix))


def read_indexed(prefix: str | Path, *, vocab_size: int | None = None) -> TokenStore:
    """Open the tokens of Megatron data by document; see `open_indexed`.

    A document may be several sequences; their tokens stand end to end.

    Raises:
        DataError: A file is missing or damaged, or there are no tokens at all.
    """
    data = open_indexed(prefix)
    if len(data.tokens) == 0:
        reason = "the corpus is empty: it holds no tokens"
        raise DataError("--data", str(prefix), reason, "Build the data from files that hold text")
    return data.store(vocab_size)


def open_indexed(prefix: str | Path) -> IndexedData:
    """Open Megatron data and check that index and tokens agree.

    Args:
        prefix: The path, with or without ``.bin`` or ``.idx``.

    Raises:
        DataError: A file is missing, or the index contradicts itself or the size of a file; the
            message says what was found and what was expected.
    """
    prefix = as_prefix("--data", prefix)
    index_path, data_path = with_extension(prefix, ".idx"), with_extension(prefix, ".bin")
    for path in (index_path, data_path):
        if not path.is_file():
            remedy = f"Put {data_path.name} and {index_path.name} side by side"
            raise DataError("--data", str(prefix), f"the file {path} does not exist", remedy)
    remedy = "Check the permissions"
    with os_errors(DataError, "--data", str(prefix), "the files cannot be read", remedy):
        return _open(prefix, index_path, data_path)


def _open(prefix: Path, index_path: Path, data_path: Path) -> IndexedData:
    dtype, num_sequences, num_bounds = _read_header(index_path)
    lengths, pointers, bounds = _read_arrays(index_path, num_sequences, num_bounds)
    starts = _sequence_starts(index_path, lengths, pointers, dtype)
    _check_bounds(index_path, bounds, num_sequences)
    expected, found = int(starts[-1]) * dtype.itemsize, data_path.stat().st_size
    if found != expected:
        raise _corrupt(data_path, f"it has {found} bytes where its index expects {expected}")
    # An empty file cannot be mapped.
    tokens = np.memmap(data_path, dtype=dtype, mode="r") if found else np.empty(0, dtype)
    return IndexedData(prefix, tokens, lengths, starts, bounds)


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:
        reason = f"it has {len(header)} bytes where the header alone has {_HEADER.size}"
        raise _corrupt(path, reason)
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _corrupt(path, f"its magic is {magic!r} where {_MAGIC!r} is expected")
    if version != _VERSION:
        raise _corrupt(path, f"its version is {version} where {_VERSION} is expected")
    if code in _FLOATS:
        reason = f"it holds {_FLOATS[code]} numbers, which are no tokens"
        raise DataError("--data", str(path), reason, "Name data of whole numbers")
    if code not in _TYPES:
        codes = ", ".join(f"{number} ({dtype.name})" for number, dtype in _TYPES.items())
        raise _corrupt(path, f"its type code is {code} where one of {codes} is expected")
    return _TYPES[code], num_sequences, num_bounds


def _read_arrays(
    path: Path, num_sequences: int, num_bounds: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    found = path.stat().st_size
    expected = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    if found == expected + num_sequences and num_sequences:
        reason = "it is of multimodal data, whose sequences have modes"
        raise DataError("--data", str(path), reason, "Build the data from text alone")
    if found != expected:
        reason = (
            f"it has {found} bytes where {num_sequences} sequences and {num_bounds} document "
            f"bounds take {expected}"
        )
        raise _corrupt(path, reason)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=0)
    pointers_at = _HEADER.size + 4 * num_sequences
    bounds_at = pointers_at + 8 * num_sequences
    lengths = data[_HEADER.size : pointers_at].view("<i4")
    pointers = data[pointers_at:bounds_at].view("<i8")
    return lengths, pointers, data[bounds_at:].view("<i8")


def _sequence_starts(
    path: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    dtype: np.dtype[Any],
) -> NDArray[np.int64]:
    if len(lengths) and lengths.min() < 0:
        where = int(lengths.argmin())
        raise _corrupt(path, f"the length of sequence {where} is {lengths[where]}, below 0")
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    wrong = np.flatnonzero(pointers != starts[:-1] * dtype.itemsize)
    if len(wrong):
        first = int(wrong[0])
        expected = int(starts[first]) * dtype.itemsize
        reason = f"sequence {first} stands at byte {pointers[first]} where {expected} is expected"
        raise _corrupt(path, reason)
    return starts


def _check_bounds(path: Path, bounds: NDArray[np.int64], num_sequences: int) -> None:
    if len(bounds) < 1 or bounds[0] != 0 or bounds[-1] != num_sequences:
        ends = f"{bounds[0]} to {bounds[-1]}" if len(bounds) else "nothing"
        reason = f"its document bounds go from {ends} where 0 to {num_sequences} is expected"
        raise _corrupt(path, reason)
    falls = np.flatnonzero(bounds[1:] < bounds[:-1])  # a difference might overflow
    if len(falls):
        where = int(falls[0])
        reason = f"its document bounds fall from {bounds[where]} to {bounds[where + 1]}"
        raise _corrupt(path, reason)


def _corrupt(path: Path, reason: str) -> DataError:
    remedy = "Copy both files again, or build them again"
    return DataError("--data", str(path), f"the file is damaged: {reason}", remedy)


class IndexedWriter:
    """Writes ``PREFIX.bin`` and ``PREFIX.idx``, the bytes that Megatron-core would write.

    A context manager: when its block ends well, so does an open document, and both files appear; if
    it raises, nothing is left.
    Tokens go to disk at once. The index needs 12 bytes of memory per sequence.

    Args:
        prefix: The target, with or without ``.bin`` or ``.idx``; its folder is made.
        dtype: Type of the tokens, one that the format knows.
        overwrite: Replace files of the target's name.

    Raises:
        DataError: The format has no such type, a file of the target's name exists, or nothing can
            be written there.
    """

    def __init__(self, prefix: str | Path, dtype: Any, *, overwrite: bool = False) -> None:
        self.prefix = as_prefix("--output", prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        codes = {known: code for code, known in _TYPES.items()}
        if self.dtype not in codes:
            remedy = f"Choose one of {', '.join(known.name for known in codes)}"
            raise DataError("dtype", str(self.dtype), "the format has no such type", remedy)
        self._code = codes[self.dtype]
        for file in (with_extension(self.prefix, end) for end in (".bin", ".idx")):
            if file.exists() and not overwrite:
                reason, remedy = f"the file {file} exists", "Give --overwrite to replace it"
                raise DataError("--output", str(self.prefix), reason, remedy)
        self.tokens = self._open = 0
        self._lengths, self._bounds = array("i"), array("q", [0])
        self._partial = temporary_sibling(with_extension(self.prefix, ".bin"))
        self._partial_index = temporary_sibling(with_extension(self.prefix, ".idx"))
        what, remedy = "nothing can be written there", "Name another place"
        with os_errors(DataError, "--output", str(prefix), what, remedy):
            self.prefix.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._partial.open("wb")

    @property
    def documents(self) -> int:
        """Number of documents that have ended."""
        return len(self._bounds) - 1

    def add_sequence(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append one sequence to the present document; see `add_part`."""
        self.add_part(tokens)
        self.end_sequence()

    def add_part(self, tokens: Sequence[int] | NDArray[Any]) -> None:
        """Append tokens to the present sequence, which `end_sequence` ends.

        Raises:
            DataError: A token is no whole number or does not fit the type, the sequence is longer
                than the format allows, or the disk is full.
        """
        values = np.asarray(tokens)
        if values.size and values.dtype.kind not in "iu":
            reason = f"tokens are whole numbers, not {values.dtype}"
            raise DataError(str(self.prefix), "tokens", reason, "Give integers")
        if values.size and not np.can_cast(values.dtype, self.dtype):
            limits = np.iinfo(self.dtype)
            if values.min() < limits.min or values.max() > limits.max:
                reason = f"tokens from {values.min()} to {values.max()} do not fit {self.dtype}"
                raise DataError(str(self.prefix), "tokens", reason, "Choose a wider type")
        self._open += values.size
        if self._open > _LARGEST_LENGTH:
            reason = f"a sequence of {self._open} tokens is longer than {_LARGEST_LENGTH}"
            raise DataError(str(self.prefix), "tokens", reason, "Cut the document")
        with self._writing():
            self._file.write(values.astype(self.dtype, copy=False).tobytes())
        self.tokens += values.size

    def end_sequence(self) -> None:
        """End the sequence; the next tokens begin another."""
        self._lengths.append(self._open)
        self._open = 0

    def end_document(self) -> None:
        """End the document; the next sequence begins another."""
        self._bounds.append(len(self._lengths))

    def add_indexed(self, data: IndexedData) -> None:
        """Append a whole data set of the same type with its documents.

        Raises:
            DataError: The disk is full.
        """
        with with_extension(data.prefix, ".bin").open("rb") as source, self._writing():
            shutil.copyfileobj(source, self._file, _COPY_BYTES)
        bounds = np.asarray(data.bounds[1:]) + len(self._lengths)
        self._lengths.frombytes(np.asarray(data.lengths, np.intc).tobytes())
        self._bounds.frombytes(bounds.astype(np.int64).tobytes())
        self.tokens += len(data.tokens)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with self._writing():
                    self._finish()
        finally:
            with suppress(OSError):  # a full disk has no room for what the buffer holds
                self._file.close()
            self._partial.unlink(missing_ok=True)
            self._partial_index.unlink(missing_ok=True)

    def _writing(self) -> AbstractContextManager[None]:
        remedy = "Make room, or name another place"
        return os_errors(DataError, "--output", str(self.prefix), "it cannot be written", remedy)

    def _finish(self) -> None:
        """Write the index and give both files their names."""
        if self._bounds[-1] != len(self._lengths):  # no reader takes sequences of no document
            self.end_document()
        self._partial_index.write_bytes(self._index())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._partial, with_extension(self.prefix, ".bin"))
        os.replace(self._partial_index, with_extension(self.prefix, ".idx"))

    def _index(self) -> bytes:
        lengths = np.frombuffer(self._lengths, np.intc).astype("<i4")
        pointers = np.zeros(len(lengths), "<i8")
        if len(lengths):
            np.cumsum(lengths[:-1], out=pointers[1:], dtype="<i8")
        pointers *= self.dtype.itemsize
        bounds = np.frombuffer(self._bounds, np.int64).astype("<i8")
        header = _HEADER.pack(_MAGIC, _VERSION, self._code, len(lengths), len(bounds))
        return b"".join([header, lengths.tobytes(), pointers.tobytes(), bounds.tobytes()])


def merge_indexed(
    prefixes: Sequence[str | Path], output: str | Path, *, overwrite: bool = False
) -> None:
    """Concatenate data sets.

    Args:
        prefixes: The data sets, in this order.
        output: Prefix of the target, none of them.
        overwrite: Replace files of the target's name.

    Raises:
        DataError: They differ in the type of tokens, a file is damaged, or the target exists or is
            one of them.
    """
    parts = [open_indexed(prefix) for prefix in prefixes]
    if not parts:
        raise DataError("PREFIX", [], "there is nothing to merge", "Name data sets to merge")
    dtype, target = parts[0].tokens.dtype, as_prefix("--output", output)
    for part in parts:
        if part.prefix.resolve() == target.resolve():
            reason = "the target is one of the data sets to merge"
            raise DataError("--output", str(output), reason, "Choose another name")
        if part.tokens.dtype != dtype:
            reason = f"its tokens are {part.tokens.dtype}, and those of {parts[0].prefix} {dtype}"
            raise DataError("PREFIX", str(part.prefix), reason, "Build both in the same way")
    with IndexedWriter(target, dtype, overwrite=overwrite) as writer:
        for part in parts:
            writer.add_indexed(part)
