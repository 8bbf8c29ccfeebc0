# SPDX-License-Identifier: Apache-2.0
"""Megatron's ``.bin`` and ``.idx``: every field wrong, and the file cut at every border."""

import struct

import numpy as np
import pytest

from wavemare.data.indexed import open_indexed, read_indexed
from wavemare.errors import DataError

HEADER = struct.Struct("<9sQBQQ")
VALID = {
    "magic": b"MMIDIDX\0\0",
    "version": 1,
    "code": 8,
    "sequences": 2,
    "bounds_given": 3,
    "lengths": [5, 5],
    "pointers": [0, 10],
    "bounds": [0, 1, 2],
}


def index(**changes):
    """The bytes of an index of two documents of five 16-bit tokens, with changes."""
    values = {**VALID, **changes}
    names = ("magic", "version", "code", "sequences", "bounds_given")
    return (
        HEADER.pack(*(values[name] for name in names))
        + np.array(values["lengths"], "<i4").tobytes()
        + np.array(values["pointers"], "<i8").tobytes()
        + np.array(values["bounds"], "<i8").tobytes()
    )


@pytest.fixture
def data(write):
    def put(content, tokens=20, name="corpus"):
        write(f"{name}.idx", content)
        return write(f"{name}.bin", bytes(tokens)).with_suffix("")

    return put


FIELDS = [
    pytest.param({"magic": b"TNTIDX\0\0\0"}, id="the older format"),
    {"version": 2},
    {"code": 0},
    {"code": 6},
    {"code": 4},
    {"sequences": 3},
    {"sequences": 2**64 - 1},
    {"bounds_given": 2},
    {"bounds_given": 0, "bounds": []},
    {"lengths": [-5, 15]},
    {"lengths": [5, 6]},
    pytest.param(
        {"lengths": [2**31 - 1] * 2, "pointers": [0, 2 * (2**31 - 1)]}, id="largest lengths"
    ),
    {"pointers": [0, 11]},
    {"pointers": [-1, 10]},
    {"bounds": [0, 1, 3]},
    {"bounds": [0, -1, 2]},
    {"bounds_given": 5, "bounds": [0, 2**63 - 1, -(2**63), -1, 2]},
]


@pytest.mark.parametrize("changes", FIELDS)
def test_a_field(refused, data, changes):
    prefix = data(index(**changes))
    refused(lambda: open_indexed(prefix), DataError, "--data")


@pytest.mark.parametrize("size", [0, 8, 9, 17, 18, 26, 34, 42, 58, 81, 84, 85])
def test_an_index_of_another_size(refused, data, size):
    prefix = data((index() + b"123")[:size])
    refused(lambda: open_indexed(prefix), DataError, "--data")


@pytest.mark.parametrize("prefix", ["", ".", "/", "~nosuchuser/c"])
def test_a_prefix_without_a_name(refused, prefix):
    refused(lambda: open_indexed(prefix), DataError, "--data")


def test_one_file_alone(refused, write, tmp_path):
    write("a.idx", index())
    write("b.bin", bytes(20))
    (tmp_path / "b.idx").mkdir()
    for prefix in (tmp_path / "a", tmp_path / "b"):
        refused(lambda: open_indexed(prefix), DataError, "--data")  # noqa: B023


def test_no_tokens(refused, data):
    empty = {"sequences": 0, "bounds_given": 1, "lengths": [], "pointers": [], "bounds": [0]}
    prefix = data(index(**empty), 0)
    refused(lambda: read_indexed(prefix), DataError, "--data")
