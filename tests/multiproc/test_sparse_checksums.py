# SPDX-License-Identifier: Apache-2.0
"""Checksums and staging of the sparse collective's messages change no sum; wrong bits are found."""

import json

import pytest

MODES = ("ordered", "pushpull", "allgather", "streaming", "agsparse", "sparcml", "rows")
BY_LIBRARY = ("dense", "packed")
TRAILER, SIGN = 16, -(1 << 31)


@pytest.fixture
def found(launch_once):
    """Return what each rank found in peace, by mode."""
    cases = {mode: [mode, None] for mode in (*MODES, *BY_LIBRARY)}
    return launch_once("sparse_checksums.py", json.dumps(cases))


@pytest.mark.parametrize("mode", MODES)
def test_each_message_has_one_and_sums_stay(found, mode):
    for rank in range(2):
        off, on = found[rank][mode]
        assert on["sums"] == off["sums"]
        payloads, trailers = on["sizes"][::2], on["sizes"][1::2]
        assert sorted(payloads) == sorted(off["sizes"])
        assert set(trailers) == {TRAILER}
        assert on["bytes_up"] == off["bytes_up"]


@pytest.mark.parametrize("mode", BY_LIBRARY)
def test_the_library_reduces_only_without_them(found, mode):
    for rank in range(2):
        off, on = found[rank][mode]
        # Of two terms in either order; +0.0 and -0.0 are one.
        assert [0 if w == SIGN else w for w in off["sums"]] == on["sums"]
        assert max(off["sizes"]) == 64  # what the ranks agree upon, and masks
        assert max(on["sizes"]) > 2048


@pytest.mark.parametrize(
    "mode",
    [
        "ordered",
        *(
            pytest.param(m, marks=pytest.mark.nightly)
            for m in ("pushpull", "streaming", "agsparse", "rows")
        ),
    ],
)
def test_a_wrong_bit_is_found_before_it_is_used(launch, found, tmp_path_factory, mode):
    sizes = found[0][mode][1]["sizes"]
    largest = sizes.index(max(sizes))
    cases = {"payload": [mode, largest], "checksum": [mode, largest + 1], "header": [mode, 0]}
    folder = tmp_path_factory.mktemp("wrong")  # beside the results of the other run
    finished = launch("sparse_checksums.py", json.dumps(cases), folder=folder, own=True).check()
    for name in cases:
        told = finished.result(1)[name]
        assert "message from rank 0 to rank 1 = 'part of a collective'" in told["error"]
        assert "its checksum does not fit" in told["error"]
        operation = "allreduce_rows_()" if mode == "rows" else "allreduce_(weights)"
        assert told["notes"] == [f"in collective #0, {operation}"]
        assert told["code"] == 1  # which a restart may mend
        assert "error" not in finished.result(0)[name]


STAGED_MODES = ["ordered", "pushpull", "streaming", "allgather", "packed", "dense"]


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    "modes", [STAGED_MODES[:3], pytest.param(STAGED_MODES[3:], marks=pytest.mark.nightly)]
)
def test_staged_messages_change_nothing(launch_once, modes):
    for results in launch_once("sparse_staging.py", *modes, ranks=3):
        assert len(results) == 2 * len(modes)
        for name, result in results.items():
            assert result["staged"]["same"], name
            assert result["staged"] == result["plain"], name
            assert any(result["plain"]["bytes"]), name
