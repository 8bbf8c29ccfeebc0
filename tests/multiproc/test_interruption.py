# SPDX-License-Identifier: Apache-2.0
"""Ranks that got SIGTERM, or whose peer did, stop after one step and leave a whole checkpoint."""

import pytest

LOOPS = ["rank 0", "rank 2", "ahead, all", "none", "lead too small"]


@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "loops",
    [
        LOOPS,
        pytest.param([*LOOPS, "all", "ahead, rank 0", "ahead, rank 1"], marks=pytest.mark.nightly),
    ],
)
def test_ranks_of_different_speeds_stop_after_the_same_step(launch, loops):
    finished = launch("interruption.py", "loops", *loops, ranks=4).check()
    results = [finished.result(rank) for rank in range(4)]
    for name in set(loops) - {"none", "lead too small"}:
        (stop,) = {result[name]["stopped"] for result in results}
        assert stop is not None, name
        assert 10 < stop < 30, name
        assert not any(result[name]["error"] for result in results)
        small = [result["lead too small"] for result in results]
    assert small[0]["stopped"] is not None
    assert small[1] == {"stopped": None, "error": "lead", "furthest": 4}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["1", "pipeline", pytest.param("3", marks=pytest.mark.nightly)])
def test_a_stopped_and_resumed_engine_equals_one_that_went_on(launch_once, case):
    cases = ["3"] if case == "3" else ["1", "pipeline"]
    ranks = [ranks[case] for ranks in launch_once("interruption.py", "engines", *cases)]
    for result in ranks:
        # Told in step 3; rank 0 knows it after this step or the next, and takes one more.
        assert result["stopped"] in {4, 5}
        assert result["begun"] == result["stopped"]
        whole, parted = result["losses"]
        assert parted == whole
        assert result["weights"][0] == result["weights"][1]
    assert len({result["stopped"] for result in ranks}) == 1


@pytest.mark.world_size(4)
def test_an_asynchronous_pipeline_stops_at_one_version(launch):
    finished = launch("interruption.py", "asynchronous", ranks=4).check()
    for micro_batches in (1, 2):
        ranks = [finished.result(rank)[str(micro_batches)] for rank in range(4)]
        (stopped,) = {rank["stopped"] for rank in ranks}
        assert 10 < stopped < 40
        assert all(rank["ahead"] <= stage // micro_batches for stage, rank in enumerate(ranks))
        for rank in ranks:
            whole, parted = rank["losses"]
            assert parted == whole
            assert rank["weights"][0] == rank["weights"][1]
