# SPDX-License-Identifier: Apache-2.0
"""Stages on any ranks, several on each: their checkpoints elsewhere."""

import pytest


@pytest.mark.world_size(2)
def test_a_universal_checkpoint_goes_on_to_the_bit_in_any_placement(launch_once):
    for results in launch_once("placements.py", "universal"):
        assert len(results) == 3
        for case, found in results.items():
            assert not found.pop("damaged"), case
            whole = found.pop("whole")
            assert len(whole) == 2
            assert len(found) >= 1
            assert all(losses == whole for losses in found.values()), (case, whole, found)
