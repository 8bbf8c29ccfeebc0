# SPDX-License-Identifier: Apache-2.0
"""Running the launcher: its environment, its exit codes, and how it is ended."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wavemare.cli import launch

# Stands for the launcher and its ranks: like DeepSpeed's, it has no handler of its own, and it
# starts a process that starts two more.
LAUNCHER = """
import subprocess, sys, time
code = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(300)"
inner = "import subprocess, sys; ps = [subprocess.Popen([sys.executable, '-c', sys.argv[1], " \\
        "sys.argv[2]]) for _ in range(2)]; [p.wait() for p in ps]"
subprocess.Popen([sys.executable, "-c", inner, code, sys.argv[1]]).wait()
"""
PARENT = """
import sys
from wavemare.cli import launch
sys.exit(launch.run([sys.executable, *sys.argv[1:]], {}))
"""


@pytest.mark.parametrize(
    ("code", "shell"),
    [
        (0, 0),
        (1, 1),
        (2, 2),
        (130, 130),
        (-9, 137),
        (-15, 143),
        (247, 137),
        (241, 143),
        (250, 134),
        (255, 255),
    ],
)
def test_exit_code(code: int, shell: int) -> None:
    assert launch.exit_code(code) == shell


@pytest.mark.parametrize(("code", "expected"), [("sys.exit(3)", 3), ("sys.exit(-15)", 143)])
def test_run_returns_the_exit_code(code: str, expected: int) -> None:
    assert launch.run([sys.executable, "-c", f"import sys; {code}"], {}) == expected


def test_killed_rank_is_explained(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch.run([sys.executable, "-c", "import sys; sys.exit(-9)"], {}) == 137
    assert "memory ran out" in capfd.readouterr().err


def test_variables_reach_the_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import os; print(os.environ['MARK'], 'PATH' in os.environ)"
    assert launch.run([sys.executable, "-c", program], {"MARK": "x"}) == 0
    assert capfd.readouterr().out == "x True\n"


def test_signal_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in launch._SIGNALS]
    launch.run([sys.executable, "-c", ""], {})
    assert [signal.getsignal(number) for number in launch._SIGNALS] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_processes_in_silence(tmp_path: Path, number: int) -> None:
    program = tmp_path / "launcher.py"
    program.write_text(LAUNCHER)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(program), f"{ranks}/"],
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(list(ranks.iterdir())) == 2)
    started = time.monotonic()
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=30)
    assert parent.returncode == 128 + number
    assert time.monotonic() - started < 9
    for rank in ranks.iterdir():
        wait_for(lambda rank=rank: not alive(int(rank.name)))
    assert "launcher.py" not in errors  # no traceback of the launcher


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(300):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("this did not happen within 15 s")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def torch_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return lambda version: monkeypatch.setattr(launch.metadata, "version", lambda _: version)


def test_cpu_is_said_outright(torch_version: Callable[[str], None]) -> None:
    torch_version("2.13.0+cpu")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


def test_what_the_user_has_set_stays(
    torch_version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_version("2.13.0+cpu")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu"}
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    assert launch.extra_environment() == {}


@pytest.mark.parametrize("devices", [[], ["/dev/nvidia0"]])
def test_device_files_decide_with_a_torch_for_gpus(
    torch_version: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, devices: list[str]
) -> None:
    torch_version("2.13.0+cu130")
    matches = {"/dev/nvidia[0-9]*": devices}
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: matches.get(pattern, []))
    assert launch.accelerator_visible() is bool(devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.accelerator_visible() is False
