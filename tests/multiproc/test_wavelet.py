"""Waves in DeepSpeed engines: bitwise what gradient accumulation gives."""

import json

import pytest

BF16 = {"bf16": {"enabled": True}}

CASES = {
    "gpt, ZeRO 0": {"model": "gpt", "zero": 0},
    "gpt, ZeRO 1": {"model": "gpt", "zero": 1},
    "gpt, ZeRO 2": {"model": "gpt", "zero": 2},
    "gpt, ZeRO 3": {"model": "gpt", "zero": 3, "untied": True},
    "bert, ZeRO 1": {"model": "bert", "zero": 1},
    "bert, ZeRO 3": {"model": "bert", "zero": 3, "untied": True},
    "bf16, ZeRO 1": {"model": "gpt", "zero": 1, "config": BF16},
    "checkpointing, ZeRO 2": {"model": "gpt", "zero": 2, "checkpointing": True},
}


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    launch = request.getfixturevalue("launch_in")
    finished = launch(tmp_path_factory.mktemp("wavelet"), "wavelet.py", json.dumps(CASES)).check()
    return [finished.result(rank) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_waves_equal_stock_accumulation_bitwise(results, name):
    for result in results:
        stock, ours = result[name]["stock"], result[name]["ours"]
        assert ours == stock
        assert len(set(ours["losses"])) > 1
