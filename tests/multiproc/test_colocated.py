# SPDX-License-Identifier: Apache-2.0
"""A head that is split over the data ranks trains as one that every rank holds."""

import pytest

pytestmark = pytest.mark.world_size(2)

EXACT = 1e-6


def test_a_split_head_trains_like_a_whole_one(launch_once):
    results = launch_once("colocated.py")
    for rank, result in enumerate(results):
        assert len(result["training"]) == 4
        for name, case in result["training"].items():
            assert case["losses"] == pytest.approx(case["expected"], abs=EXACT), name
            assert case["difference"] <= EXACT, name
            assert case["moved"] > 0.01, name
            assert case["evaluated"][0] == pytest.approx(case["evaluated"][1], abs=EXACT), name
            assert case["logits"] < 1e-5, name
            if "bert" in name:
                assert (case["held"], case["rows"]) == ((8, 3)[rank], 8)
        for case in result["resumed"].values():
            assert case["losses"] == case["expected"]
            assert case["digests"][0] == case["digests"][1]
            assert case["exported"] == 0.0
            for loaded, stepped in case["weights alone"]:
                assert loaded == 0.0
                assert 0.0 < stepped < 0.02  # Adam's step of 0.01, from there
            assert "the heads ['classifier'] are split over the data ranks" in case["plain"]
            assert case["universal"].startswith("CheckpointError: checkpoint.load_universal")
        refused = result["refused"]
        assert "has the same weight" in refused["tied"]
        assert "classes that exclude each other" in refused["regression"]
        assert "classifier of BertForSequenceClassification" in refused["not a head"]
        assert refused["zero 3"].startswith("ConfigError: zero_optimization.stage = 3")
        assert refused["bf16"].startswith("ConfigError: bf16.enabled")
        assert refused["sparse"].startswith("ConfigError: wavemare.sparse_collective.mode")
