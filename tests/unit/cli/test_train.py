# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: which command it makes of its options, and what it refuses at once."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wavemare.cli import app, launch
from wavemare.cli.recipes import RECIPES, find_recipe
from wavemare.cli.train import refuse_mpi_transport
from wavemare.errors import ConfigError, LaunchError


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8}')
    return file


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, config: Path) -> Callable[..., list[str]]:
    """Return the launcher's command for options of ``wavemare train``."""
    monkeypatch.setattr(launch, "extra_environment", lambda: {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(launch, "find_deepspeed", lambda: "/bin/deepspeed")

    def run(*options: str) -> list[str]:
        arguments = ["train", *options, "--config", str(config), "--print-command"]
        if "--" in options:
            arguments = ["train", "--config", str(config), "--print-command", *options]
        result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        variable, *words = shlex.split(result.stdout)
        assert variable == "OMP_NUM_THREADS=1"
        return words

    return run


def test_command_in_full(command: Callable[..., list[str]], config: Path) -> None:
    words = command("gpt", "--nproc", "4", "--data", "my corpus.txt", "--max_steps=3")
    port = words[words.index("--master_port") + 1]
    assert 1024 <= int(port) < 65536
    assert words == [
        *("/bin/deepspeed", "--num_accelerators", "4", "--master_port", port),
        *("--log_level", "critical", "--module", "wavemare.recipes.gpt.pretrain"),
        *("--deepspeed_config", str(config), "--data", "my corpus.txt", "--max_steps=3"),
    ]


def test_options_after_two_dashes_belong_to_the_recipe(command: Callable[..., list[str]]) -> None:
    words = command("bert/finetune", "--", "--nproc", "9")
    assert words[-2:] == ["--nproc", "9"]
    assert words[words.index("--num_accelerators") + 1] == "2"  # by default
    assert "wavemare.recipes.bert.finetune" in words


def test_each_run_has_a_port_of_its_own(command: Callable[..., list[str]]) -> None:
    ports = {words[words.index("--master_port") + 1] for words in (command("gpt") for _ in "abcd")}
    assert len(ports) > 1


def test_launcher_options_come_before_the_module(command: Callable[..., list[str]]) -> None:
    words = command("gpt", "--launcher-args", "--hostfile 'my hosts' --master_port=7")
    index = words.index("--hostfile")
    assert words[index + 1] == "my hosts"
    assert index < words.index("--module")
    assert "--master_port" not in words  # the user's alone
    words = command("gpt", "--launcher-args", "--include=a:0,1")
    assert "--num_accelerators" not in words  # chosen devices replace it


@pytest.mark.parametrize(
    ("name", "nearest"), [("gtp", "gpt"), ("bert/pretrian", "bert/pretrain"), ("GPT", "'gpt'")]
)
def test_unknown_recipe_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app(["train", name], standalone_mode=False)
    assert (caught.value.key, caught.value.value) == ("RECIPE", name)
    assert nearest in caught.value.remedy


def test_recipes_are_found_by_both_names() -> None:
    assert find_recipe("gpt") is RECIPES["gpt/pretrain"]
    assert find_recipe("bert") is RECIPES["bert/pretrain"]
    for name, recipe in RECIPES.items():
        assert find_recipe(name) is recipe
        assert recipe.module == "wavemare.recipes." + name.replace("/", ".")


def test_missing_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install deepspeed"):
        launch.find_deepspeed()


def test_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    def run(command: list[str], variables: dict[str, str], **options: object) -> int:
        assert command.count("wavemare.recipes.gpt.pretrain") == 1
        return 17

    monkeypatch.setattr(launch, "run", run)
    result = CliRunner().invoke(app, ["train", "gpt", "--config", str(config)])
    assert result.exit_code == 17, result.exception


@pytest.fixture
def under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")


LAUNCHER_OPTIONS = [("--nproc", "2"), ("--launcher", "mpirun"), ("--launcher-args", "-v")]


@pytest.mark.parametrize(("option", "value"), LAUNCHER_OPTIONS)
@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_mpirun_are_not_launched_again(config: Path, option: str, value: str) -> None:
    with pytest.raises(LaunchError) as caught:
        app(["train", "gpt", "--config", str(config), option, value], standalone_mode=False)
    assert caught.value.key == option


@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_mpirun_have_no_mpi_for_gradients(config: Path) -> None:
    content = json.loads(config.read_text())
    content["wavemare"] = {"sparse_collective": {"mode": "auto", "transport": "mpi"}}
    config.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"wavemare\.sparse_collective\.transport"):
        app(["train", "gpt", "--config", str(config)], standalone_mode=False)
    refuse_mpi_transport({"wavemare": {"sparse_collective": "mpi"}})  # the ranks refuse the section
