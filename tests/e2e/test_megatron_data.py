# SPDX-License-Identifier: Apache-2.0
"""The GPT recipe as a Megatron user starts it: data built, blended and split, Megatron's names."""

import json

import pytest

from wavemare.data import train_tokenizer


@pytest.fixture
def built(text_folder, tmp_path, command):
    """A tokenizer and two data sets made by the command line."""
    texts = [path.read_text() for path in sorted(text_folder.glob("*.txt"))]
    train_tokenizer(texts, 300, kind="gpt").save_pretrained(tmp_path / "tokenizer")
    for name in ("a", "b"):
        options = ["--output", tmp_path / name, "--tokenizer", tmp_path / "tokenizer"]
        command("wavemare", "data", "build", text_folder, *options, "--workers", 1).check()
    return tmp_path


@pytest.mark.nightly
def test_a_blend_with_split(built, command, small_options, recipe_config):
    ours = ("data", "model_config", "sequence_length", "max_steps", "vocab_size")
    options = small_options("gpt", built / "run", **dict.fromkeys(ours))
    options += [*("--data-path", 0.3, built / "a", 0.7, built / "b"), "--split", "8,2,0"]
    options += ["--vocab-file", built / "tokenizer/vocab.json", "--save", built / "run"]
    options += ["--num-layers", 4, "--hidden-size", 32, "--num-attention-heads", 2]
    options += ["--max-position-embeddings", 64, "--seq-length", 32, "--train-iters", 6]
    options += ["--global-batch-size", 8, "--micro-batch-size", 4, "--lr", 0.01, "--min-lr", 0.001]
    options += ["--make-vocab-size-divisible-by", 64]
    config = recipe_config("gpt/pretrain", "pipeline")
    ended = command("wavemare", "train", "gpt", "--config", config, *options).check()
    assert "64 to train, 16 held out" in ended.output
    lines = [json.loads(line) for line in (built / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "held_out_loss" in lines[-1]
    model = json.loads((built / "run/model/config.json").read_text())
    assert (model["n_layer"], model["n_embd"], model["n_head"]) == (4, 32, 2)
    assert model["vocab_size"] == 320
