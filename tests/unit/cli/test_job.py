# SPDX-License-Identifier: Apache-2.0
"""``wavemare launch``: the commands it makes of its options, and what it refuses."""

import ast
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.refusals import refuses
from wavemare.cli import app, job, launch
from wavemare.cli.job import Host, Job
from wavemare.errors import LaunchError

HOSTS = (Host("node0", 2), Host("node1", 1))


@pytest.fixture
def machine(monkeypatch):
    """Pretend DeepSpeed's launcher, a free port, and an environment of few variables."""
    monkeypatch.setattr(launch, "extra_environment", lambda: {"OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(launch, "find_deepspeed", lambda: "/bin/deepspeed")
    monkeypatch.setattr(job, "free_port", lambda: 4321)
    monkeypatch.setattr(job.os, "environ", {"HOME": "/root"})


@pytest.mark.usefixtures("machine")
def test_deepspeed_on_hosts_counts_their_slots(tmp_path):
    file = tmp_path / "hosts"
    command = Job(program="x.py", hosts=HOSTS, hostfile=file).command()
    assert command == [
        *("/bin/deepspeed", "--master_port", "4321", "--log_level", "critical"),
        *("--no_local_rank", "--hostfile", str(file), "x.py"),
    ]
    # A host alone is not this one.
    command = Job(program="x.py", hosts=HOSTS[:1], hostfile=file, num_processes=2).command()
    assert command[1:3] == ["--num_accelerators", "2"]
    assert command[-2:] == ["--force_multi", "x.py"]
    # DeepSpeed would log in to this one.
    command = Job(program="x.py", hosts=(Host("localhost", 2),), hostfile=file).command()
    assert command[-4:] == ["--no_ssh_check", "--master_addr", "127.0.0.1", "x.py"]


@pytest.fixture
def exported(machine, monkeypatch, tmp_path):
    """Return the lines of the file by which DeepSpeed gives variables to other hosts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job.Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(job.shutil, "which", lambda name: f"/bin/{name}")

    def run(**variables):
        lines = []

        def read(commands, max_restarts):
            (command,) = commands(max_restarts)
            assert command.variables["OMP_NUM_THREADS"] == "1"
            text = Path(command.variables["DS_ENV_FILE"]).read_text("utf-8", "surrogateescape")
            lines.extend(text.splitlines())
            return 5

        monkeypatch.setattr(job, "supervise", read)
        monkeypatch.setattr(job.os, "environ", {"HOME": "/root", **variables})
        assert Job(program="x.py", hosts=HOSTS, hostfile=tmp_path / "hosts").run() == 5
        return lines

    return run


@pytest.mark.usefixtures("machine")
def test_other_hosts_need_ssh_and_pdsh(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with refuses(LaunchError, "--hostfile", str(tmp_path / "hosts")):
        Job(program="x.py", hosts=HOSTS, hostfile=tmp_path / "hosts").run()


def test_variables_reach_other_hosts_by_a_file(exported, tmp_path):
    (tmp_path / ".deepspeed_env").write_bytes(b"\xef\xbb\xbfGLOO_SOCKET_IFNAME=eth7\n\nHF_A=\xe9\n")
    # The last one wins: the user's.
    assert exported(GLOO_SOCKET_IFNAME="eth0", NCCL_DEBUG="1\n2", HF_HOME="/a=b") == [
        "GLOO_SOCKET_IFNAME=eth0",
        "HF_HOME=/a=b",
        "OMP_NUM_THREADS=1",
        "TORCHELASTIC_RESTART_COUNT=0",
        "GLOO_SOCKET_IFNAME=eth7",
        "HF_A=\udce9",
    ]


ODD = ["a b", '{"a": 1}', '{"a":1}', "$HOME `id` \\", "$HOME", "it's", "x;y", "*", "", "%n", "100%"]


def test_words_and_values_reach_other_hosts_as_they_are(exported, tmp_path):
    """DeepSpeed's own part makes one text of them, which a shell reads on each host."""
    from deepspeed.launcher.multinode_runner import PDSHRunner

    lines = exported(**{f"WAVEMARE_{n}": value for n, value in enumerate(ODD)})
    made = Job(program="a b.py", options=ODD, hosts=HOSTS, hostfile=tmp_path / "hosts").command()
    start = made.index(str(tmp_path / "hosts")) + 1
    options = {"launcher_args": "", "ssh_port": None, "user_script": made[start]}
    given = defaultdict(lambda: None, options, user_args=made[start + 1 :])
    runner = PDSHRunner(type("Given", (), {"__getattr__": lambda _, n: given[n]})(), "")
    for line in lines:
        runner.add_export(*line.split("=", maxsplit=1))
    words, _, _ = runner.get_cmd({}, {"node0": [0]})
    exports = next(word for word in words if word.startswith("export "))
    shown = (
        "import os, sys; print([sys.argv[1:], [os.environ[f'WAVEMARE_{n}'] for n in range(11)]])"
    )
    program = [sys.executable, "-c", shlex.quote(shown), *words[-len(ODD) - 1 :]]
    # As pdsh does before it hands the text to ssh.
    text = re.sub(
        "%(.)",
        lambda found: {"n": "7", "%": "%"}.get(found[1], found[0]),
        exports + " ".join(program),
    )
    done = subprocess.run(["sh", "-c", text], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [["a b.py", *ODD], ODD]


@pytest.mark.usefixtures("machine")
def test_options_after_the_script_are_its_own():
    arguments = ["launch", "--nproc", "3", "--print-command", "x.py", "--nproc", "9", "-m"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shlex.split(result.stdout) == [
        *("OMP_NUM_THREADS=1", "/bin/deepspeed", "--num_accelerators", "3"),
        *("--master_port", "4321", "--log_level", "critical", "--no_local_rank"),
        *("x.py", "--nproc", "9", "-m"),
    ]


@pytest.mark.usefixtures("machine")
def test_the_port_of_the_environment_is_used(monkeypatch):
    def port(given, *options):
        monkeypatch.setattr(job.os, "environ", {"MASTER_PORT": given})
        command = Job(program="x.py", launcher_options=options).command()
        return [after for word, after in pairwise(command) if word == "--master_port"]

    assert port("1234") == ["1234"]
    assert port("") == ["4321"]
    assert port("1234", "--master_port", "7") == ["7"]
    for wrong in ("x", "0", "65536", "-1", "9" * 5000):
        with refuses(LaunchError, "MASTER_PORT", wrong):
            port(wrong)
