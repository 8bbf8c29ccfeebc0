# SPDX-License-Identifier: Apache-2.0
"""Weights in and out: folders equal those of transformers, byte for byte."""

import os
from types import SimpleNamespace

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from wavemare.errors import ModelError
from wavemare.models import save_pretrained, to_pipeline, whole_state_dict


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_pipeline_holds_and_saves_what_the_model_does(model_name, make_model, tmp_path):
    make_model(model_name).save_pretrained(tmp_path / "start")
    model = type(make_model(model_name)).from_pretrained(tmp_path / "start")
    module = to_pipeline(model, num_stages=1)
    save_pretrained(module, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "start")
    gathered, state = whole_state_dict(module), model.state_dict()
    assert list(gathered) == list(state)
    assert all(torch.equal(gathered[name], state[name]) for name in state)


def test_a_cast_module_saves_its_own_type_and_its_generation_configuration(make_model, tmp_path):
    ours, theirs = make_model("llama"), make_model("llama")
    ours.generation_config.max_new_tokens = theirs.generation_config.max_new_tokens = 7
    save_pretrained(to_pipeline(ours, num_stages=1).bfloat16(), tmp_path / "ours")
    theirs.to(torch.bfloat16).save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_plain_models_are_saved_too(make_model, tmp_path):
    model = make_model("gpt2")
    wrapper = torch.nn.Module()
    wrapper.module = model
    save_pretrained(wrapper, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")


def test_a_tokenizer_is_saved_with_the_model(make_model, tmp_path):
    words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    module = to_pipeline(make_model("gpt2"), num_stages=1)
    save_pretrained(module, tmp_path / "ours", tokenizer=tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert loaded.get_vocab() == {"a": 0, "[UNK]": 1}


def test_an_existing_folder_keeps_other_files_and_loses_old_shards(make_model, tmp_path):
    target = tmp_path / "run"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    (target / "model-00001-of-00002.safetensors").write_text("old")
    (target / "model.safetensors.index.json").write_text("old")
    save_pretrained(to_pipeline(make_model("gpt2"), num_stages=1), target)
    names = {path.name for path in target.iterdir()}
    assert names == {"notes.txt", "config.json", "generation_config.json", "model.safetensors"}


def test_a_failure_leaves_the_target_as_it_was(make_model, tmp_path, monkeypatch):
    target = tmp_path / "run"
    module = to_pipeline(make_model("gpt2"), num_stages=1)
    save_pretrained(module, target)
    before = contents(target)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with pytest.raises(ModelError, match=r"No space left.*choose another folder") as info:
        save_pretrained(module, target)
    assert info.value.value == os.fspath(target)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_other_modules_are_refused(tmp_path):
    for call in (whole_state_dict, lambda module: save_pretrained(module, tmp_path)):
        with pytest.raises(ModelError, match=r"'Linear': .*model inside.*save_checkpoint"):
            call(SimpleNamespace(module=torch.nn.Linear(2, 2)))


def test_files_replace_the_old_ones_with_the_configuration_last(make_model, tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr("os.replace", lambda a, b: (moved.append(b.name), replace(a, b)))
    save_pretrained(to_pipeline(make_model("gpt2"), num_stages=1), tmp_path / "run")
    assert moved[-1] == "config.json"
