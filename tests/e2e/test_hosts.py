# SPDX-License-Identifier: Apache-2.0
"""Two hosts: every way to start ranks on both, their failures, a cut link, and the GPT recipe.

The hosts are Linux namespaces on this machine (`benchmarks.cluster`), which takes root; most
tests log in there by ssh (the Debian packages openssh-server, openssh-client and pdsh). One command
runs it all: make test-hosts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from mpi_jobs import needed_mpi

from benchmarks.cluster import EmulatedCluster
from wavemare.report import read_run

BIN = Path(sys.executable).parent
PROGRAMS = Path(__file__).parent / "programs"
FAULT = "ValueError: this rank's own fault"
FAULTS = PROGRAMS.parents[1] / "multiproc" / "programs" / "faults.py"
TIMEOUT_S = 4.0
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SERVER = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
UseDNS no
PidFile /dev/shm/sshd.pid
MaxStartups 100
"""
CLIENT = """
Host node*
  User root
  IdentityFile {folder}/user_key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ServerAliveInterval 3
  ServerAliveCountMax 3
"""
MPIRUN = ["mpirun", "-launcher", "ssh", "-hosts", "node0:1,node1:1", "-n", 2]
# Files are common to all hosts; this one is put over the machine's own, for a host alone.
SET_UP = """
mkdir -p /run/sshd
mount --bind "$1/ssh_config" /etc/ssh/ssh_config
exec "$2" -f "$1/sshd_config" -E "$1/sshd.$(hostname).log"
"""


def obstacle():
    for tool, package in (("ssh", "openssh-client"), ("ssh-keygen", "openssh-client")):
        if shutil.which(tool) is None:
            return f"the program {tool!r} is not installed (package {package})"
    if SSHD is None:
        return "the program 'sshd' is not installed (package openssh-server)"
    if shutil.which("pdsh") is None:
        return "the program 'pdsh' is not installed (package pdsh)"
    return EmulatedCluster.obstacle()


OBSTACLE, REASON = EmulatedCluster.obstacle(), obstacle()
BY_SSH = (pytest.mark.nightly, pytest.mark.skipif(REASON is not None, reason=str(REASON)))
pytestmark = pytest.mark.timeout(1800)


def over_ssh(test):
    """Mark a test that logs in to the hosts."""
    for mark in BY_SSH:
        test = mark(test)
    return test


def start(emulated, host, folder, *words, output=subprocess.PIPE):
    """Start a command of this environment on a host, in a folder."""
    chain = [*emulated.enter(host), "sh", "-c", 'cd "$0" && exec "$@"', str(folder)]
    return subprocess.Popen(
        [*chain, str(BIN / words[0]), *map(str, words[1:])],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        },
        start_new_session=True,
    )


def interrupt(process):
    """Send what Ctrl-C sends to a command that was started on a host."""
    (command,) = psutil.Process(process.pid).children()  # of nsenter
    command.send_signal(signal.SIGINT)


def ranks(emulated, host):
    """Return the numbers of processes on a host that run a script of the tests."""
    words = [*emulated.enter(host), "pgrep", "-f", "^[^ ]*python.*/programs/script.py"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.split()


class Cluster:
    """The hosts ``node0`` and ``node1``, and a hostfile that names them.

    Commands are run on ``node0``, as a person would who has logged in there.
    """

    def __init__(self, emulated, folder):
        self.emulated = emulated
        self.hostfile = folder / "hosts"
        self.hostfile.write_text("node0 slots=1\nnode1 slots=1\n")
        keys = ("user_key", "host_key")
        for key in keys:
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)]
            subprocess.run(words, check=True)
        for name, text in (("sshd_config", SERVER), ("ssh_config", CLIENT)):
            (folder / name).write_text(text.format(folder=folder))
        for host in (0, 1):
            words = [*emulated.enter(host), "sh", "-ec", SET_UP, "sh", str(folder), SSHD]
            subprocess.run(words, check=True)

    def run(self, folder, *words):
        """Run a command to its end; return its exit code and output."""
        process = start(self.emulated, 0, folder, *words)
        try:
            output, _ = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.terminate()
            pytest.fail(f"it does not end: {process.communicate()[0][-4000:]}")
        return process.returncode, output


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmulatedCluster(2) as emulated:
        yield Cluster(emulated, tmp_path_factory.mktemp("cluster"))


