# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning's loss is the mean over a step's trained tokens, whatever the engine."""

import pytest


@pytest.mark.world_size(2)
def test_two_ranks_learn_from_all_tokens_alike_as_one_process_does(launch_once):
    for found in launch_once("token_mean.py"):
        assert max(found.values()) < 1e-6, found
