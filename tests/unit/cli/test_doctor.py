# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor``: every check in its good and its bad state."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.cli.checks import hostfile, machine, mpi, network, software
from wavemare.cli.checks.finding import Finding
from wavemare.comm.mpi_library import MpiInfo

doctor = sys.modules["wavemare.cli.doctor"]  # the package's name is the function


def only(findings):
    (finding,) = findings
    return finding


def fake(monkeypatch, *findings):
    monkeypatch.setattr(doctor, "diagnose", lambda hostfile, master_port: list(findings))


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, status, code):
    fake(monkeypatch, Finding("check", status, "value", "remedy"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout) == [
        {"check": "check", "status": status, "value": "value", "remedy": "remedy"}
    ]


def test_table_takes_text_literally(monkeypatch):
    remedy = 'pip install "wavemare[mpi]"'
    fake(monkeypatch, Finding("host [b]a[/b]", "fail", "value", remedy))
    result = CliRunner().invoke(app, ["doctor"])
    for text in ("host [b]a[/b]", f"-> {remedy}", "0 ok, 0 warnings, 1 failures"):
        assert text in result.stdout


def test_this_environment_has_no_failure():
    failures = [f for f in doctor.diagnose() if f.status == "fail" and f.check != "extension locks"]
    assert failures == []


@pytest.mark.parametrize(
    ("name", "wanted", "status", "remedy"),
    [
        ("rich", ">=1", "ok", ""),
        ("rich", ">=999", "fail", 'pip install "rich>=999"'),
        ("no-such-package", ">=1", "fail", 'pip install "no-such-package>=1"'),
    ],
)
def test_versions(name, wanted, status, remedy):
    finding = software.check_version(name, SpecifierSet(wanted))
    assert (finding.status, finding.remedy) == (status, remedy)


def test_a_local_build_counts_as_its_version(monkeypatch):
    monkeypatch.setattr(software.metadata, "version", lambda name: "2.13.0+cpu")
    assert software.check_version("torch", SpecifierSet(">=2.13")).status == "ok"
    assert software.check_version("torch", SpecifierSet(">2.13")).status == "fail"


def test_mpi_states():
    none = only(mpi.check_mpi(MpiInfo(problem="cannot load MPI library")))
    assert (none.status, "cannot load MPI library" in none.value) == ("ok", True)
    known = {"mpi4py": "4.1", "flavour": "MPICH", "version": "5.0.2", "thread_level": "multiple"}
    good = only(mpi.check_mpi(MpiInfo(**known, cuda_aware=False)))
    assert good == Finding("MPI", "ok", "MPICH 5.0.2, threads: multiple, not CUDA-aware")
    slow = only(mpi.check_mpi(MpiInfo(**known, problem="it took longer than 20 s")))
    assert (slow.status, "CUDA support unknown" in slow.value) == ("warn", True)
    mixed = MpiInfo(**known, launcher="/usr/bin/mpirun", launcher_flavour="Open MPI")
    finding = list(mpi.check_mpi(mixed))[1]
    assert finding.status == "fail"
    assert "/usr/bin/mpirun is Open MPI's, but mpi4py loads MPICH" in finding.value
    assert "PATH" in finding.remedy


def make_lock(folder, *, age):
    lock = folder / "py311_cpu" / "my op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age, time.time() - age))
    return lock


def test_stale_lock_names_the_command_that_removes_it(tmp_path):
    lock = make_lock(tmp_path, age=7200)
    finding = only(machine.check_extension_locks(tmp_path))
    assert finding.status == "fail"
    assert "2h 00m old" in finding.value
    subprocess.run(finding.remedy, shell=True, check=True)
    assert not lock.exists()
    assert only(machine.check_extension_locks(tmp_path)).status == "ok"
    assert only(machine.check_extension_locks(tmp_path / "missing")).status == "ok"


def test_lock_that_may_have_a_builder_is_left_alone(tmp_path):
    make_lock(tmp_path / "young", age=5)
    assert only(machine.check_extension_locks(tmp_path / "young")).status == "warn"
    lock = make_lock(tmp_path, age=7200)
    with subprocess.Popen(["sleep", "600"], cwd=lock.parent) as builder:
        assert only(machine.check_extension_locks(tmp_path)).status == "warn"
        builder.kill()
    assert only(machine.check_extension_locks(tmp_path)).status == "fail"


def test_extensions_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert machine.extensions_folder() == tmp_path
    make_lock(tmp_path, age=7200)
    assert only(machine.check_extension_locks()).status == "fail"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert machine.extensions_folder() == tmp_path / "torch_extensions"


@pytest.mark.parametrize(("free", "status"), [(2**20, "warn"), (2**40, "ok")])
def test_shared_memory(monkeypatch, tmp_path, free, status):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert only(machine.check_shared_memory(tmp_path)).status == status
    assert only(machine.check_shared_memory(tmp_path / "missing")).status == "warn"


@pytest.mark.parametrize(
    ("limits", "status", "remedy"),
    [((256, 4096), "warn", "ulimit -n 4096"), ((1024, 1024), "ok", ""), ((-1, -1), "ok", "")],
)
def test_descriptors(monkeypatch, limits, status, remedy):
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: limits)
    finding = only(machine.check_descriptors())
    assert (finding.status, finding.remedy) == (status, remedy)


