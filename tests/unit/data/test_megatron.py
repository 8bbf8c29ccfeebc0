# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.megatron import read_indexed
from wavemare.errors import DataError

CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def write_indexed(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "u2",
    modes: bool = False,
) -> None:
    """Write data one value at a time, from the description of the format."""
    sequences = [sequence for document in documents for sequence in document]
    size = np.dtype(dtype).itemsize
    index = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", CODES[dtype])
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(documents) + 1)
    for sequence in sequences:
        index += struct.pack("<i", len(sequence))
    position = 0
    for sequence in sequences:
        index += struct.pack("<q", position)
        position += len(sequence) * size
    bound = 0
    index += struct.pack("<q", 0)
    for document in documents:
        bound += len(document)
        index += struct.pack("<q", bound)
    index += bytes(len(sequences)) if modes else b""
    Path(f"{prefix}.idx").write_bytes(index)
    tokens = [token for sequence in sequences for token in sequence]
    Path(f"{prefix}.bin").write_bytes(np.array(tokens, dtype=f"<{dtype}").tobytes())


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 120), max_size=5), max_size=3), min_size=1, max_size=6
    ),
    dtype=st.sampled_from(sorted(CODES)),
    modes=st.booleans(),
)
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[list[int]]],
    dtype: str,
    modes: bool,
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "corpus.v2"
    write_indexed(prefix, documents, dtype, modes)
    flat = [[token for sequence in document for token in sequence] for document in documents]
    if not any(flat):
        with pytest.raises(DataError, match="holds no tokens"):
            read_indexed(prefix)
        return
    store = read_indexed(prefix)
    assert [store.document(i).tolist() for i in range(store.num_documents)] == flat
    assert store.tokens.dtype == np.dtype(dtype)
    assert isinstance(store.tokens, np.memmap)
    assert store.vocab_size == max(token for document in flat for token in document) + 1
    assert read_indexed(prefix, vocab_size=500).vocab_size == 500


DAMAGES = {
    "short": (lambda b: b[:20], "20 bytes where the header alone has 34"),
    "empty": (lambda b: b"", "0 bytes where the header alone has 34"),
    "magic": (lambda b: b"X" + b[1:], r"magic is b'XMIDIDX.*b'MMIDIDX.*expected"),
    "version": (lambda b: b[:9] + struct.pack("<Q", 2) + b[17:], "version is 2 where 1"),
    "type": (lambda b: b[:17] + b"\x09" + b[18:], "type code is 9 where one of 1"),
    "truncated": (lambda b: b[:-3], r"\d+ bytes where 3 sequences and 3 document bounds take 94"),
    "sequences": (lambda b: b[:18] + struct.pack("<Q", 2**60) + b[26:], f"{2**60} sequences"),
    "negative": (lambda b: b[:34] + struct.pack("<i", -2) + b[38:], "sequence 0 is -2, below 0"),
    "pointer": (
        lambda b: b[:54] + struct.pack("<q", 7) + b[62:],
        "sequence 1 stands at byte 7 where 4 is expected",
    ),
    "first bound": (lambda b: b[:70] + struct.pack("<q", 1) + b[78:], "from 1 to 3 where 0 to 3"),
    "last bound": (lambda b: b[:-8] + struct.pack("<q", 2), "from 0 to 2 where 0 to 3"),
    "order": (lambda b: b[:78] + struct.pack("<q", 9) + b[86:], "fall from 9 to 3"),
    "longer": (
        lambda b: b[:42] + struct.pack("<i", 3) + b[46:],
        r"corpus.bin.*14 bytes where its index expects 12",
    ),
}


@pytest.mark.parametrize("damage", sorted(DAMAGES))
def test_damaged_files(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGES[damage]
    write_indexed(tmp_path / "corpus", [[[1, 2], [3]], [[4, 5, 6, 7]]])
    index = tmp_path / "corpus.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        read_indexed(tmp_path / "corpus")
    assert caught.value.key == "--data"
    assert "build them again" in caught.value.remedy


@pytest.mark.parametrize(("code", "name"), [(6, "float64"), (7, "float32")])
def test_other_numbers_are_no_tokens(tmp_path: Path, code: int, name: str) -> None:
    write_indexed(tmp_path / "corpus", [[[1, 2]]])
    index = tmp_path / "corpus.idx"
    index.write_bytes(index.read_bytes()[:17] + bytes([code]) + index.read_bytes()[18:])
    with pytest.raises(DataError, match=rf"holds {name} numbers, which are no tokens"):
        read_indexed(tmp_path / "corpus")


def test_bounds_whose_differences_overflow(tmp_path: Path) -> None:
    bounds = (0, 2**63 - 1, -(2**63), -1, 1)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, len(bounds))
    (tmp_path / "corpus.idx").write_bytes(header + struct.pack("<iq5q", 1, 0, *bounds))
    (tmp_path / "corpus.bin").write_bytes(b"\1\0")
    with pytest.raises(DataError, match="fall from 9223372036854775807 to -9223372036854775808"):
        read_indexed(tmp_path / "corpus")


def test_truncated_tokens(tmp_path: Path) -> None:
    write_indexed(tmp_path / "corpus", [[[1, 2, 3]]])
    (tmp_path / "corpus.bin").write_bytes(b"\0\0\0")
    with pytest.raises(DataError, match=r"corpus\.bin.*3 bytes where its index expects 6"):
        read_indexed(tmp_path / "corpus")


def test_missing_file(tmp_path: Path) -> None:
    write_indexed(tmp_path / "corpus", [[[1, 2, 3]]])
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin does not exist.*side by side"):
        read_indexed(tmp_path / "corpus")
