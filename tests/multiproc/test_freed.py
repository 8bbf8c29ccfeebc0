# SPDX-License-Identifier: Apache-2.0
"""What an engine that is destroyed leaves in memory."""


def test_a_destroyed_pipeline_is_freed_whatever_was_under_way(launch_once):
    assert launch_once("freed.py") == [[], []]
