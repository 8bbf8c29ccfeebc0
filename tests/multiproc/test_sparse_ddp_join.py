# SPDX-License-Identifier: Apache-2.0
"""A rank without data shadows the others' backward passes, in which no hook may wait."""

import pytest


@pytest.mark.world_size(2)
def test_uneven_data_trains_as_without_the_hook(launch_once):
    results = launch_once("sparse_ddp_join.py")
    assert results[0] == results[1]
    assert results[0]["hooked"] == results[0]["plain"]
