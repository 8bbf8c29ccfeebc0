# SPDX-License-Identifier: Apache-2.0
"""Transformers models as pipelines of two real ranks, beside the unsplit models."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.world_size(2)
# Plain models first: in one process DeepSpeed keeps a pipeline's grid for all engines after it.
CASES = {
    "zero": ["gpt2"],
    "train": ["gpt2", "bert-mlm", "bert-cls", "qwen3", "qwen3-untied"],
    "train-untied": ["gpt2", "bert-mlm", "qwen3", "qwen3-untied"],
    "train-reentrant": ["gpt2", "bert-mlm"],
    "train-non-reentrant": ["gpt2", "bert-mlm"],
    "train-zero1": ["gpt2", "bert-mlm"],
    "save": ["gpt2", "bert-mlm", "bert-cls", "qwen3", "qwen3-untied"],
    "save-untied": ["gpt2", "bert-mlm"],
    "load-untied": ["gpt2", "bert-mlm"],
    "half": ["gpt2", "qwen3"],
    "memory": ["gpt2", "bert-mlm"],
    "memory-untied": ["gpt2", "bert-mlm"],
    "failure": ["gpt2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def found(launch_once, folder):
    """Return what each rank has seen of a case, by model; all cases are run once."""
    results = launch_once("models.py", folder, json.dumps(CASES))
    return lambda case: [result[case] for result in results]


def folder_contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_training(results, name):
    first, last = (result[name] for result in results)
    assert first["losses"] == last["losses"] == pytest.approx(first["expected"], rel=1e-5, abs=1e-5)
    assert first["difference"] < 1e-5
    assert first["tied_equal"]
    assert last["tied_equal"]
    assert first["gathered"]
    assert not last["gathered"]
    assert (first["stage"], last["stage"]) == (0, 1)
    assert abs(first["losses"][-1] - first["losses"][0]) > 1e-3


def test_two_stages_train_like_the_unsplit_model(found):
    results = found("train")
    for name in CASES["train"]:
        check_training(results, name)
        first, last = (result[name] for result in results)
        # Clipping at 0.1 was at work, by the norm of the whole model.
        assert min(first["norms"]) > 0.2
        tied = name in ("gpt2", "bert-mlm", "qwen3")
        assert first["tied"] == last["tied"] == int(tied)
        assert max(first["own"], last["own"]) < first["whole"]


def test_untied_stages_train_like_the_unsplit_model_with_a_head_of_its_own(found):
    results = found("train-untied")
    for name in CASES["train-untied"]:
        check_training(results, name)
        first, last = (result[name] for result in results)
        assert min(first["norms"]) > 0.2
        assert first["tied"] == last["tied"] == 0
        assert first["replicated"] == last["replicated"] == 0
        assert first["counted"] == last["counted"] == 0
        assert first["own"] + last["own"] == first["whole"] + 80 * 32 * (name != "qwen3-untied")
        assert first["untied"] == last["untied"]
        assert first["copies"] == []
        assert last["copies"] == [[80, 32]] * len(last["untied"])
        assert len(first["apart"]) == int(name != "qwen3-untied")
        assert all(distance > 1e-3 for distance in first["apart"])


@pytest.mark.parametrize("case", ["train-reentrant", "train-non-reentrant", "train-zero1"])
def test_activation_checkpoints_and_zero1_change_nothing(found, case):
    for name in CASES[case]:
        check_training(found(case), name)
        assert found(case)[0][name]["losses"] == found("train")[0][name]["losses"]


def test_without_steps_the_saved_folder_is_the_models_byte_for_byte(found, folder):
    for name in found("save")[0]:
        theirs = folder_contents(folder / "save" / name / "theirs")
        assert folder_contents(folder / "save" / name / "ours") == theirs
        assert "model.safetensors" in theirs


def test_an_untied_checkpoint_holds_both_weights_and_resumes_to_the_bit(found, folder):
    for result, loaded in zip(found("save-untied"), found("load-untied"), strict=True):
        for name, again in loaded.items():
            assert again["fresh"] != again["digest"] == result[name]["digest"]
            assert again["losses"] == result[name]["losses"]
    assert_universal_weights(
        folder / "untied" / "gpt2",
        {"0.embedding.weight": "transformer.wte.weight", "6.module.weight": "lm_head.weight"},
    )


def assert_universal_weights(folder, names):
    """Convert with DeepSpeed's tool; each weight stands in the result under its own name."""
    tool = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    folders = ["--input_folder", folder / "checkpoint" / "half"]
    folders += ["--output_folder", folder / "universal"]
    done = subprocess.run([*tool, *folders], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = load_file(folder / "model" / "model.safetensors")
    weights = [path for path in (folder / "universal" / "zero").iterdir() if path.is_dir()]
    assert len(weights) == len(model)
    for universal, name in names.items():
        file = folder / "universal" / "zero" / universal / "fp32.pt"
        held = torch.load(file, weights_only=True)["param"]
        assert torch.equal(held.view_as(model[name]), model[name]), name
    first, second = (model[name] for name in names.values())
    assert not torch.equal(first, second)


def test_plain_engines_of_all_zero_stages_are_saved(found, folder):
    moved = found("zero")[0]["gpt2"]["moved"]
    theirs = folder_contents(folder / "zero" / "gpt2" / "theirs")
    for stage in range(4):
        assert folder_contents(folder / "zero" / "gpt2" / f"untouched_{stage}") == theirs
    assert moved == pytest.approx([moved[0]] * 4, rel=1e-3)
    assert moved[0] > 1e-3


def test_dropping_the_model_frees_the_layers_of_other_stages(found):
    for result in found("memory"):
        for counts in result.values():
            assert counts["kept"] == counts["own"] < counts["whole"]


def test_no_stage_keeps_both_copies_of_an_untied_weight(found):
    for rank, result in enumerate(found("memory-untied")):
        for counts in result.values():
            assert counts["kept"] == counts["own"] - rank  # the copy is none of the model's
            assert counts["vocabularies"] == 1


def test_bfloat16_engines_train_and_save_bfloat16(found):
    for name in CASES["half"]:
        first, last = (result[name] for result in found("half"))
        assert first["type"] == "torch.bfloat16"
        assert first["difference"] == 0.0
        assert first["losses"] == last["losses"] == pytest.approx(first["expected"], rel=1e-2)
        assert first["tied_equal"]
        assert last["tied_equal"]


def test_a_failure_to_write_is_raised_on_all_ranks(found):
    for result in found("failure"):
        errors = result["gpt2"]["errors"]
        for error, place in zip(errors, ("occupied", "small"), strict=True):
            assert "could not be saved" in error
            assert place in error
            assert "choose another folder" in error
