# SPDX-License-Identifier: Apache-2.0
"""Whatever bytes an index is made of: `DataError`, or data that agrees with itself."""

import struct
import tracemalloc

import numpy as np
import pytest
from fuzz_strategies import FUZZ
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data import open_indexed
from wavemare.errors import DataError

HEADER = struct.Struct("<9sQBQQ")
MOST_BYTES = 8 << 20  # of memory, for files of a few hundred bytes

EXTREMES = [0, 1, 2, 127, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
SIZES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@st.composite
def valid(draw):
    """An index and its tokens."""
    code = draw(st.sampled_from(sorted(SIZES)))
    lengths = draw(st.lists(st.integers(0, 5), max_size=5))
    inner = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
    bounds = [0, *inner, len(lengths)]
    item = np.dtype(SIZES[code]).itemsize
    pointers = (np.cumsum([0, *lengths])[:-1] * item).tolist()
    index = HEADER.pack(b"MMIDIDX\0\0", 1, code, len(lengths), len(bounds))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    return index + np.array(bounds, "<i8").tobytes(), bytes(sum(lengths) * item)


def field(content, place, size, value):
    changed = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return content[:place] + changed + content[place + size :]


@st.composite
def damaged(draw):
    """An index after some flips of bits, changed fields, cuts and insertions; and its tokens."""
    index, tokens = draw(valid())
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(index) - 1, 0)))
        kind = draw(st.sampled_from(["flip", "field", "extreme", "cut", "insert", "delete"]))
        if kind == "flip" and index:
            index = field(index, place, 1, index[place] ^ (1 << draw(st.integers(0, 7))))
        elif kind in ("field", "extreme"):
            size = draw(st.sampled_from([1, 4, 8]))
            values = st.sampled_from(EXTREMES) if kind == "extreme" else st.integers(-3, 9)
            index = field(index, place, size, draw(values))
        elif kind == "cut":
            index = index[:place]
        elif kind == "insert":
            index = index[:place] + draw(st.binary(max_size=16)) + index[place:]
        elif kind == "delete":
            index = index[:place] + index[place + 1 :]
    if draw(st.booleans()):
        tokens = tokens[: draw(st.integers(0, len(tokens)))] + draw(st.binary(max_size=4))
    return index, tokens


@pytest.fixture
def prefix(tmp_path):
    return tmp_path / "corpus"


def examine(prefix, index, tokens):
    """Open the files; return the data, or None if they are refused."""
    prefix.with_suffix(".idx").write_bytes(index)
    prefix.with_suffix(".bin").write_bytes(tokens)
    tracemalloc.start()
    try:
        opened = open_indexed(prefix)
        store = opened.store()
        documents = [store.document(number) for number in range(store.num_documents)]
        assert sum(len(document) for document in documents) == len(opened.tokens)
        assert int(opened.lengths.sum(dtype="int64")) == len(opened.tokens)
        assert opened.tokens.nbytes == len(tokens)
    except DataError:
        return None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < MOST_BYTES
    return opened


@FUZZ
@given(valid())
def test_what_is_valid_is_read(prefix, files):
    assert examine(prefix, *files) is not None


@FUZZ
@given(damaged())
def test_damaged_files(prefix, files):
    examine(prefix, *files)


@FUZZ
@given(st.binary(max_size=200), st.binary(max_size=40))
def test_any_bytes(prefix, index, tokens):
    examine(prefix, index, tokens)
