# SPDX-License-Identifier: Apache-2.0
"""Weights in and out: folders equal those of transformers, byte for byte."""

import os
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from support.refusals import refuses
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


def test_a_tokenizer_is_saved_with_the_model(make_model, tokenizer, tmp_path):
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


@pytest.fixture
def tokenizer():
    words = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


def test_a_folder_with_subfolders_is_replaced_and_keeps_others(make_model, tokenizer, tmp_path):
    module = to_pipeline(make_model("gpt2"), num_stages=1)
    tokenizer.chat_template = {"default": "{{ 1 }}", "old": "{{ 2 }}"}
    save_pretrained(module, tmp_path, tokenizer=tokenizer)
    tokenizer.chat_template = {"default": "{{ 3 }}", "new": "{{ 4 }}"}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "file").write_text("theirs")
    save_pretrained(module, tmp_path, tokenizer=tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == {"default": "{{ 3 }}", "new": "{{ 4 }}"}
    assert (tmp_path / "checkpoint" / "file").read_text() == "theirs"


def test_a_whole_model_comes_where_an_adapter_with_a_name_was(make_model, tmp_path):
    options = {"target_modules": ["q_proj"], "init_lora_weights": False}
    model = peft.get_peft_model(make_model("qwen3"), peft.LoraConfig(**options), "adapter_mine")
    module = to_pipeline(model, num_stages=1)
    for _ in range(2):
        save_pretrained(module, tmp_path)
        save_pretrained(module, tmp_path, merge=True)
    loaded = peft.PeftModel.from_pretrained(make_model("qwen3"), tmp_path / "adapter_mine")
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.arange(3, 25).view(2, 11)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert torch.equal(whole(ids).logits, model.merge_and_unload()(ids).logits)


def test_a_failure_leaves_the_target_as_it_was(make_model, tmp_path, monkeypatch):
    target = tmp_path / "run"
    module = to_pipeline(make_model("gpt2"), num_stages=1)
    save_pretrained(module, target)
    before = contents(target)

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    with refuses(ModelError, "folder", str(target)) as info:
        save_pretrained(module, target)
    assert info.value.value == os.fspath(target)
    assert contents(target) == before
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_other_modules_are_refused(tmp_path):
    for call in (whole_state_dict, lambda module: save_pretrained(module, tmp_path)):
        with refuses(ModelError, "model", "Linear"):
            call(SimpleNamespace(module=torch.nn.Linear(2, 2)))


def test_files_replace_the_old_ones_with_the_configuration_last(make_model, tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr("os.replace", lambda a, b: (moved.append(b.name), replace(a, b)))
    save_pretrained(to_pipeline(make_model("gpt2"), num_stages=1), tmp_path / "run")
    assert moved[-1] == "config.json"
