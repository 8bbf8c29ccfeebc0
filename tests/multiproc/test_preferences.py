# SPDX-License-Identifier: Apache-2.0
"""DPO with every engine, beside a loop in one process that knows pairs alone."""

import json

import pytest

from wavemare.hf.preferences import FIGURES

WAVES = {"tensor_parallel": {"size": 2}, "wavelet": {"mode": "sync"}}
CASES = {
    "ZeRO 1": {"zero": 1},
    "ZeRO 3, whole": {"zero": 3, "lora": False},
    "auxiliary loss": {"zero": 0, "moe": True, "lora": False},
    "1f1b": {"stages": 2},
    "zbv, whole": {"stages": 2, "lora": False, "section": {"pipeline": {"schedule": "zbv"}}},
    "auxiliary loss in stages": {"stages": 2, "moe": True, "lora": False},
    # The last: DeepSpeed does not forget whom a split model's ranks were.
    "split": {"section": {"tensor_parallel": {"size": 2}}},
    "split, waves": {"section": WAVES, "lora": False},
}
SPLIT = {"split stages": {"stages": 2, "section": {"tensor_parallel": {"size": 2}}}}


def check(results):
    for found in results:
        assert found["losses"] < 1e-5, found
        assert found["figures"] < 1e-5, found
        assert found.get("evaluation", 0.0) < 1e-5, found
        assert found["learned"] > 0.01, found
        assert found["evaluated"] == sorted(f"eval_{name}" for name in FIGURES)
    assert results[0]["weights"] < 1e-5


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", CASES)
def test_engines_learn_from_pairs_as_one_process_does(launch_once, name):
    pytest.importorskip("peft")
    check([found[name] for found in launch_once("preferences.py", json.dumps(CASES))])


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_split_stages_learn_from_pairs_as_one_process_does(launch_once):
    results = launch_once("preferences.py", json.dumps(SPLIT), ranks=4)
    check([found["split stages"] for found in results])
