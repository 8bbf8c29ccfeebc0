# SPDX-License-Identifier: Apache-2.0
"""What is found out about MPI, also where it is missing, broken or hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from wavemare.comm.mpi_library import MpiInfo, describe_mpi
from wavemare.comm.transport import open_transport
from wavemare.comm.transport.torch_transport import backend_of


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return the folder of an interpreter on a machine without any other program."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def script(file, *lines):
    file.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    file.chmod(0o755)
    return str(file)


def says(**findings):
    return f"echo 'wavemare-mpi:{json.dumps(findings)}'"


def describe(machine, *lines, timeout_s=60.0):
    """Describe MPI by an interpreter that prints some findings, whatever it is asked."""
    return describe_mpi(timeout_s, script(machine / "python", *lines))


def test_real_probe_never_touches_mpi_in_this_process():
    program = (
        "import sys\n"
        "from wavemare.comm.mpi_library import describe_mpi\n"
        "info = describe_mpi(60)\n"
        "assert (info.flavour is None) == (info.problem is not None), info\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(loaded & {'mpi4py', 'torch', 'deepspeed', 'numpy'}))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_findings_of_a_working_library(machine):
    info = describe(
        machine,
        "echo noise of a library",
        says(flavour="MPICH", version="5.0.2"),
        says(thread_level="multiple", cuda_aware=False),
    )
    assert (info.flavour, info.version) == ("MPICH", "5.0.2")
    assert (info.thread_level, info.cuda_aware, info.problem) == ("multiple", False, None)
    assert info.launcher is None


def test_hang_keeps_what_was_found_and_leaves_no_process(machine):
    pids = machine / "pids"
    hang = [
        says(flavour="MPICH", version="4.0"),
        "/bin/sleep 300 &",
        f"echo $$ $! > {pids}",
        "/bin/sleep 300",
    ]
    for seconds in (1, 8, 64):
        info = describe(machine, *hang, timeout_s=seconds)
        if pids.exists() and pids.read_text().endswith("\n"):  # it came so far in time
            break
    assert (info.flavour, info.thread_level) == ("MPICH", None)
    assert info.problem == f"starting MPI in a process of its own took longer than {seconds} s"
    for pid in map(int, pids.read_text().split()):
        deadline = time.monotonic() + 300
        while not is_gone(pid):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_abort_keeps_what_was_found(machine):
    info = describe(machine, says(flavour="MPICH", version="4.0"), "kill -ABRT $$")
    assert info.flavour == "MPICH"
    assert info.problem == "starting MPI in a process of its own failed with exit code -6"


def test_child_does_not_join_the_job_of_this_rank(machine, monkeypatch):
    for name in ("PMI_RANK", "PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT", "1")
    values = "$PMI_RANK/$PMIX_NAMESPACE/$OMPI_COMM_WORLD_RANK/$OMPI_ALLOW_RUN_AS_ROOT"
    text = says(version="VALUES").replace("VALUES", f"'{values}'")
    assert describe(machine, text).version == "///1"


@pytest.mark.parametrize(
    ("banner", "flavour"),
    [
        ("HYDRA build details:", "MPICH"),
        ("mpirun (Open MPI) 5.0.11", "Open MPI"),
        ("mpirun (OpenRTE) 4.0.3", "Open MPI"),
        ("Report bugs to http://www.open-mpi.org/community/help/", "Open MPI"),
        ("prterun 3.0.6", "Open MPI"),
        ("PRRTE 3.0.6", "Open MPI"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.11", "Intel MPI"),
        ("something else", None),
    ],
)
@pytest.mark.parametrize("beside", [True, False])
def test_launcher_is_recognized(machine, banner, flavour, beside):
    folder = machine if beside else machine / "bin"
    folder.mkdir(exist_ok=True)
    launcher = script(machine / "mpirun", f"echo '{banner}'")
    python = script(folder / "python", says(flavour="MPICH", version="5.0"))
    info = describe_mpi(60, python)
    assert (info.launcher, info.launcher_flavour) == (launcher, flavour)
    assert info.launcher_matches is (flavour != "Open MPI")


def test_without_mpi4py(machine, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert describe(machine) == MpiInfo(problem="mpi4py is not installed")


def test_ranks_of_mpirun_use_torch_where_mpi4py_is_missing(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        assert open_transport().name == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("config", "cpu", "cuda"),
    [
        ("cpu:gloo,cuda:nccl", "gloo", "nccl"),
        ("cuda:nccl", "gloo", "nccl"),
        ("cpu:gloo,cuda:gloo", "gloo", "gloo"),
        ("cpu:gloo", "gloo", "gloo"),
        ("xpu:xccl", None, None),
    ],
)
def test_a_group_sends_by_its_backend_for_the_device(monkeypatch, config, cpu, cuda):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert (backend_of(None, "cpu"), backend_of(None, "cuda:1")) == (cpu, cuda)


def test_host_memory_travels_over_gloo_beside_nccl_alone(monkeypatch):
    """DeepSpeed initializes NCCL alone on GPUs, and copies of local steps are on the host."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
        assert open_transport(device=torch.device("cpu")).name == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "gloo", "cpu:gloo"])
def test_a_group_made_without_a_name_of_its_backend_is_gloo_here(backend):
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    try:
        assert open_transport().name == "gloo"
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_without_a_library_the_transport_says_what_to_install():
    program = "from wavemare.comm.transport import open_transport; open_transport(choice='mpi')"
    environment = os.environ | {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 1
    assert result.stderr.rstrip().endswith("Install one: pip install mpich.")