def words_of(launcher, cluster):
    """The beginning of the command, up to the script."""
    hosts = ["--hostfile", cluster.hostfile]
    if launcher == "launch":
        return ["wavemare", "launch", *hosts]
    if launcher == "mpirun":
        needed_mpi("MPICH")
        return [*MPIRUN, sys.executable, "-m", "mpi4py"]
    flavour = {"mpich": "MPICH", "openmpi": "Open MPI"}.get(launcher)
    if flavour is not None:
        needed_mpi(flavour)
    extra = ["--launcher_args", "--bind-to none"] if launcher == "openmpi" else []
    return ["deepspeed", *hosts, "--launcher", launcher, "--master_port", "29761", *extra]


LAUNCHERS = ["pdsh", "mpich", "openmpi", "launch", "mpirun"]


@over_ssh
@pytest.mark.world_size(2)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_script_runs_on_both_hosts(cluster, tmp_path, launcher):
    words = words_of(launcher, cluster)
    code, output = cluster.run(tmp_path, *words, PROGRAMS / "script.py", tmp_path)
    assert code == 0, output[-4000:]
    found = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["host"] for one in found] == ["node0", "node1"]
    assert {(one["MASTER_ADDR"], one["WORLD_SIZE"], one["LOCAL_RANK"]) for one in found} == {
        ("10.77.0.1", "2", "0")
    }


