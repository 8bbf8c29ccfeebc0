# SPDX-License-Identifier: Apache-2.0
"""The GPT recipe as a Megatron user starts it, and docs/megatron.md as it is written."""

import json
import re
import shutil
from pathlib import Path

import pytest

from wavemare.data.tokenizer import train_tokenizer
from wavemare.report import read_run

ROOT = Path(__file__).resolve().parents[2]


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
    assert "64 to train, 16 for validation" in ended.output
    run = read_run(built / "run")
    losses = [loss for _, loss in run.series("loss")]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert run.series("eval_loss")[-1][0] == 6
    model = json.loads((built / "run/model/config.json").read_text())
    assert (model["n_layer"], model["n_embd"], model["n_head"]) == (4, 32, 2)
    assert model["vocab_size"] == 320


def blocks(language):
    text = (ROOT / "docs" / "megatron.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_page_runs_as_written(command, tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("results"))
    (tmp_path / "tokenizer.py").write_text(blocks("python")[0])
    command("python", "tokenizer.py").check()
    for block in blocks("bash"):
        for line in block.replace("\\\n", " ").strip().splitlines():
            words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", line)]
            ended = command(*words).check()
            if words[1] == "convert":
                assert "read back without a difference" in ended.output
    assert (tmp_path / "named" / "model" / "config.json").is_file()
    first, again = (
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("runs/gpt-pretrain/model", "again")
    )
    assert first == again
