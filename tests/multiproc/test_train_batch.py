# SPDX-License-Identifier: Apache-2.0
"""``train_batch`` and ``eval_batch`` where data ends too early or lacks something; two replicas."""

import pytest


@pytest.mark.world_size(2)
def test_data_that_ends_too_early_leaves_nothing_behind(launch_once):
    for found in launch_once("train_batch.py"):
        whole, cut = found["digests"]
        assert whole == cut
        assert found["evaluation"] == {
            "ended": True,
            "training": True,
            "kept of evaluations": 0,
            "kept of training": 1,
        }
        assert found["refusals"] == [
            "data_iter: there is no iterator, and initialize had no training_data",
            "labels: the model returned no loss",
        ]
        assert found["contiguous checkpoints"] == [True, True]


def test_a_model_may_return_a_tuple_a_mapping_or_an_output(launch_once):
    for found in launch_once("train_batch.py"):
        of_tuple, of_mapping, of_output = found["forms"]
        assert of_tuple == of_mapping == of_output
