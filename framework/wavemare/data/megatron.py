"""Megatron's indexed data: ``PREFIX.bin`` holds tokens, ``PREFIX.idx`` says where each stands.

The index is, in little-endian order: the magic, the version, a code of the tokens' type, the number
of sequences and of document bounds (34 bytes in all), the length of each sequence in tokens, its
position in bytes, the first sequence of each document (with an end mark), and for multimodal data
one byte per sequence.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

__all__ = ["read_indexed"]

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}


def read_indexed(prefix: str | Path, *, vocab_size: int | None = None) -> TokenStore:
    """Open Megatron data; the tokens stay on disk until they are used.

    A document may be several sequences; their tokens stand end to end.

    Args:
        prefix: The path without ``.bin`` or ``.idx``.
        vocab_size: Size of the tokenizer's vocabulary, if it is known.

    Raises:
        DataError: A file is missing, or the index contradicts itself or the size of a file; the
            message says what was found and what was expected.
    """
    prefix = Path(prefix).expanduser()
    index_path = prefix.with_name(f"{prefix.name}.idx")
    data_path = prefix.with_name(f"{prefix.name}.bin")
    for path in (index_path, data_path):
        if not path.is_file():
            remedy = f"Put {prefix.name}.bin and {prefix.name}.idx side by side"
            raise DataError("--data", str(prefix), f"the file {path} does not exist", remedy)
    dtype, num_sequences, num_bounds = _read_header(index_path)
    lengths, pointers, bounds = _read_arrays(index_path, num_sequences, num_bounds)
    starts = _sequence_starts(index_path, lengths, pointers, dtype)
    _check_bounds(index_path, bounds, num_sequences)
    expected, found = int(starts[-1]) * dtype.itemsize, data_path.stat().st_size
    if found != expected:
        reason = f"it has {found} bytes where its index expects {expected}"
        raise _corrupt(data_path, reason)
    if expected == 0:
        reason = "the corpus is empty: it holds no tokens"
        raise DataError("--data", str(prefix), reason, "Build the data from files that hold text")
    tokens = np.memmap(data_path, dtype=dtype, mode="r")
    return TokenStore(tokens, starts[bounds], vocab_size=vocab_size, name=str(prefix))


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
    if code not in _TYPES:
        codes = ", ".join(f"{number} ({dtype.name})" for number, dtype in _TYPES.items())
        raise _corrupt(path, f"its type code is {code} where one of {codes} is expected")
    return _TYPES[code], num_sequences, num_bounds


def _read_arrays(
    path: Path, num_sequences: int, num_bounds: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    found = path.stat().st_size
    plain = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    with_modes = plain + num_sequences
    if found not in (plain, with_modes):
        reason = (
            f"it has {found} bytes where {num_sequences} sequences and {num_bounds} document "
            f"bounds take {plain} (or {with_modes} with modes)"
        )
        raise _corrupt(path, reason)
    data = np.memmap(path, dtype=np.uint8, mode="r", offset=0)
    pointers_at = _HEADER.size + 4 * num_sequences
    bounds_at = pointers_at + 8 * num_sequences
    lengths = data[_HEADER.size : pointers_at].view("<i4")
    pointers = data[pointers_at:bounds_at].view("<i8")
    bounds = data[bounds_at:plain].view("<i8")
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
    if (np.diff(bounds) < 0).any():
        where = int(np.flatnonzero(np.diff(bounds) < 0)[0])
        reason = f"its document bounds fall from {bounds[where]} to {bounds[where + 1]}"
        raise _corrupt(path, reason)


def _corrupt(path: Path, reason: str) -> DataError:
    remedy = "Copy both files again, or build them again"
    return DataError("--data", str(path), f"the file is damaged: {reason}", remedy)
