# SPDX-License-Identifier: Apache-2.0
"""Bad input of a whole command ends with one message of one rank, and damages nothing on disk.

What the messages say: tests/unit/bad_input.
"""

import json
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def refused(command, small_options, recipe_config, tmp_path):
    """Start pretraining with something wrong, and return the message that it ends with."""
    output = tmp_path / "run"
    output.mkdir()
    (output / "summary.json").write_text("of an older run")

    def run(*, config=None, words=None, **changes):
        file = tmp_path / "config.json"
        values = json.loads(recipe_config("gpt/pretrain", "zero").read_text())
        file.write_text(json.dumps({**values, **(config or {})}))
        options = small_options("gpt", output, **changes)
        start = words or ["wavemare", "train", "gpt", "--config", file]
        ended = command(*start, *options)
        assert ended.code not in (0, 1), ended.output
        assert ended.output.count("error") == 1, ended.output
        assert "Traceback" not in ended.output
        assert (output / "summary.json").read_text() == "of an older run"
        assert not list(output.rglob("*.tmp"))
        return ended.output[ended.output.index("error") :]

    return run


@pytest.fixture
def checkpoints(tmp_path, recipe, small_options, recipe_config):
    """Whole checkpoints of the steps 2 and 4."""
    config = recipe_config("gpt/pretrain", "zero")
    options = small_options("gpt", tmp_path / "saved", max_steps=4, save_interval=2)
    recipe("gpt/pretrain", "--deepspeed_config", config, *options).check()
    return tmp_path / "saved" / "checkpoints"


def cut_short(checkpoints, run):
    """Copy checkpoints to another run, the newest with a file that lacks its last byte."""
    shutil.copytree(checkpoints, run / "checkpoints", dirs_exist_ok=True)
    file = max((run / "checkpoints" / "step-000004").glob("*.pt"))
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


def test_a_checkpoint_that_was_cut_short(refused, checkpoints, tmp_path):
    """The ranks have met by then: the first that fails speaks for all."""
    name = cut_short(checkpoints, tmp_path / "run")
    message = refused(resume=True)
    assert name in message
    assert "bytes instead of" in message


@pytest.mark.nightly
def test_a_run_without_a_launcher(refused, recipe_config):
    config = recipe_config("gpt/pretrain", "zero")
    words = ["python", "-m", "wavemare.recipes.gpt.pretrain", "--deepspeed_config", config]
    message = refused(words=words)
    assert "without a launcher" in message
    assert "wavemare train" in message


def test_an_unknown_key(refused):
    """It is refused before any rank is started."""
    message = refused(config={"wavemare": {"pipeline": {"stagse": 2}}})
    assert "wavemare.pipeline.stagse" in message


def test_a_trainer_on_cpus_that_is_not_told_so(command, tmp_path):
    """It is told without a compiler, which DeepSpeed would look for."""
    source = (ROOT / "recipes/examples/trainer.py").read_text()
    file = tmp_path / "script.py"
    file.write_text(source.replace("use_cpu=not torch.cuda.is_available(),", ""))
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "CXX": "/nowhere/c++"}
    ended = command("torchrun", "--nproc-per-node", 2, file, environment=environment)
    assert ended.code != 0
    assert "num_processes = 1" in ended.output
    assert "--use_cpu" in ended.output
