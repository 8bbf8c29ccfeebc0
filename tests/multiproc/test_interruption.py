# SPDX-License-Identifier: Apache-2.0
"""Ranks that got SIGTERM, or whose peer did, stop after one step and leave a whole checkpoint."""

import pytest


@pytest.mark.world_size(4)
def test_ranks_of_different_speeds_stop_after_the_same_step(launch):
    finished = launch("interruption.py", "loops", ranks=4).check()
    results = [finished.result(rank) for rank in range(4)]
    microseconds = max(result.pop("cost") for result in results) * 1e6
    print(f"asking whether to stop takes {microseconds:.0f} us per step")

    for name in ("rank 0", "rank 2", "all", "ahead, rank 0", "ahead, rank 1", "ahead, all"):
        (stop,) = {result[name]["stopped"] for result in results}
        assert stop is not None, name
        assert 1 < stop < 60, name
        assert not any(result[name]["error"] for result in results)
    assert {result["none"]["stopped"] for result in results} == {None}

    # The loops did what they stand for: nobody ahead in the first ones, rank 1 in the others.
    assert all(result["rank 0"]["furthest"] == 0 for result in results)
    assert all(results[1][f"ahead, {who}"]["furthest"] == 3 for who in ("rank 0", "rank 1", "all"))

    small = [result["lead too small"] for result in results]
    assert small[0]["stopped"] is not None
    assert small[1] == {"stopped": None, "error": "lead", "furthest": 4}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["1", "3", "pipeline"])
def test_a_stopped_and_resumed_engine_equals_one_that_went_on(stopped_engines, case):
    for result in (ranks[case] for ranks in stopped_engines):
        # Told in step 5; rank 0 knows it after this step or the next, and takes one more.
        assert result["stopped"] in {6, 7}
        assert result["begun"] == result["stopped"]
        whole, parted = result["losses"]
        assert parted == whole
        assert result["weights"][0] == result["weights"][1]
    assert len({ranks[case]["stopped"] for ranks in stopped_engines}) == 1


@pytest.mark.world_size(4)
def test_an_asynchronous_pipeline_stops_at_one_version(launch):
    finished = launch("interruption.py", "asynchronous", ranks=4).check()
    for micro_batches in (1, 2):
        ranks = [finished.result(rank)[str(micro_batches)] for rank in range(4)]
        (stopped,) = {rank["stopped"] for rank in ranks}
        assert 10 < stopped < 40
        # The last stage was as far ahead as the lead that was given allows.
        assert [rank["ahead"] for rank in ranks] == [stage // micro_batches for stage in range(4)]
        for rank in ranks:
            whole, parted = rank["losses"]
            assert parted == whole
            assert rank["weights"][0] == rank["weights"][1]


@pytest.fixture
def stopped_engines(launch_once):
    """What each of two ranks has to tell of all engines, trained once for all tests."""
    return launch_once("interruption.py", "engines")
