# SPDX-License-Identifier: Apache-2.0
"""Megatron's indexed data: ``PREFIX.bin`` holds tokens, ``PREFIX.idx`` says where each stands.

The index is, in little-endian order: the magic, the version, a code of the tokens' type, the number
of sequences and of document bounds (34 bytes in all), the length of each sequence in tokens, its
position in bytes, and the first sequence of each document (with an end mark). Multimodal data,
whose index has one byte more per sequence, is refused.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavemare.data.sources import check_prefix
from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
"""First bytes of an index."""

VERSION = 1
"""The only version of the format that there has been."""

HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, code of the type, number of sequences, number of document bounds."""

TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Types of tokens by their code."""

_FLOATS = {6: "float64", 7: "float32"}


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
        prefix: The path without ``.bin`` or ``.idx``.

    Raises:
        DataError: A file is missing, or the index contradicts itself or the size of a file; the
            message says what was found and what was expected.
    """
    prefix = Path(os.path.expanduser(prefix))
    check_prefix("--data", prefix)
    index_path, data_path = index_file(prefix), data_file(prefix)
    for path in (index_path, data_path):
        if not path.is_file():
            remedy = f"Put {data_path.name} and {index_path.name} side by side"
            raise DataError("--data", str(prefix), f"the file {path} does not exist", remedy)
    try:
        return _open(prefix, index_path, data_path)
    except OSError as error:
        reason = f"the files cannot be read ({error.strerror})"
        raise DataError("--data", str(prefix), reason, "Check the permissions") from error


def _open(prefix: Path, index_path: Path, data_path: Path) -> IndexedData:
    dtype, num_sequences, num_bounds = _read_header(index_path)
    lengths, pointers, bounds = _read_arrays(index_path, num_sequences, num_bounds)
    starts = _sequence_starts(index_path, lengths, pointers, dtype)
    _check_bounds(index_path, bounds, num_sequences)
    expected, found = int(starts[-1]) * dtype.itemsize, data_path.stat().st_size
    if found != expected:
        reason = f"it has {found} bytes where its index expects {expected}"
        raise _corrupt(data_path, reason)
    # An empty file cannot be mapped.
    tokens = np.memmap(data_path, dtype=dtype, mode="r") if found else np.empty(0, dtype)
    return IndexedData(prefix, tokens, lengths, starts, bounds)


def index_file(prefix: Path) -> Path:
    """Return where the index of a prefix stands, which may itself have a dot."""
    return prefix.with_name(f"{prefix.name}.idx")


def data_file(prefix: Path) -> Path:
    """Return where the tokens of a prefix stand."""
    return prefix.with_name(f"{prefix.name}.bin")


def _read_header(path: Path) -> tuple[np.dtype[Any], int, int]:
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size:
        reason = f"it has {len(header)} bytes where the header alone has {HEADER.size}"
        raise _corrupt(path, reason)
    magic, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if magic != MAGIC:
        raise _corrupt(path, f"its magic is {magic!r} where {MAGIC!r} is expected")
    if version != VERSION:
        raise _corrupt(path, f"its version is {version} where {VERSION} is expected")
    if code in _FLOATS:
        reason = f"it holds {_FLOATS[code]} numbers, which are no tokens"
        raise DataError("--data", str(path), reason, "Name data of whole numbers")
    if code not in TYPES:
        codes = ", ".join(f"{number} ({dtype.name})" for number, dtype in TYPES.items())
        raise _corrupt(path, f"its type code is {code} where one of {codes} is expected")
    return TYPES[code], num_sequences, num_bounds


def _read_arrays(
    path: Path, num_sequences: int, num_bounds: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    found = path.stat().st_size
    expected = HEADER.size + 12 * num_sequences + 8 * num_bounds
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
    pointers_at = HEADER.size + 4 * num_sequences
    bounds_at = pointers_at + 8 * num_sequences
    lengths = data[HEADER.size : pointers_at].view("<i4")
    pointers = data[pointers_at:bounds_at].view("<i8")
    bounds = data[bounds_at:].view("<i8")
    return lengths, pointers, bounds


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
