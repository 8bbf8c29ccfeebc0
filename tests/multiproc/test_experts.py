# SPDX-License-Identifier: Apache-2.0
"""Experts divided over real ranks, beside the whole model in one process."""

import json

import pytest

CASES = {
    "mixtral, ZeRO 0": {"clip": 0.5},
    "mixtral, auxiliary loss, ZeRO 1": {"auxiliary": True, "zero": 1, "clip": 0.5},
    "qwen2_moe, auxiliary loss, ZeRO 0": {"kind": "qwen2_moe", "auxiliary": True, "clip": 0.5},
    "qwen3_moe, eager, ZeRO 2": {"kind": "qwen3_moe", "zero": 2, "clip": 0.5, "eager": True},
    "mixtral, LoRA, ZeRO 0": {"lora": True, "auxiliary": True, "clip": 0.5},
    "qwen3_moe, LoRA, ZeRO 2": {"kind": "qwen3_moe", "lora": True, "zero": 2, "clip": 0.5},
    "a rank without rows, ZeRO 0": {"forced": True},
    "a rank without rows, ZeRO 2": {"forced": True, "zero": 2, "kind": "qwen3_moe"},
}
WHOLE = {"size": 1, "stages": 2, "auxiliary": True, "clip": 0.5}
"""Two stages of undivided experts."""
CASES |= {
    "mixtral, auxiliary loss through stages": WHOLE,
    "qwen2_moe, auxiliary loss through stages, ZeRO 1": {**WHOLE, "kind": "qwen2_moe", "zero": 1},
    "qwen3_moe, auxiliary loss through stages, zb-h1": {
        **WHOLE,
        "kind": "qwen3_moe",
        "config": {"wavemare_keys": {"pipeline": {"schedule": "zb-h1"}}},
    },
}
CASES |= {
    "split mixtral, auxiliary loss, ZeRO 0": {"tensor": 2, "auxiliary": True, "clip": 0.5},
    "split qwen2_moe, ZeRO 1": {"tensor": 2, "kind": "qwen2_moe", "zero": 1, "clip": 0.5},
    "split qwen3_moe, LoRA, ZeRO 2": {
        **{"tensor": 2, "kind": "qwen3_moe", "lora": True, "zero": 2, "auxiliary": True},
        "clip": 0.5,
    },
    "split mixtral, a rank without rows": {"tensor": 2, "forced": True, "clip": 0.5},
    "split mixtral, experts too": {"tensor": 2, "size": 1, "auxiliary": True, "clip": 0.5},
}
KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3")
LISTED = {"size": 1, "listed": True, "num_experts": 16, "num_experts_per_tok": 1, "clip": 0.5}
"""Experts that are modules each, of which a rank calls those that its tokens choose."""
UNDIVIDED = {
    **{
        f"{kind}, ZeRO 3": {"size": 1, "kind": kind, "zero": 3, "auxiliary": True, "clip": 0.5}
        for kind in KINDS
    },
    **{f"a list of experts, ZeRO {zero}": {**LISTED, "zero": zero} for zero in range(4)},
}
BF16 = {"clip": 0.5, "num_experts_per_tok": 4, "config": {"bf16": {"enabled": True}}}
"""Tokens take all experts: rounding chooses no others."""
HALF = {
    "mixtral, ZeRO 3, bf16": {**BF16, "size": 1, "zero": 3, "auxiliary": True},
    "a list of experts, ZeRO 3, bf16": {**BF16, "size": 1, "zero": 3, "listed": True},
    "qwen2_moe, ZeRO 2, bf16": {**BF16, "kind": "qwen2_moe", "zero": 2, "auxiliary": True},
    "split qwen3_moe, ZeRO 1, bf16": {**BF16, "kind": "qwen3_moe", "zero": 1, "tensor": 2},
}
ADAM = {"kind": "qwen3_moe", "auxiliary": True, "zero": 2, "clip": 0.5, "adam": True}
ADAFACTOR, SOAP = ({"type": name, "params": {"lr": 0.01}} for name in ("Adafactor", "SOAP"))
REFUSED = {
    "unlike": ({"unlike": True}, "the ranks hold different weights, for example lm_head.weight"),
    "gpt_oss": ({"kind": "gpt_oss"}, "those of gpt_oss are not tested"),
    "adapted": ({"adapted": True}, "adapters change its experts"),
    "experts": ({"model_keys": {"num_experts": 3}}, "the model's 3 experts cannot be divided"),
    "size": ({"size": 3}, "the number of data-parallel ranks (2) is not a multiple of it"),
    "split": ({"size": 3, "tensor": 2}, "it is not a multiple of the 2 ranks that share each"),
    "ranks": ({"size": 4, "tensor": 2}, "the number of ranks of a stage (2) is not a multiple"),
    "whole": ({"tensor": 2, "model_keys": {"num_experts": 3}}, "3 experts cannot be divided"),
    "rows": ({"optimizer": ADAFACTOR}, "optimizer = 'Adafactor': it reads whole tensors"),
    "parts": ({"optimizer": SOAP, "tensor": 2}, "optimizer = 'SOAP': it reads whole tensors"),
}
RUNS = {
    **{name: {"part": "equal", **case} for name, case in (CASES | UNDIVIDED | HALF).items()},
    "adam": {"part": "equal", **ADAM},
    "resume 0": {"part": "resume", "zero": 0},
    "resume 1": {"part": "resume", "zero": 1, "lora": True},
    "resume 2": {"part": "resume", "zero": 2, "config": {"bf16": {"enabled": True}}},
    "resume 0, split": {"part": "resume", "tensor": 2},
    "resume 1, split": {"part": "resume", "tensor": 2, "zero": 1, "lora": True},
    **{name: {"part": "refused", **case} for name, (case, _) in REFUSED.items()},
    "again": {"part": "again"},
}
IN_STAGES = {
    "mixtral, ZeRO 0": {},
    "mixtral, by annotations": {"annotated": True},
    "qwen3_moe, auxiliary loss, ZeRO 1": {"kind": "qwen3_moe", "auxiliary": True, "zero": 1},
    "split mixtral, auxiliary loss": {"tensor": 2, "auxiliary": True},
}
SHARED = {
    "mixtral, auxiliary loss, ZeRO 0": {"auxiliary": True},
    "qwen2_moe, ZeRO 1": {"kind": "qwen2_moe", "zero": 1},
}
"""Two models of two ranks each that share experts."""
RARE = {
    "resume, ZeRO 0": {"part": "resume", "stages": 2},
    "resume, split, ZeRO 0": {"part": "resume", "stages": 2, "tensor": 2},
    "sparse, ZeRO 2": {"part": "sparse", "zero": 2},
}
"""Run at night."""
DAILY = {
    "resume, ZeRO 1": {"part": "resume", "stages": 2, "zero": 1},
    "resume, split, ZeRO 1": {"part": "resume", "stages": 2, "tensor": 2, "zero": 1},
    "resume, shared, ZeRO 1": {"part": "resume", "size": 4, "tensor": 2, "zero": 1},
    **{n: {"part": "equal", "clip": 0.5, "size": 4, "tensor": 2, **c} for n, c in SHARED.items()},
    "sparse, ZeRO 0": {"part": "sparse"},
    **{n: {"part": "equal", "clip": 0.5, "stages": 2, **c} for n, c in IN_STAGES.items()},
}
FOUR = {
    f"{kind}, {size} ranks, ZeRO {zero}": {"kind": kind, "size": size, "zero": zero}
    for kind, size, zero in [("mixtral", 2, 0), ("qwen3_moe", 2, 2), ("qwen2_moe", 4, 1)]
}
FOUR["mixtral, LoRA, 2 stages, ZeRO 1"] = {"stages": 2, "size": 2, "zero": 1, "lora": True}


