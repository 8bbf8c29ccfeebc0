# SPDX-License-Identifier: Apache-2.0
"""Shared memory, file descriptors, launchers and locks of this machine."""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from wavemare.cli.checks.finding import Finding
from wavemare.cli.launch import find_deepspeed
from wavemare.errors import LaunchError
from wavemare.observe.formats import format_bytes, format_duration

__all__ = [
    "check_descriptors",
    "check_extension_locks",
    "check_launchers",
    "check_shared_memory",
    "extensions_folder",
]

_SHARED_MEMORY = Path("/dev/shm")
_ENOUGH_SHARED_MEMORY = 256 * 2**20
_ENOUGH_DESCRIPTORS = 1024
# A builder makes its lock shortly before its compiler can be seen.
_YOUNG_LOCK_SECONDS = 60.0


def check_launchers() -> Iterator[Finding]:
    """Look for the programs that start ranks."""
    try:
        yield Finding("deepspeed launcher", "ok", find_deepspeed())
    except LaunchError as error:
        yield Finding("deepspeed launcher", "fail", error.reason, error.remedy)
    folder = str(Path(sys.executable).parent)
    for name, use in (
        ("pdsh", "deepspeed on several hosts"),
        ("mpirun", "deepspeed --launcher openmpi or mpich"),
        ("srun", "Slurm"),
    ):
        path = shutil.which(name, path=os.pathsep.join([folder, os.environ.get("PATH", "")]))
        yield Finding(name, "ok", path or f"not found (used for {use})")


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Iterator[Finding]:
    """Check the room for tensors that processes of this host share."""
    if not folder.is_dir():
        yield Finding("shared memory", "warn", f"there is no {folder}", "Mount a tmpfs there")
        return
    free = shutil.disk_usage(folder).free
    value = f"{format_bytes(free)} free in {folder}"
    if free < _ENOUGH_SHARED_MEMORY:
        remedy = "Remove what crashed runs left there; in a container: docker run --shm-size=8g"
        yield Finding("shared memory", "warn", value, remedy)
    else:
        yield Finding("shared memory", "ok", value)


def check_descriptors() -> Iterator[Finding]:
    """Check how many files and sockets a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    value = "unlimited" if unlimited else f"{soft} per process"
    if not unlimited and soft < _ENOUGH_DESCRIPTORS:
        remedy = f"ulimit -n {_ENOUGH_DESCRIPTORS if hard < 0 else min(hard, 65536)}"
        yield Finding("open files", "warn", value, remedy)
    else:
        yield Finding("open files", "ok", value)


def extensions_folder() -> Path:
    """Return where torch builds extensions just in time (``torch.utils.cpp_extension``)."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "torch_extensions"


def check_extension_locks(folder: Path | None = None) -> Iterator[Finding]:
    """Look for locks of builds that were killed: every later start waits for them for ever.

    Args:
        folder: Where extensions are built; by default torch's.
    """
    folder = folder or extensions_folder()
    # Two levels by default (python and CUDA version, extension), one below TORCH_EXTENSIONS_DIR.
    locks = sorted({*folder.glob("*/lock"), *folder.glob("*/*/lock")})
    if not locks:
        yield Finding("extension locks", "ok", f"none in {folder}")
    for lock in locks:
        age = time.time() - lock.stat().st_mtime
        value = f"{lock} ({format_duration(age)} old)"
        if age < _YOUNG_LOCK_SECONDS or _is_being_built(lock.parent):
            yield Finding("extension locks", "warn", f"{value}: being built", "Wait for the build")
        else:
            remedy = f"rm {shlex.quote(str(lock))}"
            yield Finding("extension locks", "fail", f"{value}: its builder is gone", remedy)


def _is_being_built(folder: Path) -> bool:
    """Whether a process works in the folder, as ninja and the compilers below it do."""
    import psutil

    for process in psutil.process_iter(["cwd"]):
        # None for a process of another user, who would have a folder of his own.
        if process.info["cwd"] and Path(process.info["cwd"]) == folder.resolve():
            return True
    return False
