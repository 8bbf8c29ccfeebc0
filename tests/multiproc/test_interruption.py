# SPDX-License-Identifier: Apache-2.0
"""Ranks that got SIGTERM, or whose peer did, stop after one step and leave a whole checkpoint."""

import pytest


@pytest.mark.world_size(2)
@pytest.mark.parametrize("case", ["1", "pipeline"])
def test_a_stopped_and_resumed_engine_equals_one_that_went_on(launch_once, case):
    ranks = [ranks[case] for ranks in launch_once("interruption.py", "engines", "1", "pipeline")]
    for result in ranks:
        # Told in step 3; rank 0 knows it after this step or the next, and takes one more.
        assert result["stopped"] in {4, 5}
        assert result["begun"] == result["stopped"]
        whole, parted = result["losses"]
        assert parted == whole
        assert result["weights"][0] == result["weights"][1]
    assert len({result["stopped"] for result in ranks}) == 1


@pytest.mark.world_size(4)
def test_an_asynchronous_pipeline_stops_at_one_version(launch_once):
    results = launch_once("interruption.py", "asynchronous", ranks=4)
    for micro_batches in (1, 2):
        ranks = [result[str(micro_batches)] for result in results]
        (stopped,) = {rank["stopped"] for rank in ranks}
        assert 10 < stopped < 40
        assert all(rank["ahead"] <= stage // micro_batches for stage, rank in enumerate(ranks))
        for rank in ranks:
            whole, parted = rank["losses"]
            assert parted == whole
            assert rank["weights"][0] == rank["weights"][1]
