# SPDX-License-Identifier: Apache-2.0
"""A resumed run goes on as if it had never stopped, bit for bit."""

import pytest

CASES = ["1", "3", "pipeline", "asynchronous"]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("half", [4, pytest.param(20, marks=pytest.mark.nightly)])
def test_resumed_losses_and_weights_equal_the_uninterrupted_run_bitwise(launch, tmp_path, half):
    folders = [tmp_path / name for name in ("whole", "resumed", "checkpoints")]
    for folder in folders:
        folder.mkdir()
    whole = launch("resume.py", folders[2], "whole", half, *CASES, folder=folders[0]).check()
    resumed = launch("resume.py", folders[2], "resumed", half, *CASES, folder=folders[1]).check()
    for rank in range(2):
        for case in CASES:
            expected, found = whole.result(rank)[case], resumed.result(rank)[case]
            assert expected["steps"] == found["steps"] == 2 * half
            assert found["losses"] == expected["losses"][half:], case
            assert found["weights"] == expected["weights"], case
