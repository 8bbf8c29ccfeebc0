# SPDX-License-Identifier: Apache-2.0
"""Running the command of a launcher, and ending it with its ranks."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import FrameType

import psutil

from wavemare.errors import LaunchError

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# CUDA, CUDA in WSL, ROCm, Intel, Habana, Ascend and Cambricon.
_DEVICE_FILES = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/accel*",
    "/dev/davinci[0-9]*",
    "/dev/cambricon_dev*",
)
_SECONDS_TO_END = 10.0
# For the current step, up to three more, and a checkpoint.
_SECONDS_TO_STOP = 120.0
_POLL_S = 0.1
_STARTER = "deepspeed.launcher.launch"


def find_deepspeed() -> str:
    """Return the ``deepspeed`` script of this environment, else the one in PATH.

    Raises:
        LaunchError: There is none.
    """
    beside = Path(sys.executable).with_name("deepspeed")
    found = str(beside) if beside.exists() else shutil.which("deepspeed")
    if found is None:
        reason = f"neither beside {sys.executable} nor in PATH"
        raise LaunchError("deepspeed", None, reason, "Install it: pip install deepspeed")
    return found


def extra_environment() -> dict[str, str]:
    """Return the variables that the ranks need and the user has not set."""
    variables = {}
    if not accelerator_visible():
        # Otherwise DeepSpeed warns on every rank that it has found no accelerator.
        variables["DS_ACCELERATOR"] = "cpu"
    if os.environ.get("DS_ACCELERATOR", variables.get("DS_ACCELERATOR")) == "cpu":
        # By default every rank would start as many threads as there are cores.
        variables["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in variables.items() if name not in os.environ}


def accelerator_visible() -> bool:
    """Whether this machine may have an accelerator; torch is not imported."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return False
    except metadata.PackageNotFoundError:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return sys.platform == "darwin" or any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def device_count() -> int:
    """Return how many accelerators the ranks of this host will see, by torch; 0 without any."""
    if not accelerator_visible() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0  # torch takes seconds to import

    import torch

    return torch.accelerator.device_count()


def run(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run the launcher to its end, and pass on signals to its processes.

    On SIGTERM the ranks save a checkpoint and exit within two minutes. Ctrl-C, SIGHUP and a second
    signal of any kind end all processes soon.

    Args:
        command: Of the launcher.
        variables: Added to the environment.

    Returns:
        The exit code, 0 if all ranks have ended with 0; 128 + n if signal n ended the job.
    """
    # In its own session, where Ctrl-C of a terminal does not reach the launcher: it would print a
    # traceback and abandon the ranks.
    with _noted_signals() as received:
        launcher = subprocess.Popen(
            command, env={**os.environ, **variables}, start_new_session=True
        )
        code = _wait(launcher, received)
        if received:
            return exit_code(end_job(launcher, received))
    code = exit_code(code)
    if code == 128 + signal.SIGKILL:
        sys.stderr.write(
            "error: a rank was killed (signal 9), most often by the kernel because memory ran out: "
            "try a smaller micro-batch, and look at 'dmesg | tail'\n"
        )
    return code


def exit_code(code: int) -> int:
    """Return the exit code of a shell for a return code.

    Args:
        code: Negative if a signal ended the launcher. If a signal ended a rank, the launcher exits
            with the negative number, which arrives as 256 - n. 255 stays: it is more often the
            code of ssh or ``sys.exit(-1)`` than SIGHUP.
    """
    if code < 0:
        return 128 - code
    return 128 + 256 - code if 256 - 64 < code < 255 else code  # noqa: PLR2004


@contextmanager
def _noted_signals() -> Iterator[list[int]]:
    """Yield a list that receives the signals that ask this process to end."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _wait(launcher: subprocess.Popen[bytes], received: list[int]) -> int:
    """Wait for the launcher or a signal; after a signal the code is meaningless."""
    while not received:
        try:
            return launcher.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    return 0


def end_job(
    launcher: subprocess.Popen[bytes],
    received: Sequence[int],
    seconds_to_stop: float = _SECONDS_TO_STOP,
) -> int:
    """Stop the launcher and all its descendants, and kill those that take too long.

    SIGTERM goes to the ranks of this host alone, if there are any: they save a checkpoint and exit,
    and the launcher follows. Other signals go to all processes.

    Args:
        launcher: The launcher, which leads a session.
        received: The signals so far; a second one that arrives meanwhile kills all processes.
        seconds_to_stop: Limit for saving a checkpoint.

    Returns:
        The launcher's return code; the negative number of the first signal if the signal or a kill
        ended the job.
    """
    processes = _descendants(launcher)
    if not processes:
        return launcher.wait()
    ranks = _ranks(processes) if received[0] == signal.SIGTERM else []
    for process in ranks or processes:
        # DeepSpeed's launcher prints a traceback on SIGINT. With several hosts its handler of
        # SIGTERM ends the remote processes.
        is_launcher = process.pid == launcher.pid
        _send(process, signal.SIGTERM if is_launcher else received[0])
    deadline = time.monotonic() + (seconds_to_stop if ranks else _SECONDS_TO_END)
    while alive := [process for process in processes if _is_alive(process)]:
        if len(received) > 1 or time.monotonic() > deadline:
            break
        launcher.poll()  # psutil's own wait would take the launcher's return code
        time.sleep(_POLL_S)
    for process in alive:
        _send(process, signal.SIGKILL)
    code = launcher.wait()
    return code if ranks and not alive else -received[0]


def _descendants(launcher: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the live processes among the launcher and its descendants, with what they are."""
    pids = set()
    if launcher.poll() is None:
        with suppress(psutil.NoSuchProcess):
            children = psutil.Process(launcher.pid).children(recursive=True)
            pids = {launcher.pid, *(child.pid for child in children)}
    # A scheduler that signals every process ends the launcher first and leaves orphans.
    return [
        process
        for process in psutil.process_iter(["ppid", "cmdline", "status"])
        if (process.pid in pids or _session(process.pid) == launcher.pid)
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def _ranks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return the children of DeepSpeed's launcher of this host: ranks, or their elastic agent."""
    # "python -u -m deepspeed.launcher.launch"; pdsh has these words too, further on.
    starters = {p.pid for p in processes if _STARTER in (p.info["cmdline"] or ())[1:4]}
    return [process for process in processes if process.info["ppid"] in starters]


def _is_alive(process: psutil.Process) -> bool:
    try:
        # An orphan may stay a zombie until its container ends.
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _session(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _send(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it has just ended
        process.send_signal(number)
