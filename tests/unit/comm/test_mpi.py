# SPDX-License-Identifier: Apache-2.0
"""What is found out about MPI, also where it is missing, broken or hangs."""

import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wavemare.comm import mpi
from wavemare.comm.mpi import MpiInfo, describe_mpi

Script = Callable[[str, str], Path]


@pytest.fixture(autouse=True)
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Start from a machine without ``mpirun``; a test may add programs."""
    found: dict[str, str] = {}
    monkeypatch.setattr(mpi, "_find_program", found.get)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(name: str, body: str) -> Path:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return file

    return write


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the child program that asks MPI."""

    def use(body: str) -> None:
        tell = 'print("wavemare-mpi:" + json.dumps(findings), flush=True)'
        head = f"import json, os, signal, subprocess, time\ndef tell(**findings):\n    {tell}\n"
        monkeypatch.setattr(mpi, "_PROBE", head + textwrap.dedent(body))

    return use


def test_real_probe_never_touches_mpi_in_this_process() -> None:
    program = (
        "import sys\n"
        "from wavemare.comm.mpi import describe_mpi\n"
        "info = describe_mpi()\n"
        "assert info.mpi4py, info\n"
        "assert (info.flavour is None) == (info.problem is not None), info\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'mpi4py', 'torch', 'deepspeed', 'numpy'}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "[]\n"


def test_findings_of_a_working_library(probe: Callable[[str], None]) -> None:
    probe("""
        print("noise of a library")
        tell(flavour="MPICH", version="5.0.2", description="MPICH Version: 5.0.2")
        tell(library="libmpi.so.12", thread_level="multiple", cuda_aware=False)
    """)
    info = describe_mpi()
    assert (info.flavour, info.version, info.library) == ("MPICH", "5.0.2", "libmpi.so.12")
    assert (info.thread_level, info.cuda_aware, info.problem) == ("multiple", False, None)


def test_missing_library_is_told(probe: Callable[[str], None]) -> None:
    probe('tell(problem="cannot load MPI library")')
    info = describe_mpi()
    assert (info.flavour, info.problem) == (None, "cannot load MPI library")


def test_hang_keeps_what_was_found_and_leaves_no_process(
    probe: Callable[[str], None], tmp_path: Path
) -> None:
    probe(f"""
        tell(flavour="MPICH", version="4.0")
        daemon = subprocess.Popen(["sleep", "300"])
        open({str(tmp_path / "pid")!r}, "w").write(str(daemon.pid))
        time.sleep(300)
    """)
    started = time.monotonic()
    info = describe_mpi(timeout_s=4.0)
    assert time.monotonic() - started < 20
    assert (info.flavour, info.thread_level) == ("MPICH", None)
    assert info.problem == "starting MPI in a process of its own took longer than 4 s"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_abort_keeps_what_was_found(probe: Callable[[str], None]) -> None:
    probe("""
        tell(flavour="MPICH", version="4.0")
        os.kill(os.getpid(), signal.SIGABRT)
    """)
    info = describe_mpi()
    assert info.flavour == "MPICH"
    assert info.problem == "starting MPI in a process of its own failed with exit code -6"


def test_child_does_not_join_the_job_of_this_rank(
    probe: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    probe('tell(description=" ".join(sorted(k for k in os.environ if k[:3] in ("PMI", "OMP"))))')
    description = describe_mpi().description or ""
    assert "OMPI_ALLOW_RUN_AS_ROOT" in description
    assert "RANK" not in description
    assert "PMI" not in description.replace("OMPI_ALLOW_RUN_AS_ROOT", "")


@pytest.mark.parametrize("value", ["true", "false"])
def test_open_mpi_is_asked_for_cuda_by_its_own_tool(
    probe: Callable[[str], None], script: Script, programs: dict[str, str], value: str
) -> None:
    probe('tell(flavour="Open MPI", version="4.1.0", thread_level="multiple")')
    line = f"mca:mpi:base:param:mpi_built_with_cuda_support:value:{value}"
    programs["ompi_info"] = str(script("ompi_info", f"echo {line}"))
    assert describe_mpi().cuda_aware is (value == "true")


@pytest.mark.parametrize(
    ("banner", "flavour"),
    [
        ("HYDRA build details:", "MPICH"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (OpenRTE) 4.0.3", "Open MPI"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "Intel MPI"),
        ("something else", None),
    ],
)
def test_launcher_is_recognized(
    script: Script,
    probe: Callable[[str], None],
    programs: dict[str, str],
    banner: str,
    flavour: str | None,
) -> None:
    probe('tell(flavour="MPICH", version="5.0")')
    programs["mpirun"] = str(script("mpirun", f"echo '{banner}'"))
    info = describe_mpi()
    assert (info.launcher, info.launcher_flavour) == (programs["mpirun"], flavour)
    assert info.launcher_matches is (flavour != "Open MPI")


def test_without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise mpi.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(mpi.metadata, "version", missing)
    assert describe_mpi() == MpiInfo(problem="mpi4py is not installed")


def is_gone(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
