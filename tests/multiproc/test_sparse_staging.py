# SPDX-License-Identifier: Apache-2.0
"""What goes through chunks of another memory arrives as it is."""

import pytest

MODES = ["ordered", "pushpull", "streaming", "allgather", "packed", "dense"]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("modes", [MODES[:3], pytest.param(MODES[3:], marks=pytest.mark.nightly)])
def test_staged_messages_change_nothing(launch_once, modes):
    for results in launch_once("sparse_staging.py", *modes, ranks=3):
        assert len(results) == 2 * len(modes)
        for name, result in results.items():
            assert result["staged"]["same"], name
            assert result["staged"] == result["plain"], name
            assert any(result["plain"]["bytes"]), name
