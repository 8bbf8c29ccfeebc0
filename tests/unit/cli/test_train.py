# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: which command it makes of its options, and what it refuses at once."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from wavemare.cli import app, launch
from wavemare.cli.recipes import RECIPES, find_recipe
from wavemare.cli.train import refuse_mpi_transport
from wavemare.engine.config import load_config
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


def test_two_processes_by_default(command: Callable[..., list[str]]) -> None:
    words = command("bert")
    assert words[words.index("--num_accelerators") + 1] == "2"
    assert "wavemare.recipes.bert.pretrain" in words


def test_options_after_two_dashes_belong_to_the_recipe(command: Callable[..., list[str]]) -> None:
    assert command("gpt/finetune", "--", "--nproc", "9")[-2:] == ["--nproc", "9"]


def test_each_run_has_a_port_of_its_own(command: Callable[..., list[str]]) -> None:
    ports = {words[words.index("--master_port") + 1] for words in (command("gpt") for _ in "abcd")}
    assert len(ports) > 1


def test_launcher_options_come_before_the_module(command: Callable[..., list[str]]) -> None:
    words = command("gpt", "--launcher-args", "--hostfile 'my hosts' --master_port=7")
    index = words.index("--hostfile")
    assert words[index + 1] == "my hosts"
    assert index < words.index("--module")
    assert "--master_port" not in words  # the user's alone


def test_chosen_devices_replace_the_number_of_processes(
    command: Callable[..., list[str]],
) -> None:
    assert "--num_accelerators" not in command("gpt", "--launcher-args", "--include=a:0,1")


def error_of(*options: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        CliRunner().invoke(app, ["train", *options], catch_exceptions=False)
    return caught.value


@pytest.mark.parametrize(
    ("name", "nearest"), [("gtp", "gpt"), ("bert/pretrian", "bert/pretrain"), ("GPT", "'gpt'")]
)
def test_unknown_recipe_names_the_nearest(name: str, nearest: str) -> None:
    error = error_of(name)
    assert (error.key, error.value) == ("RECIPE", name)
    assert nearest in error.remedy


def test_recipes_are_found_by_both_names() -> None:
    assert find_recipe("gpt") is RECIPES["gpt/pretrain"]
    assert find_recipe("bert") is RECIPES["bert/pretrain"]
    for name, recipe in RECIPES.items():
        assert find_recipe(name) is recipe
        assert recipe.module == "wavemare.recipes." + name.replace("/", ".")


def test_missing_configuration(tmp_path: Path) -> None:
    error = error_of("gpt", "--config", str(tmp_path / "no.json"))
    assert error.key == "--config"
    assert "No such file" in str(error)
    assert "Name an existing JSON file" in str(error)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1,\n "b" 2}', "not JSON at line 2, column 6"),
        ("[1, 2]", "rather than an object"),
        ("{", "not JSON at line 1"),
    ],
)
def test_invalid_configuration_is_located(config: Path, text: str, reason: str) -> None:
    config.write_text(text)
    error = error_of("gpt", "--config", str(config))
    assert error.key == "--config"
    assert reason in error.reason


def test_binary_configuration(config: Path) -> None:
    config.write_bytes(b"\xff\xfe\x00")
    assert error_of("gpt", "--config", str(config)).reason == "this is not text"


def test_comments_are_allowed_as_in_deepspeed(config: Path) -> None:
    config.write_text('{\n  # the global batch\n  "train_batch_size": 8\n}')
    load_config(config, key="--config")


@pytest.mark.parametrize("option", ["--deepspeed_config=x.json", "--deepspeed_config"])
def test_second_configuration_is_refused(config: Path, option: str) -> None:
    error = error_of("gpt", "--config", str(config), option, "x.json")
    assert error.key == "--deepspeed_config"
    assert error.remedy == "Give it as --config FILE"


def test_open_quote_in_launcher_args(config: Path) -> None:
    error = error_of("gpt", "--config", str(config), "--launcher-args", "--hostfile 'a")
    assert error.key == "--launcher-args"
    assert error.remedy == "Close them"


def test_missing_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="pip install deepspeed"):
        launch.find_deepspeed()


def test_exit_code_is_passed_on(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    seen = SimpleNamespace()

    def run(command: list[str], variables: dict[str, str], **options: object) -> int:
        seen.command = command
        return 17

    monkeypatch.setattr(launch, "run", run)
    result = CliRunner().invoke(app, ["train", "gpt", "--config", str(config)])
    assert result.exit_code == 17
    assert json.dumps(seen.command).count("wavemare.recipes.gpt.pretrain") == 1


@pytest.fixture
def under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PMI_RANK": "0", "PMI_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--nproc", "2"), ("--launcher", "mpirun"), ("--launcher-args", "-v")],
)
@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_mpirun_are_not_launched_again(config: Path, option: str, value: str) -> None:
    ended = CliRunner().invoke(app, ["train", "gpt", "--config", str(config), option, value])
    assert isinstance(ended.exception, LaunchError)
    assert ended.exception.key == option


@pytest.mark.usefixtures("under_mpirun")
def test_ranks_of_mpirun_have_no_mpi_for_gradients(config: Path) -> None:
    content = json.loads(config.read_text())
    content["wavemare"] = {"sparse_collective": {"mode": "auto", "transport": "mpi"}}
    config.write_text(json.dumps(content))
    ended = CliRunner().invoke(app, ["train", "gpt", "--config", str(config)])
    assert isinstance(ended.exception, ConfigError)
    assert ended.exception.key == "wavemare.sparse_collective.transport"
    refuse_mpi_transport({"wavemare": {"sparse_collective": "mpi"}})  # the ranks refuse the section
