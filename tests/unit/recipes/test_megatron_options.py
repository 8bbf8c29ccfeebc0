# SPDX-License-Identifier: Apache-2.0
"""Megatron's spellings on a recipe's command line."""

import copy
import json
import sys
from importlib.resources import files

import pytest

from wavemare.engine.config.resolve import check_batch_sizes, check_config
from wavemare.errors import ConfigError
from wavemare.recipes.arguments import parse_arguments
from wavemare.recipes.bert.finetune import FinetuneArguments as Classification
from wavemare.recipes.bert.finetune import main as classification
from wavemare.recipes.gpt.finetune import FinetuneArguments
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.recipes.megatron_options import translate


def parsed(monkeypatch, line, kind=PretrainArguments):
    words = ["recipe", "--deepspeed_config", "x.json", *line.split()]
    monkeypatch.setattr(sys, "argv", words)
    return parse_arguments(kind)


def recipe_json():
    text = (files("wavemare.recipes") / "gpt" / "pretrain_pipeline.json").read_text()
    return json.loads(text)


def test_a_megatron_command_line(monkeypatch):
    arguments = parsed(
        monkeypatch,
        "--num-layers 6 --hidden-size 64 --num-attention-heads 8 --max-position-embeddings 512 "
        "--seq-length 256 --micro-batch-size 2 --global-batch-size 24 --train-iters 300 --lr 6e-4 "
        "--min-lr 6e-5 --lr-decay-style cosine --lr-warmup-fraction 0.02 --weight-decay 0.05 "
        "--clip-grad 0.5 --pipeline-model-parallel-size 3 --data-path 0.3 a 0.7 b --split 969,30,1 "
        "--make-vocab-size-divisible-by 128 --tensor-model-parallel-size 2 --save-interval 50 "
        "--log-interval 7 --eval-interval 60 --eval-iters 10 --bf16 --deepspeed "
        "--tensorboard-dir boards --wandb-project sea --tokenizer-type GPT2BPETokenizer "
        "--vocab-file bpe/vocab.json --merge-file bpe/merges.txt --prompt hello",
    )
    assert arguments.max_steps == 300
    assert arguments.sequence_length == 256
    assert arguments.data == "0.3 a 0.7 b"
    assert arguments.split == "969,30,1"
    assert (arguments.save_interval, arguments.log_interval, arguments.eval_interval) == (50, 7, 60)
    assert arguments.tokenizer == "bpe"
    assert arguments.prompt == "hello"
    changes = arguments.megatron
    config = changes.config(recipe_json())
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["train_batch_size"] == 24
    assert config["optimizer"]["params"] == {"lr": 6e-4, "betas": [0.9, 0.95], "weight_decay": 0.05}
    assert config["gradient_clipping"] == 0.5
    assert config["scheduler"]["type"] == "WarmupCosineLR"
    assert config["scheduler"]["params"]["cos_min_ratio"] == pytest.approx(0.1)
    assert config["bf16"] == {"enabled": True}
    assert config["tensorboard"] == {"enabled": True, "output_path": "boards"}
    assert config["wandb"] == {"enabled": True, "project": "sea"}
    pipeline = {"stages": 3, "inputs": ["input_ids"]}
    assert config["wavemare"] == {"pipeline": pipeline, "tensor_parallel": {"size": 2}}
    check_config(config, world_size=6)
    assert check_batch_sizes(config, data_world_size=1)["gradient_accumulation_steps"] == 12
    assert changes.warmup_steps(300) == 6
    assert changes.evaluated(128, 24) == 240
    assert changes.vocabulary(4000) == 4096
    assert changes.vocabulary(4097) == 4352  # a multiple of 128 * 2
    sizes = {"n_layer": 6, "n_embd": 64, "n_head": 8, "n_positions": 512}
    assert changes.model({"model_type": "gpt2", "n_layer": 1}) == {"model_type": "gpt2", **sizes}
    bert = changes.model({"model_type": "bert"})
    assert bert["intermediate_size"] == 256
    assert bert["num_hidden_layers"] == 6


def test_without_them_nothing_changes(monkeypatch):
    arguments = parsed(monkeypatch, "--max_steps 10 --save-interval 5 --data corpus.txt")
    assert arguments.max_steps == 10
    assert arguments.data == "corpus.txt"
    config = recipe_json()
    assert arguments.megatron.config(copy.deepcopy(config)) == config
    assert arguments.megatron.model({"a": 1}) == {"a": 1}
    assert arguments.megatron.warmup_steps(300) == 30
    assert arguments.megatron.evaluated(128, 24) == 128
    assert arguments.megatron.vocabulary(4001) == 4001


@pytest.mark.parametrize(
    ("style", "kind", "keys"),
    [
        ("linear", "WarmupDecayLR", {"warmup_num_steps", "warmup_max_lr", "total_num_steps"}),
        ("constant", "WarmupLR", {"warmup_num_steps", "warmup_max_lr"}),
    ],
)
def test_schedules(style, kind, keys):
    _, changes = translate(["--lr-decay-style", style, "--lr=0.5"])
    scheduler = changes.config(recipe_json())["scheduler"]
    assert scheduler["type"] == kind
    assert scheduler["params"].keys() == keys
    assert scheduler["params"]["warmup_max_lr"] == 0.5
    _, changes = translate(["--lr-decay-style", style, "--min-lr", "0.1"])
    with pytest.raises(ConfigError, match=r"--min-lr.*no lowest rate.*cosine"):
        changes.config(recipe_json())


def test_a_model_from_a_folder_has_its_own_size(monkeypatch):
    with pytest.raises(ConfigError, match=r"--hidden-size.*comes from a folder"):
        parsed(monkeypatch, "--hidden-size 8", FinetuneArguments)
    assert parsed(monkeypatch, "--train-iters 3", FinetuneArguments).max_steps == 3
    with pytest.raises(ConfigError, match=r"--num-layers.*comes from a folder"):
        parsed(monkeypatch, "--num-layers 2 --model folder", Classification)
    assert parsed(monkeypatch, "--num-layers 2", Classification).megatron.given == {"num_layers": 2}
    words = ["recipe", "--deepspeed_config", "x.json", "--split", "9,1"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(ConfigError, match=r"--split.*no Megatron data"):
        classification()


def test_load_resumes_where_there_is_a_checkpoint(monkeypatch, tmp_path):
    both = f"--save {tmp_path} --load {tmp_path}"
    arguments = parsed(monkeypatch, both)
    assert (arguments.output, arguments.resume) == (str(tmp_path), False)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "latest").touch()
    assert parsed(monkeypatch, both).resume
    assert not parsed(monkeypatch, f"--save {tmp_path}").resume