@pytest.fixture
def results(launch_once):
    return launch_once("experts.py", json.dumps(RUNS))


def check_equality(results, held=2):
    for result in results:
        assert max(result["losses"], result["logits"]) < 1e-5
        assert result["held"] == ([held] if held else [])
        assert result["changed"] > 5e-3
    assert results[0]["weights"] < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_divided_experts_train_as_the_whole_model(results, name):
    """With clipping: by the norm of all experts."""
    check_equality([result[name] for result in results], held=4 // CASES[name].get("size", 2))


@pytest.mark.parametrize("name", UNDIVIDED)
def test_ranks_that_choose_other_experts_train_as_one_process(results, name):
    """ZeRO 3 gathers a list of experts at once; of stacked ones each layer has a single module."""
    check_equality([result[name] for result in results], held=0 if "list" in name else 4)


@pytest.mark.parametrize("name", HALF)
def test_experts_in_bf16_train_near_the_whole_model(results, name):
    for result in results:
        assert result[name]["losses"] < 0.01
        assert result[name]["changed"] > 5e-3
    assert results[0][name]["weights"] < 0.005


def test_adam_clips_by_the_norm_of_the_whole_model(results):
    for result in results:
        norms, expected = result["adam"]["norms"]
        assert norms == pytest.approx(expected, rel=1e-5)
    assert results[0]["adam"]["weights"] < 1e-4


@pytest.mark.parametrize("name", ["0", "1", "2", "0, split", "1, split"])
def test_a_run_goes_on_bit_for_bit_and_is_exported(results, name):
    places = ("00-expert_00", "01-expert_00" if "split" in name else "00-expert_01")
    for result in results:
        found = result[f"resume {name}"]
        assert found["got"] == found["expected"]
        assert found["files"] == [f"mp_rank_{place}_model_states.pt" for place in places]
        for refused in found["refused"]:
            assert "divided over 2 ranks in it, and over 1 in this run" in refused
    assert results[0][f"resume {name}"]["exported"] == 0.0
    assert results[0][f"resume {name}"]["read"] in (0.0, None)


@pytest.mark.parametrize("name", [*REFUSED, "again"])
def test_what_cannot_be_divided_is_refused_on_all_ranks(results, name):
    expected = REFUSED.get(name, (None, "its experts have been divided already"))[1]
    for result in results:
        assert expected in result[name]


@pytest.fixture
def four(launch_once, name):
    """Two stages of two ranks that share their experts, two pairs of data ranks, or all four."""
    runs = RARE if name in RARE else DAILY
    return [result[name] for result in launch_once("experts.py", json.dumps(runs), ranks=4)]


def tiers(*names):
    marks = {name: [pytest.mark.nightly] if name in RARE else [] for name in names}
    cases = [pytest.param(name, marks=found) for name, found in marks.items()]
    return pytest.mark.parametrize("name", cases)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", IN_STAGES)
def test_experts_of_stages_train_as_the_whole_model(four):
    """With clipping, by the norm of all stages and all experts."""
    check_equality(four)


@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", SHARED)
def test_split_models_that_share_experts_train_as_the_whole_model(four):
    """With clipping, by the norm of all layers and all experts."""
    check_equality(four, held=1)


@pytest.mark.world_size(4)
@tiers(*(name for name in [*DAILY, *RARE] if name.startswith("resume")))
def test_a_run_of_four_ranks_goes_on_bit_for_bit_and_is_exported(four):
    for found in four:
        assert found["got"] == found["expected"]
        assert len(found["files"]) == 4
    assert four[0]["exported"] == 0.0
    assert four[0]["read"] in (0.0, None)


@pytest.mark.world_size(4)
@tiers("sparse, ZeRO 0", "sparse, ZeRO 2")
def test_the_sparse_collective_sums_experts_over_the_ranks_that_hold_them(four):
    """To the bits of the dense sum in the order of the ranks."""
    for found in four:
        assert len({found["digests"][mode] for mode in ("ordered", "pushpull", "auto")}) == 1
        assert "sparse_bytes_up" in found["metrics"]["auto"]
    assert four[0]["apart"] < 1e-6


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_the_whole_model(launch_once, name):
    runs = {name: {"part": "equal", "clip": 0.5, **case} for name, case in FOUR.items()}
    results = launch_once("experts.py", json.dumps(runs), ranks=4)
    check_equality([result[name] for result in results], held=4 // FOUR[name]["size"])
