# SPDX-License-Identifier: Apache-2.0
"""What an engine that is destroyed leaves in memory."""

import pytest


def test_a_destroyed_pipeline_is_freed_whatever_was_under_way(launch_once):
    assert launch_once("freed.py") == [[], []]


@pytest.mark.nightly
@pytest.mark.world_size(1)
@pytest.mark.timeout(900)
def test_what_is_started_and_stopped_holds_nothing(launch):
    result = launch("start_stop.py", 20, 200, ranks=1, timeout=800, own=True).check().result(0)
    for what, before in (("engines", "early"), ("loaders", "engines")):
        for kind, held in result[what].items():
            assert held == result[before][kind], (what, kind)
        assert not result[what]["children"]
