# SPDX-License-Identifier: Apache-2.0
"""Running the launcher: its environment, its exit codes, and how it is ended."""

import signal
import subprocess
import sys

import psutil
import pytest

from wavemare.cli import launch

# Stands for the launcher and its ranks: like DeepSpeed's, it has no handler of its own, and it
# starts a process that starts two more.
LAUNCHER = """
import subprocess, sys, time
code = "import os, sys, time; open(sys.argv[1] + str(os.getpid()), 'w'); time.sleep(900)"
inner = "import subprocess, sys; ps = [subprocess.Popen([sys.executable, '-c', sys.argv[1], " \\
        "sys.argv[2]]) for _ in range(2)]; [p.wait() for p in ps]"
subprocess.Popen([sys.executable, "-c", inner, code, sys.argv[1]]).wait()
"""
PARENT = """
import sys
from wavemare.cli import launch
sys.exit(launch.run([sys.executable, *sys.argv[1:]], {}))
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.mark.parametrize(
    ("code", "shell"),
    [(0, 0), (2, 2), (130, 130), (-9, 137), (-15, 143), (247, 137), (250, 134), (255, 255)],
)
def test_exit_code(code, shell):
    assert launch.exit_code(code) == shell


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [(3, 3, ""), (-15, 143, ""), (-9, 137, "memory ran out"), (9, 9, "")],
)
def test_run_returns_and_explains_the_exit_code(capfd, code, expected, said):
    before = [signal.getsignal(number) for number in SIGNALS]
    program = [sys.executable, "-c", f"import sys; sys.exit({code})"]
    assert launch.run(program, {}) == expected
    assert said in capfd.readouterr().err
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_ends_all_processes_in_silence(tmp_path, wait_for, number):
    program = tmp_path / "launcher.py"
    program.write_text(LAUNCHER)
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(program), f"{ranks}/"], stderr=subprocess.PIPE, text=True
    )
    wait_for(lambda: len(list(ranks.iterdir())) == 2)
    parent.send_signal(number)
    _, errors = parent.communicate(timeout=600)
    assert parent.returncode == 128 + number
    wait_for(lambda: not any(alive(int(rank.name)) for rank in ranks.iterdir()))
    assert "launcher.py" not in errors  # no traceback of the launcher


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def torch_version(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    return lambda version: monkeypatch.setattr(launch.metadata, "version", lambda _: version)


def test_cpu_is_said_outright_unless_the_user_has_set_it(torch_version, monkeypatch):
    torch_version("2.13.0+cpu")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert launch.extra_environment() == {"DS_ACCELERATOR": "cpu"}
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    assert launch.extra_environment() == {}


@pytest.mark.parametrize("devices", [[], ["/dev/nvidia0"]])
def test_device_files_decide_with_a_torch_for_gpus(torch_version, monkeypatch, devices):
    torch_version("2.13.0+cu130")
    matches = {"/dev/nvidia[0-9]*": devices}
    monkeypatch.setattr(launch.glob, "glob", lambda pattern: matches.get(pattern, []))
    assert launch.accelerator_visible() is bool(devices)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.accelerator_visible() is False
