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
    ({**TORCH, "RANK": "abc"}, "RANK"),
    ({**TORCH, "RANK": "-1"}, "RANK"),
    ({**TORCH, "RANK": "2"}, "RANK"),
    ({**TORCH, "RANK": "٣"}, "RANK"),
    ({**TORCH, "WORLD_SIZE": "0"}, "WORLD_SIZE"),
    pytest.param({**TORCH, "WORLD_SIZE": "9" * 99}, "WORLD_SIZE", id="99 digits"),
    ({**TORCH, "LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ({**TORCH, "LOCAL_RANK": "2"}, "LOCAL_RANK"),
    ({**TORCH, "MASTER_PORT": "foo"}, "MASTER_PORT"),
    ({**TORCH, "MASTER_PORT": "70000"}, "MASTER_PORT"),
    ({**TORCH, "MASTER_ADDR": ""}, "MASTER_ADDR"),
    ({}, "launcher"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "launcher"),
    ({"OMPI_COMM_WORLD_RANK": "0"}, "launcher"),
    ({**TORCH, "WAVEMARE_COMPILED_OPS": "yes"}, "WAVEMARE_COMPILED_OPS"),
]


@pytest.fixture
def environment(monkeypatch):
    def put(values):
        for name in (*TORCH, *MPI, *OTHERS):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(("values", "key"), VARIABLES)
def test_a_variable(refused, environment, values, key):
    environment(values)
    refused(ensure_launched, LaunchError, key)


HOSTFILES = [
    None,  # a folder
    "",
    pytest.param("# node0 slots=2\n", id="comments alone"),
    pytest.param("node0\n", id="no slots"),
    pytest.param("node0 slots = 2\n", id="blanks around ="),
    pytest.param("node0 slots=0\n", id="0 slots"),
    pytest.param("node0 slots=2 max_slots=4\n", id="Open MPI's form"),
    pytest.param("a slots=1\nb slots=1\na slots=1\n", id="a host twice"),
    pytest.param(b"\xff\xfe slots=x\n", id="no text"),
    pytest.param("\ufeffa slots=1\n", id="a byte order mark"),
    pytest.param("a slots=" + "9" * 5000, id="5,000 digits"),
]


@pytest.mark.parametrize("content", HOSTFILES)
def test_a_hostfile(refused, write, tmp_path, content):
    file = tmp_path if content is None else write("hostfile", content)
    refused(lambda: read_hosts(file), LaunchError, "--hostfile")


def nightly(*case):
    return pytest.param(*case, marks=pytest.mark.nightly)


@pytest.mark.long
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
