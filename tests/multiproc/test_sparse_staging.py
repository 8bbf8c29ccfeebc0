# SPDX-License-Identifier: Apache-2.0
"""Messages of the sparse collective that are staged through the host change no sum."""

import pytest

STAGED_MODES = ["ordered", "pushpull", "allgather", "packed", "dense"]


@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    "modes", [STAGED_MODES[:2], pytest.param(STAGED_MODES[2:], marks=pytest.mark.nightly)]
)
def test_staged_messages_change_nothing(launch_once, modes):
    for results in launch_once("sparse_staging.py", *modes, ranks=3):
        assert len(results) == 2 * len(modes)
        for name, result in results.items():
            assert result["staged"]["same"], name
            assert result["staged"] == result["plain"], name
            assert any(result["plain"]["bytes"]), name
