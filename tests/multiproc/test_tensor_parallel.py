# SPDX-License-Identifier: Apache-2.0
"""Models split by tensors over real ranks, beside the whole models."""

import json

import pytest

from families import SPLIT_DECODERS

NAMES = [
    "gpt2",
    "gpt2-101",
    "gpt2-untied",
    "gpt2-eager",
    "bert-mlm",
    "bert-mlm-101",
    "bert-mlm-untied",
    "bert-cls",
    "bert-qa",
    "bert-regression",
]
SHARED = ["llama-kv1", "qwen2-kv1", "qwen3-kv1"]
FAMILIES = [*SPLIT_DECODERS, "llama-tied", "qwen3-tied", "gemma3_text-tied"]
DROPPED = ["gpt2", "gpt2-eager", "bert-mlm", "llama"]
LOADED = ["llama-tied", "qwen3", "phi3", "opt-tied"]
NEAR = {"eager": ["llama", "gpt2"], "half": ["llama", "qwen3"]}
FOUR = ["gpt2-101", "gpt2-20", "bert-mlm-101", "qwen3", "qwen2-kv1"]
HOOKED = ["gpt2-101", "bert-mlm", "opt", "phi3", "qwen3", "olmo2", "mixtral", "lora-llama"]
FUSED = ["gpt2-101", "gpt2-untied", "llama"]
ATTENDED = ["gpt2-101", "bert-mlm", "bert-cls", "opt", "phi3", "qwen3-kv1", "mixtral"]
CASES = json.dumps(
    {
        "attended": ATTENDED,
        "fused": FUSED,
        "hooks": HOOKED,
        "ignored": ["llama"],
        "own_losses": FUSED,
        "thawed": ["qwen3-kv1"],
        "loaded": LOADED,
        "equal": NAMES + SHARED,
        "functions": [],
        "dropout": DROPPED,
        **NEAR,
    }
)


def check_equality(results):
    for result in results:
        assert result["loss_difference"] < 1e-5
        assert result["gradient_difference"] < 1e-5
        assert result["gradient_size"] > 1e-2
        assert result["logits_difference"] < 2e-5
        assert result["loss"] == results[0]["loss"]
        assert result["replicated"] == results[0]["replicated"]
        assert result["elements"] < 0.75 * result["whole_elements"]
    assert [result["merged"] for result in results] == [True] + [None] * (len(results) - 1)


@pytest.mark.world_size(2)
def test_two_ranks_compute_loss_and_gradients_of_the_whole_model(launch_once):
    results = launch_once("tensor_parallel.py", CASES)
    for name in NAMES:
        check_equality([result["equal"][name] for result in results])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", SHARED)
def test_two_ranks_share_a_head_of_keys_and_values(launch_once, name):
    first, second = (result["equal"][name] for result in launch_once("tensor_parallel.py", CASES))
    check_equality([first, second])
    assert first["copied"] == second["copied"] is not None


@pytest.mark.world_size(2)
def test_what_is_frozen_when_a_model_is_split_may_be_trained_later(launch_once):
    results = launch_once("tensor_parallel.py", CASES)
    check_equality([result["thawed"]["qwen3-kv1"] for result in results])


@pytest.mark.world_size(2)
def test_a_forward_pass_that_reads_the_head_gets_the_whole_of_it(launch_once):
    results = launch_once("tensor_parallel.py", CASES)
    for name in FUSED:
        check_equality([result["fused"][name] for result in results])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_are_refused_exactly_where_they_would_see_a_part(launch_once, name):
    for result in launch_once("tensor_parallel.py", CASES):
        found = result["hooks"][name]
        assert found["refused"] == found["unlike"] != []


@pytest.mark.world_size(2)
def test_ignore_index_leaves_the_same_labels_out(launch_once):
    for result in launch_once("tensor_parallel.py", CASES):
        found, expected, of_all = result["ignored"]["llama"]
        assert found == pytest.approx(expected, rel=1e-5)
        assert found != pytest.approx(of_all, rel=1e-2)


@pytest.mark.world_size(2)
def test_a_loss_of_the_callers_own_reads_whole_logits(launch_once):
    results = launch_once("tensor_parallel.py", CASES)
    for name in FUSED:
        check_equality([result["own_losses"][name] for result in results])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ATTENDED)
def test_a_loss_of_attention_probabilities_reads_those_of_all_heads(launch_once, name):
    check_equality([r["attended"][name] for r in launch_once("tensor_parallel.py", CASES)])


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_split_by_the_plan_of_their_class(launch_once, name):
    results = launch_once("tensor_parallel.py", json.dumps({"equal": FAMILIES}))
    check_equality([result["equal"][name] for result in results])


@pytest.mark.world_size(2)
def test_ranks_read_their_own_parts_of_a_folder(launch_once):
    for result in launch_once("tensor_parallel.py", CASES):
        for name in LOADED:
            expected = {"weights": True, "ties": True, "loss": True, "gradients": 0.0}
            assert result["loaded"][name] == expected, name


