# SPDX-License-Identifier: Apache-2.0
"""A training that goes back to its checkpoint, in the process in which something went wrong."""

import pytest

CASES = [
    *(f"{what}, ZeRO {stage}" for what in ("bad", "open") for stage in range(4)),
    *("open, offload", "bad, bf16", "bad, 1f1b", "bad, pipemare"),
    *("waves, async", "waves, replica", "waves, sparse", "waves, sync"),
    *("nothing there, None", "nothing there, none"),
]


@pytest.mark.parametrize("name", CASES)
def test_nothing_of_what_went_wrong_is_left(launch_once, name):
    for result in launch_once("going_back.py"):
        found, expected = result[name]
        assert len(found) >= 3
        assert found == expected
