# SPDX-License-Identifier: Apache-2.0
"""``wavemare doctor --hostfile``: a problem of a host is reported for that host.

In the place of ssh stands a script that runs its command here, where each host has a name and an
address of its own.
"""

import os
import socket
import sys
from importlib import metadata

import pytest

from wavemare.cli.doctor import check_hostfile

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
export NODE=$2 PYTHONPATH=${0%/*}
case $2 in
locked) echo 'locked: Permission denied (publickey).' >&2; exit 255 ;;
bare) echo "sh: python: not found" >&2; exit 127 ;;
broken) echo 'Traceback'; echo 'OSError: no such folder' >&2; exit 1 ;;
greeting) echo 'Welcome!' ;;
sleeping) exec sleep 600 ;;
esac
exec sh -c "$3"
"""
# Python runs it at its start.
NETWORK = """
import os, socket
names = {"node0": "192.0.2.10", "greeting": "192.0.2.12", "loopback": "127.0.0.14"}

def lookup(name):
    if os.environ["NODE"] == "unnamed":
        raise OSError("unknown")
    return names[os.environ["NODE"]]

socket.gethostbyname = lookup
"""


@pytest.fixture
def check(monkeypatch, tmp_path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "pdsh").symlink_to("ssh")
    (tmp_path / "sitecustomize.py").write_text(NETWORK)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def run(*names, **options):
        (tmp_path / "hosts").write_text("".join(f"{name} slots=2\n" for name in names))
        summary, *findings = check_hostfile(tmp_path / "hosts", **options)
        assert summary.value.endswith(f": {len(names)} hosts, {2 * len(names)} ranks")
        return {finding.check.removeprefix("host "): finding for finding in findings}

    return run


def test_good_hosts(check):
    found = check("node0", "greeting")
    assert [finding.status for finding in found.values()] == ["ok", "ok"]
    start = f"192.0.2.12 by ssh: python {sys.version.split()[0]}, torch "
    assert found["greeting"].value.startswith(start)


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("locked", "ssh: locked: Permission denied (publickey).", "ssh-copy-id locked"),
        ("bare", f"it has no {sys.executable} (sh: python: not found)", "same environment"),
        ("broken", "OSError: no such folder", "Share"),
        ("loopback", "its own name leads to 127.0.0.14, where no", "GLOO_SOCKET_IFNAME"),
        ("unnamed", "its own name is unknown", "GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_bad_host_is_named_and_the_others_are_checked(check, name, value, remedy):
    found = check("node0", name)
    assert (found[name].status, found["node0"].status) == ("fail", "ok")
    assert found[name].value.startswith(value)
    assert remedy in found[name].remedy


def test_other_versions_are_told(check, monkeypatch):
    here, real = {"torch": "0.1", "deepspeed": "0.2"}, metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: here.get(name) or real(name))
    finding = check("node0")["node0"]
    assert finding.status == "fail"
    assert "torch 2" in finding.value
    assert "(here 0.1), deepspeed" in finding.value


@pytest.mark.parametrize(("interface", "status"), [("lo", "ok"), ("nosuch0", "fail")])
def test_the_chosen_interface_must_exist(check, monkeypatch, interface, status):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert check("node0", "loopback")["loopback"].status == status


def test_slow_hosts_are_given_up(check):
    assert "took longer than 0.5 s" in check("sleeping", limit_s=0.5)["sleeping"].value


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", socket.gethostname()])
def test_this_host_alone_needs_no_ssh_and_no_pdsh(check, monkeypatch, tmp_path, name):
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert check(name)[name].value == "this host: ranks are started without ssh"
    missing = {other: finding.status for other, finding in check("node0").items()}
    assert missing == {"pdsh": "warn", "ssh": "fail"}


def test_a_hostfile_that_cannot_be_used(tmp_path):
    (missing,) = check_hostfile(tmp_path / "hosts")
    assert (missing.status, "cannot be read" in missing.value) == ("fail", True)
    (tmp_path / "hosts").write_text("node0 slots=1\nnode1\n")
    (wrong,) = check_hostfile(tmp_path / "hosts")
    assert "line 2: 'node1' is not a host with its slots" in wrong.value