@pytest.mark.world_size(4)
def test_four_ranks_of_which_one_may_hold_no_token(launch_once):
    results = launch_once("tensor_parallel.py", json.dumps({"equal": FOUR}), ranks=4)
    for name in FOUR:
        check_equality([result["equal"][name] for result in results])


@pytest.mark.world_size(4)
@pytest.mark.parametrize(("name", "sharing"), [("qwen3", 2), ("qwen2-kv1", 4)])
def test_four_ranks_share_two_heads_of_keys_and_values_or_one(launch_once, name, sharing):
    results = launch_once("tensor_parallel.py", json.dumps({"equal": FOUR}), ranks=4)
    copied = [result["equal"][name]["copied"] for result in results]
    assert copied[:sharing] == [copied[0]] * sharing
    assert copied[-sharing:] == [copied[-1]] * sharing
    assert len(set(copied)) == 4 // sharing


@pytest.mark.world_size(2)
def test_sums_and_cross_entropy_over_the_group(launch_once):
    for rank, found in enumerate(launch_once("tensor_parallel.py", CASES)):
        result = found["functions"]
        unlike, incomplete, lonely = result["refused"]
        assert "different weights, for example transformer.h.1.ln_1.weight" in unlike
        assert "self_attn.q_norm.weight of the split model differs" in incomplete
        assert ("another rank has failed" if rank else "they are on the meta device") in lonely
        for dtype in ("torch.float32", "torch.bfloat16", "torch.float16"):
            assert result[dtype] == {
                "copied": [1.0, rank + 1.0],
                "copied_gradient": [3.0, 4.0],
                "total": [2.0, 3.0],
                "total_gradient": [3.0, 3.0],
            }
        assert result["penalty"] < 1e-5
        for tokens in ("64", "50", "12"):
            for loss, gradient, bf16_loss, bf16_gradient in result[tokens]:
                assert loss < 1e-6
                assert gradient < 1e-6
                assert bf16_loss < 0.01  # its logits are rounded to 3 digits
                assert bf16_gradient < 0.02


@pytest.mark.world_size(2)
def test_attention_of_another_kind_and_bf16(launch_once):
    results = launch_once("tensor_parallel.py", CASES)
    for name in NEAR["eager"]:
        check_equality([result["eager"][name] for result in results])
    for result in results:
        for half in result["half"].values():
            assert 0 < half["gradient_difference"] < 2e-2 * min(half["gradient_size"], 1)


@pytest.mark.world_size(2)
def test_ranks_drop_the_same_elements_of_what_is_replicated_and_others_inside_attention(
    launch_once,
):
    for name in DROPPED:
        results = launch_once("tensor_parallel.py", CASES)
        first, second = (result["dropout"][name] for result in results)
        for result in (first, second):
            # Without dropout inside attention the whole model, seeded alike, drops the same.
            assert result["residual_alone"] < 1e-5
            assert result["repeated"] == 0.0
            assert result["checkpointed"] == 0.0
            assert result["loss"] != result["first_loss"] != result["evaluated"]
        assert first["residual_stream"] == second["residual_stream"]
        assert len(first["residual_stream"]) == len(first["attention"]) == 2
        assert not set(first["attention"]) & set(second["attention"])
        assert len(set(first["attention"])) == 2
        for key in ("first_loss", "loss", "evaluated", "replicated", "state"):
            assert first[key] == second[key], key


def check_training(results, ranks):
    for result in results:
        assert result["losses"] == pytest.approx(result["expected"], rel=1e-5, abs=1e-5)
        assert len(set(result["losses"])) == len(result["losses"]) == 5
        assert result["norms"] == pytest.approx(result["expected_norms"], rel=1e-5)
        assert min(result["norms"]) > 3 * result["clip"]
        assert result["data_ranks"] == ranks // 2
        assert result["moved"] > 1e-2
    for rank, result in enumerate(results):
        if rank % 2 == 0:
            assert result["difference"] < 1e-5
            assert result["difference"] == results[0]["difference"]
        else:
            assert result["difference"] is None
    assert results[0]["losses"] == results[1]["losses"]
    if ranks == 4:
        assert results[2]["losses"] == results[3]["losses"] != results[0]["losses"]


@pytest.mark.parametrize(
    ("ranks", "stages", "names"),
    [
        (2, "01", ["gpt2-101", "bert-cls", "llama-tied", "qwen3_moe", "qwen2-kv1"]),
        pytest.param(4, "0123", ["gpt2-101", "qwen3-tied", "qwen3-kv1"], marks=pytest.mark.nightly),
    ],
)
def test_engines_train_a_split_model_as_stock_deepspeed_the_whole_one(
    launch_once, ranks, stages, names
):
    results = launch_once("tensor_training.py", stages, *names, ranks=ranks)
    for name in names:
        for stage in stages:
            check_training([result[f"{name} {stage}"] for result in results], ranks)
