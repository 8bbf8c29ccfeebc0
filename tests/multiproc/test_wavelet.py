"""Waves in DeepSpeed engines: bitwise what gradient accumulation gives."""

import json

import pytest

SPARSE = {"sparse_collective": {"mode": "pushpull", "bucket_bytes": 20_000}}
BF16 = {"bf16": {"enabled": True}}

CASES = {
    "gpt, ZeRO 0": {"model": "gpt", "zero": 0},
    "gpt, ZeRO 1": {"model": "gpt", "zero": 1},
    "gpt, ZeRO 2": {"model": "gpt", "zero": 2},
    "gpt, ZeRO 3": {"model": "gpt", "zero": 3},
    "bert, ZeRO 1": {"model": "bert", "zero": 1},
    "untied bert, ZeRO 3": {"model": "bert", "zero": 3, "untied": True},
    "overlap, ZeRO 2": {"model": "gpt", "zero": 2, "zero_keys": {"overlap_comm": True}},
    "sparse, ZeRO 0": {"model": "bert", "zero": 0, "wavemare": SPARSE},
    "bf16, ZeRO 1": {"model": "gpt", "zero": 1, "config": BF16},
    "checkpointing, ZeRO 2": {"model": "gpt", "zero": 2, "checkpointing": True},
}


@pytest.fixture(scope="module")
def cached():
    return []


@pytest.fixture
def results(launch, cached):
    if not cached:
        finished = launch("wavelet.py", json.dumps(CASES), timeout=250).check()
        cached.extend(finished.result(rank) for rank in range(2))
    return cached


@pytest.mark.parametrize("name", CASES)
def test_waves_equal_stock_accumulation_bitwise(results, name):
    for result in results:
        stock, ours = result[name]["stock"], result[name]["ours"]
        assert ours == stock
        assert len(set(ours["losses"])) > 1
