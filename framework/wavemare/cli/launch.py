# SPDX-License-Identifier: Apache-2.0
"""Building, running and ending the ``deepspeed`` launcher's command."""

from __future__ import annotations

import glob
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import FrameType

from wavemare.engine.launch.environment import free_port
from wavemare.errors import LaunchError

__all__ = [
    "accelerator_visible",
    "build_command",
    "exit_code",
    "extra_environment",
    "find_deepspeed",
    "run",
]

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
# Signals whose bare numbers MPICH's mpirun exits with.
_FATAL = (signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV)
_PORT_OPTION = "--master_port"
_CHOOSE_DEVICES = {"-i", "--include", "-e", "--exclude", "--num_gpus", "--num_accelerators"}


def build_command(
    program: str,
    options: Sequence[str],
    *,
    module: bool = True,
    num_processes: int | None,
    launcher_options: Sequence[str] = (),
) -> list[str]:
    """Return the launcher's command line.

    Args:
        program: Python module of the recipe, or a script.
        options: Its options.
        module: Whether it is a module.
        num_processes: On each host; None for a hostfile's slots. Left out where a launcher option
            chooses the devices.
        launcher_options: More options of the launcher; they come last and so win.

    Raises:
        LaunchError: The launcher is not installed.
    """
    given = {option.split("=")[0] for option in launcher_options}
    # With the launcher's fixed default port a second run on this host would fail.
    port = [] if _PORT_OPTION in given else [_PORT_OPTION, str(free_port())]
    chosen = num_processes is None or given & _CHOOSE_DEVICES
    count = [] if chosen else ["--num_accelerators", str(num_processes)]
    return [
        *(find_deepspeed(), *count, *port),
        # The launcher would report the end of its children as an error, below their own message.
        *("--log_level", "critical", *launcher_options),
        *(["--module"] if module else []),
        *(program, *options),
    ]


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


def run(
    command: Sequence[str],
    variables: Mapping[str, str],
    *,
    bare_signals: bool = False,
) -> int:
    """Run the launcher to its end, and pass on signals to its processes.

    On SIGTERM the ranks save a checkpoint and exit within two minutes. Ctrl-C, SIGHUP and a second
    signal of any kind end all processes soon.

    Args:
        command: From `build_command`.
        variables: Added to the environment.
        bare_signals: Whether the launcher exits with n after signal n has ended a rank, as
            MPICH's ``mpirun`` does.

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
            from wavemare.cli.ending import end_job

            return exit_code(end_job(launcher, received))
    if not bare_signals or code < 0:
        code = exit_code(code)
    elif code in _FATAL:
        code += 128
    if code == 128 + signal.SIGKILL:
        sys.stderr.write(
            "error: a rank was killed (signal 9), most often by the kernel because memory ran out: "
            "try a smaller micro-batch, and look at 'dmesg | tail'\n"
        )
    return code


def exit_code(code: int) -> int:
    """Return what a shell would make of a return code.

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
