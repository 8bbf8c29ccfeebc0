"""The GPT recipe on Megatron's data: built, blended, split and read in Megatron's order."""

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


@pytest.mark.slow
def test_a_blend_with_split(built, command, small_options, recipe_config):
    changes = {
        "data": f"0.3 {built / 'a'} 0.7 {built / 'b'}",
        "split": "8,2,0",
        "tokenizer": built / "tokenizer",
        "max_steps": 6,
    }
    options = small_options("gpt", built / "run", **changes, vocab_size=None)
    config = recipe_config("gpt/pretrain", "pipeline")
    ended = command("wavemare", "train", "gpt", "--config", config, *options).check()
    assert "64 to train, 16 held out" in ended.output
    lines = [json.loads(line) for line in (built / "run/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert "held_out_loss" in lines[-1]
