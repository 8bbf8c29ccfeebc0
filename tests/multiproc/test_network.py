# SPDX-License-Identifier: Apache-2.0
"""Emulated hosts: they are apart, their links carry and limit, and nothing of them stays."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cluster import EmulatedCluster
from benchmarks.cluster.namespaces import run_tool
from support.refusals import refuses
from wavemare.comm.mpi_library import describe_mpi
from wavemare.errors import LaunchError

PROGRAMS = Path(__file__).parent / "programs"
EXCHANGE = [sys.executable, str(PROGRAMS / "network_exchange.py")]
EXCHANGED = 20_000_000
MARKER = f"1000.{os.getpid()}"  # of processes that sleep
OBSTACLE = EmulatedCluster.obstacle()
needs_cluster = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


@pytest.fixture(scope="module")
def pair():
    with EmulatedCluster(2) as cluster:
        yield cluster


@pytest.fixture
def new_pair():
    """One in which nothing has been started, of which something may be about to end."""
    with EmulatedCluster(2) as cluster:
        yield cluster


def shell(script):
    return ["sh", "-c", script]


def outputs(folder, ranks):
    return [(folder / f"rank_{rank}.log").read_text().strip() for rank in range(ranks)]


def carried(cluster):
    """Return the bytes that two hosts' links have sent and received."""
    counters = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx")]
    texts = [run_tool([*cluster.enter(host), "cat", *counters]) for host in (0, 1)]
    return [int(number) for text in texts for number in text.split()]


def seen_from_outside():
    words = (["ip", "-brief", "address"], ["ip", "netns"], ["cat", "/proc/mounts"])
    return [subprocess.run(word, capture_output=True, check=True).stdout for word in words]


def all_commands():
    return subprocess.check_output(["ps", "-ww", "-eo", "args"], text=True)


def until(condition, seconds=600.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def process_state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def has_ended(pid):
    return process_state(pid) == "Z"


@needs_cluster
def test_hosts_have_names_addresses_and_memory_of_their_own(tmp_path, new_pair):
    Path("/dev/shm/outside").touch()
    try:
        script = (
            "uname -n; echo $(ls /sys/class/net) / $(ls /dev/shm); set -- /proc/[0-9]*; echo $#"
        )
        script += "; touch /dev/shm/$RANK"
        assert new_pair.run_ranks(shell(script), timeout_s=120, logs=tmp_path) == 0
        first = outputs(tmp_path, 2)
        script = "ls /dev/shm; getent hosts node0 node1"
        assert new_pair.run_ranks(shell(script), timeout_s=120, logs=tmp_path) == 0
        second = outputs(tmp_path, 2)
    finally:
        Path("/dev/shm/outside").unlink()
    for index in range(2):
        name, listed, processes = first[index].splitlines()
        assert (name, listed) == (f"node{index}", "eth0 lo /")
        assert int(processes) == 2  # the keeper and the shell
        assert second[index].split() == [str(index), "10.77.0.1", "node0", "10.77.0.2", "node1"]


@needs_cluster
def test_ranks_have_torchruns_variables_and_none_of_another_job(tmp_path, pair, monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("PMI_RANK", "7")
    monkeypatch.chdir(tmp_path)
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR GLOO_SOCKET_IFNAME PWD GIVEN"
    script = "echo " + " ".join(f"${name}" for name in names.split())
    for launcher in ("torch", "mpirun"):
        code = pair.run_ranks(
            shell(script),
            timeout_s=120,
            ranks_per_host=2,
            environment={"GIVEN": "a b"},
            launcher=launcher,
            logs=tmp_path / launcher,
        )
        assert code == 0
        for rank, output in enumerate(outputs(tmp_path / launcher, 4)):
            assert output == f"{rank} {rank % 2} 4 2 10.77.0.1 eth0 {tmp_path} a b"
        hosts = pair.run_ranks(shell("uname -n"), timeout_s=120, ranks_per_host=2, logs=tmp_path)
        assert hosts == 0
        assert outputs(tmp_path, 4) == ["node0", "node0", "node1", "node1"]


@pytest.mark.nightly
@needs_cluster
@pytest.mark.world_size(2)
@pytest.mark.parametrize("library", ["gloo", "mpi"])
def test_what_ranks_exchange_goes_over_the_links_and_no_faster(tmp_path, library):
    if library == "mpi" and describe_mpi().flavour is None:
        pytest.skip("needs MPI (the extra 'mpi')")
    launcher = "mpirun" if library == "mpi" else "torch"
    command = [*EXCHANGE, str(tmp_path), library]
    with EmulatedCluster(2, 200.0) as cluster:
        before = carried(cluster)
        code = cluster.run_ranks(command, timeout_s=600, launcher=launcher, logs=tmp_path)
        assert code == 0, outputs(tmp_path, 2)
        for old, new in zip(before, carried(cluster), strict=True):
            assert 3 * EXCHANGED < new - old < 1.1 * 3 * EXCHANGED
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2)]
    assert [one["host"] for one in found] == ["node0", "node1"]
    assert max(one["seconds"] for one in found) >= 8 * EXCHANGED / 200e6


