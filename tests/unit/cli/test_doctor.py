# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor``: every check in its good and its bad state."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
from packaging.specifiers import SpecifierSet
from typer.testing import CliRunner

from wavemare.cli import app
from wavemare.cli.doctor import Finding
from wavemare.cli.job import Host, parse_hostfile
from wavemare.comm.mpi_library import MpiInfo

doctor = sys.modules["wavemare.cli.doctor"]  # the package's name is the function


def only(findings):
    (finding,) = findings
    return finding


def fake(monkeypatch, *findings):
    monkeypatch.setattr(doctor, "diagnose", lambda hostfile: findings)


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_exit_code_and_json(monkeypatch, status, code):
    fake(monkeypatch, Finding("check", status, "value", "remedy"))
    assert f"1 {status}" in CliRunner().invoke(app, ["doctor"]).stdout.splitlines()[-1]
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.stdout) == [
        {"check": "check", "status": status, "value": "value", "remedy": "remedy"}
    ]


def test_this_environment_has_no_failure():
    failures = [f for f in doctor.diagnose() if f.status == "fail"]
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
    finding = doctor.check_version(name, SpecifierSet(wanted))
    assert (finding.status, finding.remedy) == (status, remedy)


def test_mpi_states():
    none = only(doctor.check_mpi(MpiInfo(problem="cannot load MPI library")))
    assert (none.status, "cannot load MPI library" in none.value) == ("ok", True)
    known = {"flavour": "MPICH", "version": "5.0.2", "thread_level": "multiple"}
    good = only(doctor.check_mpi(MpiInfo(**known, cuda_aware=False)))
    assert good == Finding("MPI", "ok", "MPICH 5.0.2, threads: multiple, not CUDA-aware")
    slow = only(doctor.check_mpi(MpiInfo(**known, problem="it took longer than 20 s")))
    assert (slow.status, "CUDA support unknown" in slow.value) == ("warn", True)
    mixed = MpiInfo(**known, launcher="/usr/bin/mpirun", launcher_flavour="Open MPI")
    finding = list(doctor.check_mpi(mixed))[1]
    assert finding.status == "fail"
    assert "/usr/bin/mpirun is Open MPI's, but mpi4py loads MPICH" in finding.value
    assert "PATH" in finding.remedy


INTERFACES = [(1, "lo"), (2, "ens5")]


@pytest.mark.parametrize(
    ("chosen", "address", "check", "status"),
    [
        (None, "10.0.0.7", "host name", "ok"),
        (None, "127.0.1.1", "host name", "warn"),
        (None, None, "host name", "warn"),
        ("ens5", None, "GLOO_SOCKET_IFNAME", "ok"),
        ("ens", None, "GLOO_SOCKET_IFNAME", "fail"),
    ],
)
def test_network(monkeypatch, chosen, address, check, status):
    def lookup(name):
        if address is None:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if chosen:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: INTERFACES)
    monkeypatch.setattr(doctor.socket, "gethostbyname", lookup)
    finding = only(doctor.check_network())
    assert (finding.check, finding.status) == (check, status)
    assert ("GLOO_SOCKET_IFNAME" in finding.remedy) is (status != "ok")


def test_a_lock_of_a_build_is_named_with_the_command_that_removes_it(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert only(doctor.check_extension_locks()).status == "ok"
    lock = tmp_path / "py311_cpu" / "my op" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - 7200, time.time() - 7200))
    finding = only(doctor.check_extension_locks())
    assert (finding.status, "2:00:00 old" in finding.value) == ("warn", True)
    subprocess.run(finding.remedy.partition(": ")[2], shell=True, check=True)
    assert only(doctor.check_extension_locks()).status == "ok"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert only(doctor.check_extension_locks()).value == f"none in {tmp_path}/torch_extensions"


def test_hostfile_is_read_as_deepspeed_reads_it():
    from deepspeed.launcher import runner

    text = "# cluster\n\nnode0 slots=4\n  node1   slots=2  \n"
    hosts = parse_hostfile(text)
    # DeepSpeed offers no public way to read it.
    assert {host.name: host.slots for host in hosts} == runner._parse_hostfile(text.splitlines())
    assert hosts == [Host("node0", 4), Host("node1", 2)]


def test_a_hostfile_is_checked(monkeypatch, tmp_path):
    def check(text=None):
        file = tmp_path / "hosts"
        if text is not None:
            file.write_text(text)
        return {finding.check: finding for finding in doctor.check_hostfile(file)}

    assert check()["hostfile"].status == "fail"
    assert "line 2: 'node1'" in check("node0 slots=1\nnode1\n")["hostfile"].value
    for name in ("ssh", "pdsh"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    text = "node0 slots=2\nnode1 slots=2\n"
    assert [finding.status for finding in check(text).values()] == ["ok"] * 3
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert [finding.status for finding in check(text).values()] == ["ok", "fail", "warn"]


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_alone_needs_no_ssh_and_no_pdsh(monkeypatch, tmp_path, name):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "hosts").write_text(f"{name} slots=2\n")
    findings = list(doctor.check_hostfile(tmp_path / "hosts"))
    assert [(finding.check, finding.status) for finding in findings] == [
        ("hostfile", "ok"),
        (f"host {name}", "ok"),
    ]
