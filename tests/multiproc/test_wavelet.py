# SPDX-License-Identifier: Apache-2.0
"""Waves in DeepSpeed engines: bitwise what gradient accumulation gives."""

import json

import pytest

from families import SPLIT_DECODERS

SPARSE = {"sparse_collective": {"mode": "pushpull", "bucket_bytes": 20_000}}
SPLIT = {"tensor_parallel": {"size": 2}}
BF16 = {"bf16": {"enabled": True}}

EXPERTS = {"expert_parallel": {"size": 2}}
UNMANAGED = {"managed_gradient_accumulation": False}

CASES = {
    "gpt, ZeRO 0": {"model": "gpt", "zero": 0},
    "gpt, ZeRO 2": {"model": "gpt", "zero": 2, "checkpointing": True},
    "bert, ZeRO 1": {"model": "bert", "zero": 1},
    "sparse, ZeRO 0": {"model": "bert", "zero": 0, "wavemare": SPARSE},
    "bf16, ZeRO 1": {"model": "gpt", "zero": 1, "config": BF16},
    "unmanaged, ZeRO 0": {"model": "gpt", "zero": 0, "config": UNMANAGED},
    "experts, ZeRO 1": {"model": "moe", "zero": 1, "wavemare": EXPERTS, "checkpointing": True},
    # The last: DeepSpeed does not forget whom a split model's ranks were.
    "split, ZeRO 1": {"model": "gpt", "zero": 1, "wavemare": SPLIT},
    "split llama, ZeRO 1": {"model": "llama-tied", "zero": 1, "wavemare": SPLIT},
    "split qwen3_moe, ZeRO 0": {"model": "qwen3_moe", "zero": 0, "wavemare": SPLIT},
}

TURNED = {
    f"{name}, turned": {**CASES[name], "checkpointing": "checkpointing" not in CASES[name]}
    for name in ("gpt, ZeRO 2", "experts, ZeRO 1", "split llama, ZeRO 1")
}
"""Cases of which one of each pair checkpoints activations."""

OTHERS = {
    "one micro-batch": {"model": "gpt", "zero": 1, "micro_batches": 1},
    "auto": {"model": "gpt", "zero": 1, "wavelet": {"mode": "auto"}},
    "gpt, ZeRO 3": {"model": "gpt", "zero": 3},
    "unmanaged": {"model": "gpt", "zero": 0, "config": UNMANAGED, "wavelet": {"mode": "off"}},
}

MORE = {
    "gpt, ZeRO 1": {"model": "gpt", "zero": 1},
    "overlap, ZeRO 2": {"model": "gpt", "zero": 2, "zero_keys": {"overlap_comm": True}},
    "unmanaged, ZeRO 2": {"model": "gpt", "zero": 2, "config": UNMANAGED},
    "untied bert, ZeRO 3": {"model": "bert", "zero": 3, "untied": True},
    "bf16, ZeRO 0": {"model": "bert", "zero": 0, "config": BF16},
    "split bert, ZeRO 2": {"model": "bert", "zero": 2, "wavemare": SPLIT},
    "LoRA of a split llama": {"model": "llama-tied", "zero": 1, "wavemare": SPLIT, "lora": True},
    **{
        f"experts of {kind}": {"model": "moe", "kind": kind, "zero": 0, "wavemare": EXPERTS}
        for kind in ("mixtral", "qwen2_moe")
    },
    "split qwen3, a shared head": {"model": "qwen3-kv1", "zero": 1, "wavemare": SPLIT},
    "LoRA of experts": {"model": "moe", "zero": 1, "wavemare": EXPERTS, "lora": True},
    "split, auto": {
        "model": "gpt",
        "zero": 0,
        "wavemare": SPLIT,
        "wavelet": {"mode": "auto"},
        "steps": 6,
    },
}


@pytest.fixture
def results(launch_once):
    cases = sorted((OTHERS | CASES | TURNED).items(), key=lambda case: "split" in case[0])
    return launch_once("wavelet.py", json.dumps(dict(cases)))


@pytest.mark.parametrize("name", CASES)
def test_waves_equal_stock_accumulation_bitwise(results, name):
    """With tensor or expert parallelism, which stock DeepSpeed has not, ours without waves."""
    for result in results:
        check(result[name])
        assert result[name]["paired"]
        if "split" in name or "experts" in name:  # else no pass has a collective
            assert not result[name]["told"]


def check(result):
    assert result["got"] == result["expected"]
    assert len(set(result["got"]["losses"])) > 1


def test_activation_checkpoints_change_no_bit(results):
    for result in results:
        for name in TURNED:
            other = result[name.removesuffix(", turned")]
            assert result[name]["expected"] == result[name]["got"] == other["got"], name


@pytest.mark.parametrize("name", ["one micro-batch", "gpt, ZeRO 3"])
def test_what_cannot_be_paired_trains_without_waves(results, name):
    for result in results:
        check(result[name])
        assert not result[name]["paired"]


def test_without_managed_accumulation_a_batch_is_one_step(results):
    for result in results:
        check(result["unmanaged"])


def test_auto_stays_off_where_no_collective_stands_between_layers(results):
    for result in results:
        check(result["auto"])
        assert not result["auto"]["paired"]


@pytest.mark.nightly
def test_more_settings_equal_accumulation_bitwise(launch_once):
    for each in launch_once("wavelet.py", json.dumps(MORE)):
        for name, result in each.items():
            check(result)
            assert result["paired"] or "LoRA" not in name


@pytest.mark.nightly
@pytest.mark.parametrize("name", SPLIT_DECODERS)
def test_waves_of_split_families_equal_accumulation_bitwise(launch_once, name):
    case = {"zero": 0, "wavemare": SPLIT, "steps": 2}
    cases = {each: {"model": each, **case} for each in SPLIT_DECODERS}
    for result in launch_once("wavelet.py", json.dumps(cases)):
        check(result[name])
        assert result[name]["paired"]


@pytest.mark.nightly
def test_split_models_reduce_sparsely(launch_once):
    case = {"model": "gpt", "zero": 0, "wavemare": SPARSE | SPLIT}
    for result in launch_once("wavelet.py", json.dumps({"sparse": case}), ranks=4):
        check(result["sparse"])


@pytest.mark.nightly
def test_a_compiled_model_trains_alike(launch_once):
    # Compiled dropout draws other numbers.
    keys = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    case = {"model": "gpt", "zero": 1, "model_keys": keys, "wavemare": SPLIT, "compiles": True}
    for found in launch_once("wavelet.py", json.dumps({"compiled": case})):
        result = found["compiled"]
        assert result["paired"]
        assert result["got"]["losses"] == pytest.approx(result["expected"]["losses"], abs=1e-5)
