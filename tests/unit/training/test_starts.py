# SPDX-License-Identifier: Apache-2.0
"""Where a recipe's weights come from, and what it fills into its configuration."""

import glob
import json
from importlib import metadata
from importlib.resources import files
from types import SimpleNamespace

import pytest
import torch
import transformers

from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.errors import ConfigError
from wavemare.megatron import save_megatron
from wavemare.models.deferred import is_deferred, read_weights
from wavemare.recipes.gpt.finetune import FinetuneArguments
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.training.arguments import TrainArguments, parse_arguments
from wavemare.training.config import resolve_config
from wavemare.training.models import (
    check_model,
    check_packing,
    load_causal_model,
    make_or_load_model,
    tokenizer_folder_of,
)
from wavemare.training.setup import Setup, read_setup
from wavemare.training.start import print_start

CONFIG = str(files("wavemare.recipes") / "gpt" / "finetune.json")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 96}


def parsed(line, kind=FinetuneArguments):
    return parse_arguments(kind, ["--deepspeed_config", CONFIG, *line.split()])


@pytest.fixture
def model():
    transformers.set_seed(3)
    config = transformers.Qwen3Config(**SIZES, head_dim=8, max_position_embeddings=128)
    return transformers.Qwen3ForCausalLM(config)


def check_same(found, model):
    assert is_deferred(found)
    read_weights(found)
    for name, weight in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight), name
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(found.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.parametrize("kind", [PretrainArguments, FinetuneArguments])
def test_a_checkpoint_of_megatron_starts_a_run(model, tmp_path, kind):
    save_megatron(model, tmp_path, iteration=7)
    start = f"--load {tmp_path} --finetune --attention-dropout 0.25"
    args = parsed(f"{start} --num-layers 2 --qk-layernorm", kind)
    check_model(args)
    text = SimpleNamespace(check_fits=lambda length, config: fitted.append((length, config)))
    fitted = []
    found = make_or_load_model(args, text)
    assert fitted == [(args.sequence_length, found.config)]
    assert found.config.attention_dropout == 0.25
    check_same(found, model)
    for words in ("--num-layers 3", "--seq-length 256"):
        with pytest.raises(ConfigError):
            check_model(parsed(f"{start} {words}", kind))
    check_model(parsed(f"{start} --num-layers 3 --use-checkpoint-args", kind))
    with pytest.raises(ConfigError) as caught:
        tokenizer_folder_of(args)  # none lies beside it, and none is named
    assert caught.value.key == "--tokenizer"
    assert tokenizer_folder_of(parsed(f"{start} --tokenizer other", kind)) == "other"


def test_a_folder_is_read_late_if_its_family_is_known(model, tmp_path):
    model.save_pretrained(tmp_path / "known")
    check_same(load_causal_model(parsed(f"--model {tmp_path / 'known'}")), model)
    config = transformers.OPTConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=64
    )
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "other")
    other = f"--model {tmp_path / 'other'}"
    assert not is_deferred(load_causal_model(parsed(other)))
    with pytest.raises(ConfigError) as caught:  # before it is trained
        load_causal_model(parsed(f"{other} --save-megatron {tmp_path / 'megatron'}"))
    assert caught.value.key == "--save-megatron"


def test_packed_rows_are_checked_without_reading_the_weights(model, tmp_path):
    model.save_pretrained(tmp_path)
    late = load_causal_model(parsed(f"--model {tmp_path}"))
    check_packing(late)
    assert is_deferred(late)


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("optimizer_policy=auto", {"Muon", "AdamW"}),
        ("optimizer_policy=keep", {"AdamW"}),
        ("slack=3", {"SOAP", "AdamW"}),  # gradients are older
    ],
)
def test_the_start_shows_the_optimizer_that_steps(model, words, names, capsys):
    file = files("wavemare.recipes") / "gpt" / "pretrain.json"
    changes = ["--set", f"wavemare.pipeline.pipemare.{words}", "gradient_accumulation_steps=1"]
    changes += ["train_micro_batch_size_per_gpu=16"]
    args = parse_arguments(PretrainArguments, ["--deepspeed_config", str(file), *changes])
    config = resolve_config(args)
    section = check_config(config, world_size=2)
    batch = check_batch_sizes(config, data_world_size=1)
    setup = Setup(args, config, None, section, batch, False, rank=0, world_size=2)
    print_start("a run", setup, model, {}, 12)
    shown = capsys.readouterr().out
    assert {name for name in ("Muon", "SOAP", "AdamW") if name in shown} == names


@pytest.mark.parametrize(
    ("devices", "own", "bf16"),
    [
        (["/dev/nvidia0"], {}, {"enabled": True}),
        ([], {}, None),
        (["/dev/nvidia0"], {"fp16": {"enabled": True}}, None),
    ],
)
def test_a_setup_has_the_recipes_rate_and_inputs_and_bf16_on_gpus(
    monkeypatch, tmp_path, devices, own, bf16
):
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WAVEMARE_VERBOSE", "1")  # libraries are told nothing
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(metadata, "version", lambda _: "2.13.0+cu130")
    monkeypatch.setattr(glob, "glob", lambda pattern: devices if "nvidia" in pattern else [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "wavemare": {"pipeline": {"stages": 2}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(config | own))
    args = TrainArguments(deepspeed_config=str(tmp_path / "ds.json"), output=str(tmp_path))
    found = read_setup(args, lr=1e-3, inputs=("input_ids", "position_ids"), bf16=True).config
    assert found.get("bf16") == bf16
    assert found["optimizer"]["params"]["lr"] == 1e-3
    assert found["wavemare"]["pipeline"]["inputs"] == ["input_ids", "position_ids"]
    plain = read_setup(args).config
    assert plain.keys() == (config | own).keys()
    assert plain["optimizer"]["params"]["lr"] == "auto"
    assert "inputs" not in plain["wavemare"]["pipeline"]
