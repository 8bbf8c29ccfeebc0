# SPDX-License-Identifier: Apache-2.0
"""What an engine that is destroyed leaves in memory."""


def test_a_destroyed_pipeline_is_freed_whatever_was_under_way(launch):
    finished = launch("freed.py", timeout=120).check()
    assert [finished.result(rank) for rank in range(2)] == [[], []]