@over_ssh
@pytest.mark.world_size(2)
@pytest.mark.parametrize("end", ["raise", "kill"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_failure_on_another_host_is_no_success(cluster, tmp_path, launcher, end):
    words = words_of(launcher, cluster)
    code, output = cluster.run(tmp_path, *words, PROGRAMS / "script.py", tmp_path, end)
    assert code != 0, output[-4000:]
    if end == "raise":
        assert output.count(FAULT) == 1
    if end == "kill" and launcher == "launch":
        assert code == 137, output[-4000:]
        assert "memory ran out" in output.strip().splitlines()[-1]
    if end == "kill" and launcher == "mpich":
        # DeepSpeed's helper hides the number; the other rank may end its own first, by 15.
        assert "BAD TERMINATION" in output
    elif end == "kill" and "mpi" in launcher:
        assert "EXIT CODE: 9" in output or "signal 9" in output
    assert ranks(cluster.emulated, 0) == ranks(cluster.emulated, 1) == []


@over_ssh
@pytest.mark.world_size(2)
def test_ctrl_c_ends_the_ranks_on_both_hosts(cluster, tmp_path):
    words = words_of("launch", cluster)
    emulated = cluster.emulated
    process = start(emulated, 0, tmp_path, *words, PROGRAMS / "script.py", tmp_path, "wait")
    deadline = time.monotonic() + 600
    while len(list(tmp_path.glob("rank_*.pid"))) < 2:
        assert process.poll() is None, process.communicate()[0][-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert all(ranks(emulated, host) for host in (0, 1))
    interrupt(process)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 130, output[-4000:]
    deadline = time.monotonic() + 600
    while any(ranks(emulated, host) for host in (0, 1)):
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture(scope="module")
def on_one_host():
    """The losses there, by engine."""
    return {}


@over_ssh
@pytest.mark.world_size(2)
@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
@pytest.mark.parametrize("engine", ["pipemare", "sparse"])
def test_the_gpt_recipe_trains_on_both_hosts(
    cluster, on_one_host, tmp_path, small_options, recipe_config, engine, launcher
):
    """PipeMare and sparse data parallelism; the losses are those of the same run on one host."""
    config = recipe_config("gpt/pretrain", "zero" if engine == "sparse" else engine)
    if engine == "sparse":
        values = json.loads(config.read_text())
        values["wavemare"] = {"sparse_collective": {"mode": "auto"}}
        config = tmp_path / "sparse.json"
        config.write_text(json.dumps(values))
    words = ["wavemare", "train", "gpt", "--config", config]
    here, there = tmp_path / "here", tmp_path / "there"
    if launcher == "mpirun":
        needed_mpi("MPICH")
        across = [*MPIRUN, *words]
    else:
        across = [*words, "--hostfile", cluster.hostfile]
    code, output = cluster.run(tmp_path, *across, *small_options("gpt", there))
    assert code == 0, output[-6000:]
    if engine not in on_one_host:
        code, output = cluster.run(tmp_path, *words, *small_options("gpt", here))
        assert code == 0, output[-6000:]
        on_one_host[engine] = losses(here)
    assert losses(there) == pytest.approx(on_one_host[engine], rel=1e-5)
    assert losses(there)[-1] < losses(there)[0]
    assert (there / "model" / "model.safetensors").exists()


def losses(run):
    return [loss for _, loss in read_run(run).series("loss")]


CODES = '"$@"; code=$?; echo $code >"$0/code_$PMI_RANK"; exit $code'
ENGINES = {"torchrun": "pipemare", "mpirun": "1f1b", "pdsh": "data", "launch": "data"}


def start_to_cut(launcher, emulated, folder, log):
    """Start the program whose ranks lose each other; return the launcher's processes."""
    program = [FAULTS, folder, "cut", ENGINES[launcher], "--timeout", TIMEOUT_S]
    if launcher == "torchrun":
        meeting = ["--nnodes", 2, "--master-addr", "10.77.0.1", "--master-port", 29500]
        words = [["torchrun", *meeting, "--node-rank", n, *program] for n in (0, 1)]
        return [start(emulated, n, folder, *words[n], output=log) for n in (0, 1)]
    (folder / "cluster").mkdir()
    cluster = Cluster(emulated, folder / "cluster")
    if launcher == "mpirun":
        needed_mpi("MPICH")
        words = [*MPIRUN, "sh", "-c", CODES, folder, sys.executable, "-m", "mpi4py", *program]
    else:
        words = [*words_of(launcher, cluster), *program]
    return [start(emulated, 0, folder, *words, output=log)]


@pytest.mark.world_size(2)
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(
            "torchrun",
            marks=(
                pytest.mark.nightly,
                pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE)),
            ),
        ),
        *(pytest.param(launcher, marks=BY_SSH) for launcher in ("mpirun", "pdsh", "launch")),
    ],
)
def test_a_cut_link_ends_the_ranks_on_both_sides(tmp_path, launcher):
    """node0 prints a summary in time; that of node1 is lost unless a launcher runs there as well.

    MPICH's ``mpirun`` waits for the host that it cannot reach, when its ranks have ended: Ctrl-C.
    """
    log = tmp_path / "log"
    with EmulatedCluster(2) as emulated, log.open("w") as output:
        processes = start_to_cut(launcher, emulated, tmp_path, output)
        deadline = time.monotonic() + 600
        while not (tmp_path / "when").exists():
            assert not any(process.poll() for process in processes), log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        emulated.unplug(1)

        def wait_for(condition):
            deadline = time.monotonic() + 600
            while not condition():
                assert time.monotonic() < deadline, log.read_text()[-5000:]
                time.sleep(0.05)

        wait_for(lambda: "suspect: rank 1 (node1" in log.read_text())
        if launcher == "mpirun":
            files = [tmp_path / f"code_{rank}" for rank in (0, 1)]
            wait_for(lambda: all(f.exists() and f.read_text() == "124\n" for f in files))
            interrupt(processes[0])
        wait_for(lambda: all(each.poll() is not None for each in processes))
    codes = [process.returncode for process in processes]
    assert all(codes), codes
    assert len(list((tmp_path / "watchdog").glob("rank_*.txt"))) == 2
    assert "does not answer" in log.read_text()
    if launcher == "torchrun":
        assert "suspect: rank 0 (node0" in log.read_text()


@over_ssh
@pytest.mark.world_size(2)
def test_ranks_of_both_hosts_restart_after_a_death(cluster, tmp_path, small_options, recipe_config):
    config = recipe_config("gpt/pretrain", "zero")
    output = tmp_path / "run"
    words = ["wavemare", "train", "gpt", "--config", config, "--hostfile", cluster.hostfile]
    options = small_options("gpt", output, max_steps=12, save_interval=3, eval_interval=12)
    log = tmp_path / "log"
    with log.open("w") as stream:
        command = [*words, "--max-restarts", 2, *options]
        process = start(cluster.emulated, 0, tmp_path, *command, output=stream)

        def wait_for(condition):
            deadline = time.monotonic() + 600
            while not condition():
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.05)

        wait_for((output / "checkpoints" / "latest").exists)
        rank = ["pkill", "-KILL", "-f", "^[^ ]*python[^ ]* -u -m wavemare.recipes"]
        subprocess.run([*cluster.emulated.enter(1), *rank], check=True)
        process.wait(900)
    assert process.returncode == 0, log.read_text()[-6000:]
    assert "restart 1 of 2" in log.read_text()
    assert "resumed after step" in log.read_text()
