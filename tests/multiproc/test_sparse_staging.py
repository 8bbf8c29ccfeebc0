"""What goes through chunks of another memory arrives as it is."""

import pytest

MODES = ["ordered", "pushpull", "allgather", "packed", "dense"]


@pytest.mark.world_size(3)
def test_staged_messages_change_nothing(launch):
    finished = launch("sparse_staging.py", *MODES, ranks=3).check()
    for rank in range(3):
        results = finished.result(rank)
        assert len(results) == 2 * len(MODES)
        for name, result in results.items():
            assert result["staged"]["same"], name
            assert result["staged"] == result["plain"], name
            assert any(result["plain"]["bytes"]), name