ROUTES = """Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT
docker0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0
ens5 00000000 0100000A 0003 0 0 0 00000000 0 0 0
"""


@pytest.mark.parametrize(("address", "status"), [("127.0.1.1", "warn"), ("10.0.0.7", "ok")])
def test_host_name(monkeypatch, tmp_path, address, status):
    assert network.default_interface(tmp_path / "route") is None
    (tmp_path / "route").write_text(ROUTES)
    monkeypatch.setattr(network.socket, "gethostbyname", lambda name: address)
    finding = only(network.check_hostname(tmp_path / "route"))
    assert finding.status == status
    assert ("GLOO_SOCKET_IFNAME=ens5" in finding.remedy) is (status == "warn")


def test_host_name_that_resolves_slowly_or_not(monkeypatch, tmp_path):
    ended = threading.Event()
    monkeypatch.setattr(network.socket, "gethostbyname", lambda name: ended.wait())
    slow = only(network.check_hostname(tmp_path / "none", limit_s=0.05))
    ended.set()
    assert (slow.status, "longer than 0.05 s" in slow.value) == ("warn", True)

    def refuse(name):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network.socket, "gethostbyname", refuse)
    assert "/etc/hosts" in only(network.check_hostname(tmp_path / "none")).remedy


@pytest.mark.parametrize(
    ("variable", "value", "status"),
    [
        ("GLOO_SOCKET_IFNAME", "lo", "ok"),
        ("GLOO_SOCKET_IFNAME", "l", "fail"),
        ("NCCL_SOCKET_IFNAME", "l", "ok"),
        ("NCCL_SOCKET_IFNAME", "=l", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok"),
        ("NCCL_SOCKET_IFNAME", "nosuch0,lo", "fail"),
    ],
)
def test_interface_variables(monkeypatch, variable, value, status):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert list(network.check_interface_variables()) == []
    monkeypatch.setenv(variable, value)
    finding = only(network.check_interface_variables())
    assert (finding.check, finding.status) == (variable, status)


def test_hostfile_is_read_as_deepspeed_reads_it():
    from deepspeed.launcher import runner

    text = "# cluster\n\nnode0 slots=4\n  node1   slots=2  \n"
    hosts, findings = hostfile.parse_hostfile(text)
    # DeepSpeed offers no public way to read it.
    assert {host.name: host.slots for host in hosts} == runner._parse_hostfile(text.splitlines())
    assert findings == []
    assert [host.line for host in hosts] == [3, 4]


def test_hostfile_problems_name_the_line():
    hosts, findings = hostfile.parse_hostfile("node0 slots=2\nnode1\nnode2 slots=1 max=2\n")
    assert [host.name for host in hosts] == ["node0"]
    assert [finding.status for finding in findings] == ["fail", "fail"]
    assert "line 2: 'node1' is not a host with its slots" in findings[0].value
    assert "line 3: 'max=2' is passed over" in findings[1].value
    assert all(finding.remedy for finding in findings)


def test_hostfile_without_hosts(tmp_path):
    finding = only(hostfile.check_hostfile(tmp_path / "hosts"))
    assert finding.status == "fail"
    assert "deepspeed would use this host alone" in finding.value
    (tmp_path / "hosts").write_text("# nobody\n")
    assert only(hostfile.check_hostfile(tmp_path / "hosts")).value == "it names no host"


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_alone_needs_no_ssh(monkeypatch, tmp_path, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert list(hostfile.check_hostfile(tmp_path / "hosts", port))[1].status == "fail"
    assert list(hostfile.check_hostfile(tmp_path / "hosts", port))[1].status == "ok"


@pytest.fixture
def ssh_config(monkeypatch, tmp_path):
    """Return the user's configuration of ssh, which ssh reads from elsewhere."""
    real = shutil.which("ssh")
    if real is None:
        pytest.skip("the program 'ssh' is not installed (package openssh-client)")
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {real} -F {tmp_path}/config "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    return tmp_path / "config"


def test_each_host_is_asked_where_ssh_would(ssh_config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        good, shut = server.getsockname()[1], closed.getsockname()[1]
        ssh_config.write_text(
            "Host inner\n  ProxyJump gate\nHost piped\n  ProxyCommand nc %h %p\n"
            f"Host good\n  HostName 127.0.0.1\n  Port {good}\n"
            f"Host shut\n  HostName 127.0.0.1\n  Port {shut}\n"
            "Host gone\n  HostName no-such-host.invalid\n"
        )
        names = ("good", "shut", "gone", "inner", "piped")
        (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
        summary, *hosts = hostfile.check_hostfile(tmp_path / "hosts")
    assert summary.value.endswith("5 hosts, 10 ranks")
    states = ("ok", "fail", "fail", "ok", "ok")
    found = [(host.check, host.status) for host in hosts]
    assert found == [(f"host {name}", state) for name, state in zip(names, states, strict=True)]
    assert hosts[0].value == f"127.0.0.1, ssh answers on port {good}"
    assert "ssh shut hostname" in hosts[1].remedy
    assert "line 3 of the hostfile" in hosts[2].remedy
    assert hosts[3].value == hosts[4].value == "ssh goes through another host"
