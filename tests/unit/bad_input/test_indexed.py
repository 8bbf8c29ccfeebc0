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
    pytest.param({"magic": b"TNTIDX\0\0\0"}, "its magic is b'TNTIDX", id="the older format"),
    ({"version": 2}, "its version is 2 where 1"),
    ({"code": 0}, "its type code is 0"),
    ({"code": 6}, "float64 numbers, which are no tokens"),
    ({"code": 4}, "sequence 1 stands at byte 10 where 20"),
    ({"sequences": 3}, "3 sequences and 3 document bounds"),
    ({"sequences": 2**64 - 1}, "18446744073709551615 seq"),
    ({"bounds_given": 2}, "2 document bounds take"),
    ({"bounds_given": 0, "bounds": []}, "from nothing where 0 to 2"),
    ({"lengths": [-5, 15]}, "length of sequence 0 is -5"),
    ({"lengths": [5, 6]}, "20 bytes where its index expects 22"),
    pytest.param(
        {"lengths": [2**31 - 1] * 2, "pointers": [0, 2 * (2**31 - 1)]},
        "20 bytes where its index expects 8589934588",
        id="largest lengths",
    ),
    ({"pointers": [0, 11]}, "at byte 11 where 10"),
    ({"pointers": [-1, 10]}, "at byte -1 where 0"),
    ({"bounds": [0, 1, 3]}, "go from 0 to 3"),
    ({"bounds": [0, -1, 2]}, "fall from 0 to -1"),
    (
        {"bounds_given": 5, "bounds": [0, 2**63 - 1, -(2**63), -1, 2]},
        "fall from 9223372036854775807 to -9223372036854775808",
    ),
]


@pytest.mark.parametrize(("changes", "said"), FIELDS)
def test_a_field(refused, data, changes, said):
    prefix = data(index(**changes))
    blamed = ".bin" if "its index expects" in said else ".idx"
    refused(lambda: open_indexed(prefix), DataError, "--data", f"{prefix}{blamed}", said)


@pytest.mark.parametrize("size", [0, 8, 9, 17, 18, 26, 34, 42, 58, 81, 85])
def test_an_index_of_another_size(refused, data, size):
    prefix = data((index() + b"123")[:size])
    said = f"{size} bytes where {'the header alone has 34' if size < 34 else '2 sequences'}"
    refused(lambda: open_indexed(prefix), DataError, "--data", "damaged", said, "Copy both")


def test_multimodal_data(refused, data):
    prefix = data(index() + bytes(2))
    refused(lambda: open_indexed(prefix), DataError, "--data", "multimodal data", "text alone")


@pytest.mark.parametrize("prefix", ["", ".", "/"])
def test_a_prefix_without_a_name(refused, prefix):
    refused(lambda: open_indexed(prefix), DataError, "--data", "names a folder", "FOLDER/NAME")


def test_one_file_alone(refused, write, tmp_path):
    write("a.idx", index())
    refused(lambda: open_indexed(tmp_path / "a"), DataError, "--data", "a.bin does not exist")
    write("b.bin", bytes(20))
    (tmp_path / "b.idx").mkdir()
    refused(lambda: open_indexed(tmp_path / "b"), DataError, "--data", "b.idx does not exist")
    refused(lambda: open_indexed("~nosuchuser/c"), DataError, "--data", "c.idx does not exist")


def test_no_tokens(refused, data):
    empty = {"sequences": 0, "bounds_given": 1, "lengths": [], "pointers": [], "bounds": [0]}
    prefix = data(index(**empty), 0)
    refused(lambda: read_indexed(prefix), DataError, "--data", "holds no tokens", "Build the data")
