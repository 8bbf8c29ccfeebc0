# SPDX-License-Identifier: Apache-2.0
"""A process that starts and stops engines and loaders again and again does not grow."""

import pytest


@pytest.mark.slow
@pytest.mark.world_size(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["engines", "loaders"])
def test_what_is_started_and_stopped_holds_nothing(launch_once, what):
    (result,) = launch_once("start_stop.py", 20, 200, ranks=1, timeout=800)
    before = result["early" if what == "engines" else "engines"]
    for kind, held in result[what].items():
        assert held == before[kind], kind
    assert not result[what]["children"]
