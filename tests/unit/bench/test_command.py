# SPDX-License-Identifier: Apache-2.0
"""The command line refuses what cannot be measured before it starts a process."""

import subprocess
import sys
from pathlib import Path

import pytest

from wavemare.cli import app, launch
from wavemare.errors import ConfigError


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: object) -> int:
        pytest.fail("a process was started")

    monkeypatch.setattr(launch, "run", run)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--micro-batches", "1,two"], "--micro-batches"),
        (["--systems", "deepspeed"], "--systems"),
        (["--stages", "1"], "--stages"),
        (["--forward-ms", "5"], "--forward-ms"),
        (["--backward-ms", "5"], "--backward-ms"),
        (["--synthetic", "--forward-ms", "0"], "--forward-ms"),
        (["--synthetic", "--backward-ms", "-1"], "--backward-ms"),
        (["--json", "/no/such/folder/result.json"], "--json"),
        (["--trace", "/dev/null/folder"], "--trace"),
    ],
)
def test_bad_options_are_named(words: list[str], option: str) -> None:
    with pytest.raises(ConfigError) as caught:
        app(["bench", "pipeline", *words], standalone_mode=False)
    assert caught.value.key == option


def test_no_folder_is_left_by_a_refused_request(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    with pytest.raises(ConfigError):
        app(
            ["bench", "pipeline", "--stages", "0", "--trace", str(folder)],
            standalone_mode=False,
        )
    assert not folder.exists()


def test_asking_is_light(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from wavemare.cli import app\n"
        "from wavemare.errors import ConfigError\n"
        "try:\n    app(['bench', 'pipeline', '--stages', '1'], standalone_mode=False)\n"
        "except ConfigError as error:\n"
        "    heavy = {'torch', 'deepspeed', 'transformers', 'numpy'}\n"
        "    print(error.key, sorted(heavy & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout == "--stages []\n", result.stderr