@needs_cluster
@pytest.mark.parametrize("launcher", ["torch", "mpirun"])
def test_a_rank_that_fails_makes_the_program_fail(tmp_path, pair, launcher):
    then = f"exec sleep {MARKER}" if launcher == "torch" else "exit 0"
    script = f"[ $RANK = 0 ] || exit 3; {then}"
    group = pair.start_ranks(shell(script), launcher=launcher, logs=tmp_path)
    assert group.wait(timeout_s=500, grace_s=0.2) == 3
    assert MARKER not in all_commands()


@pytest.mark.nightly
@needs_cluster
@pytest.mark.parametrize("launcher", ["torch", "mpirun"])
def test_ranks_that_hang_are_killed_with_all_their_children(tmp_path, pair, launcher):
    script = f"trap '' TERM; setsid sleep {MARKER} & sleep {MARKER}"
    assert pair.run_ranks(shell(script), timeout_s=2, launcher=launcher, logs=tmp_path) == 124
    assert MARKER not in all_commands()
    assert pair.run_ranks(["true"], timeout_s=120, launcher=launcher, logs=tmp_path) == 0


@needs_cluster
def test_output_is_printed_with_the_rank_before_each_line(pair, capsys):
    script = "echo one; sleep 0.1; printf two"
    assert pair.run_ranks(shell(script), timeout_s=120) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("[0]")] == ["[0] one", "[0] two"]
    assert sorted(lines) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert pair.run_ranks(["/no/such/program"], timeout_s=120) == 127
    assert "/no/such/program: not found" in capsys.readouterr().out


@needs_cluster
@pytest.mark.parametrize(
    "ending",
    [
        signal.SIGKILL,
        *(
            pytest.param(how, marks=pytest.mark.nightly)
            for how in (signal.SIGINT, signal.SIGTERM, "raise")
        ),
    ],
)
def test_nothing_stays_however_it_ends(ending):
    before = seen_from_outside()
    words = [sys.executable, str(PROGRAMS / "network_holder.py"), str(ending)]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as holder:
        parts = json.loads(holder.stdout.readline())
        if ending != "raise":
            assert not any(map(has_ended, parts["pids"]))
            assert Path(parts["folder"]).exists()
            os.killpg(holder.pid, ending)  # as a terminal does
        assert holder.wait(timeout=600) != 0
    until(lambda: all(map(has_ended, parts["pids"])))
    until(lambda: not Path(parts["folder"]).exists() and parts["folder"] not in all_commands())
    until(lambda: seen_from_outside() == before)


def test_a_number_of_hosts_out_of_range_is_refused():
    for number in (0, 65):
        with refuses(LaunchError, "num_hosts", number):
            EmulatedCluster(number)


@needs_cluster
def test_the_obstacle_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert EmulatedCluster.obstacle() == "only root may create hosts as namespaces"
    with refuses(LaunchError, "cluster", "2 hosts"), EmulatedCluster(2):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with monkeypatch.context() as without_tc:
        without_tc.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
        assert EmulatedCluster.obstacle().startswith("the program 'tc' is not installed")
    (tmp_path / "tc").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "tc").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert EmulatedCluster.obstacle().startswith("the kernel refuses: ")
