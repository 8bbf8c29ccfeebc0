# SPDX-License-Identifier: Apache-2.0
"""Environment variables, hostfiles, and a machine without a compiler."""

import os
import shutil
from pathlib import Path

import pytest

from wavemare.cli.job import read_hosts
from wavemare.engine.launch.environment import free_port
from wavemare.engine.launch.group import ensure_launched
from wavemare.errors import LaunchError

TORCH = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}
PROGRAM = Path(__file__).parent / "programs" / "build.py"
CACHES = ("TORCH_EXTENSIONS", "TORCHINDUCTOR_CACHE", "TRITON_CACHE")
MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
OURS = ("WAVEMARE_COMPILED_OPS", "WAVEMARE_VERBOSE")
OTHERS = ("PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", *OURS)

VARIABLES = [
    ({**TORCH, "RANK": "abc"}, "RANK", "0 or more"),
    ({**TORCH, "RANK": "-1"}, "RANK", "0 or more"),
    ({**TORCH, "RANK": "2"}, "RANK", "WORLD_SIZE is 2"),
    ({**TORCH, "RANK": "٣"}, "RANK", "whole number"),
    ({**TORCH, "WORLD_SIZE": "0"}, "WORLD_SIZE", "1 or more"),
    pytest.param({**TORCH, "WORLD_SIZE": "9" * 99}, "WORLD_SIZE", "whole", id="99 digits"),
    ({**TORCH, "LOCAL_RANK": "x"}, "LOCAL_RANK", "0 or more"),
    ({**TORCH, "LOCAL_RANK": "2"}, "LOCAL_RANK", "SIZE is 2"),
    ({**TORCH, "MASTER_PORT": "foo"}, "MASTER_PORT", "to 65535"),
    ({**TORCH, "MASTER_PORT": "70000"}, "MASTER_PORT", "65535"),
    ({**TORCH, "MASTER_ADDR": ""}, "MASTER_ADDR", "empty"),
    ({}, "launcher", "without a launcher"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "launcher", "MASTER_PORT not set"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "launcher", "without a launcher"),
    ({**TORCH, "WAVEMARE_COMPILED_OPS": "yes"}, "WAVEMARE_COMPILED_OPS", "neither 0 nor 1"),
]


@pytest.fixture
def environment(monkeypatch):
    def put(values):
        for name in (*TORCH, *MPI, *OTHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(("values", "key", "said"), VARIABLES)
def test_a_variable(refused, environment, values, key, said):
    environment(values)
    refused(ensure_launched, LaunchError, key, said)


HOSTFILES = [
    ("", "it names no host"),
    pytest.param("# node0 slots=2\n", "it names no host", id="comments alone"),
    pytest.param("node0\n", "line 1: 'node0' is not a host with its slots", id="no slots"),
    pytest.param("node0 slots = 2\n", "is not a host with its slots", id="blanks around ="),
    pytest.param("node0 slots=0\n", "node0 has no slots", id="0 slots"),
    pytest.param("node0 slots=2 max_slots=4\n", "deepspeed ignores", id="Open MPI's form"),
    pytest.param("a slots=1\nb slots=1\na slots=1\n", "a is listed twice", id="a host twice"),
    pytest.param(b"\xff\xfe slots=x\n", "line 1", id="no text"),
    pytest.param("\ufeffa slots=1\n", "byte order mark", id="a byte order mark"),
    pytest.param("a slots=" + "9" * 5000, "is not a host with its slots", id="5,000 digits"),
]


@pytest.mark.parametrize(("content", "said"), HOSTFILES)
def test_a_hostfile(refused, write, content, said):
    file = write("hostfile", content)
    refused(lambda: read_hosts(file), LaunchError, "--hostfile", str(file), said)


def test_a_folder_for_a_hostfile(refused, tmp_path):
    refused(lambda: read_hosts(tmp_path), LaunchError, "--hostfile", "Is a directory")


def nightly(*case):
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("what", "values", "key", "ends"),
    [
        ("plain", {}, None, 0),
        ("offload", {}, "CXX = None", 2),
        nightly("offload", {"CXX": "/nowhere/c++"}, "CXX = '/nowhere/c++'", 2),
        ("compile", {}, "CXX = None", 2),
        ("compile", {"TORCHDYNAMO_DISABLE": "1"}, None, 0),  # as the message says
        ("triton", {}, "CC = None", 2),
        nightly("muon", {}, "CXX = None", 2),
        nightly("plain", {"WAVEMARE_COMPILED_OPS": "1"}, "CXX = None", 2),
    ],
)
def test_a_machine_without_a_compiler(fork, tmp_path, what, values, key, ends):
    """What builds code at its first use says that in one sentence; the rest trains."""
    (tmp_path / "bin").mkdir()
    for tool in ("ninja", "sh"):
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool))
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environment = {
        **{**kept, **TORCH, "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_PORT": str(free_port()), "DS_ACCELERATOR": "cpu"},
        **{"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path)},
        **{f"{name}_DIR": str(tmp_path / name) for name in CACHES},
        **values,
    }
    ended = fork(PROGRAM, what, folder=tmp_path, timeout=300, environment=environment)
    assert ended.codes == [ends], ended.outputs[0][-4000:]
    before, _, after = ended.outputs[0].partition("error")
    assert "Traceback" not in before
    assert (not after) if key is None else key in after.splitlines()[0]
