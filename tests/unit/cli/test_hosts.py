# SPDX-License-Identifier: Apache-2.0
"""Hosts seen from within: what is wrong with one is said of that one.

In the place of ssh stands a script that runs its command here, each host having an address of its
own in 127.0.0.0/8.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

from wavemare.cli.checks import hosts, peer
from wavemare.cli.checks.hostfile import Host

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
case $2 in
locked) echo 'locked: Permission denied (publickey).' >&2; exit 255 ;;
bare) echo "sh: python: not found" >&2; exit 127 ;;
broken) echo 'Traceback'; echo 'OSError: no such folder' >&2; exit 1 ;;
greeting) echo 'Welcome!' ;;
esac
export NODE=$2
exec sh -c "$3"
"""
# Read by the program, before its own functions, in the place of socket.gethostbyname.
FAKE = """
import socket as _socket
_addresses = {"node0": "127.0.0.10", "node1": "127.0.0.11", "greeting": "127.0.0.12"}
_socket.gethostbyname = lambda name: _addresses[__import__("os").environ["NODE"]]
"""


@pytest.fixture
def check(monkeypatch, tmp_path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    program = tmp_path / "peer.py"
    future, rest = peer.__doc__, open(peer.__file__).read()
    assert future
    program.write_text(rest.replace("import fcntl\n", f"import fcntl\n{FAKE}", 1))
    monkeypatch.setattr(hosts, "_PROGRAM", program)
    # The hosts' addresses are this host's own.
    monkeypatch.setattr(hosts, "_is_loopback", lambda address: address == "127.0.0.1")

    def run(*names, port=0):
        listed = [Host(name, 1, number) for number, name in enumerate(names, start=1)]
        return {f.check.removeprefix("host "): f for f in hosts.check_hosts(listed, port)}

    return run


def test_good_hosts_reach_each_other(check):
    found = check("node0", "greeting", "node1")
    assert [finding.status for finding in found.values()] == ["ok"] * 3
    value = found["greeting"].value
    assert value.startswith(f"127.0.0.12 by ssh: python {sys.version.split()[0]}, torch ")
    assert value.endswith(", connects to 2 others")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("locked", "ssh: locked: Permission denied (publickey).", "ssh-copy-id locked"),
        ("bare", f"it has no {sys.executable} (sh: python: not found)", "same environment"),
        ("broken", "OSError: no such folder", "Share"),
    ],
)
def test_a_bad_host_is_named_and_the_others_are_checked(check, name, value, remedy):
    found = check("node0", name, "node1")
    assert (found[name].status, found[name].value) == ("fail", value)
    assert remedy in found[name].remedy
    for other in ("node0", "node1"):
        assert found[other].status == "ok"
        assert "connects to 1 others" in found[other].value


def test_other_versions_are_told(check, monkeypatch):
    here = {**peer.versions(), "torch": "0.1", "deepspeed": "0.2"}
    monkeypatch.setattr(hosts.peer, "versions", lambda: here)
    finding = check("node0")["node0"]
    assert finding.status == "fail"
    assert "torch 2" in finding.value
    assert "(here 0.1), deepspeed" in finding.value


def test_a_port_in_use_matters_on_the_first_host(check):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        found = check("node0", "node1", port=port)
    assert found["node0"].value == f"port {port} cannot be had there (Address already in use)"
    assert found["node1"].status == "ok"


def test_a_loopback_address_is_of_no_use_to_others(check, monkeypatch):
    monkeypatch.setattr(hosts, "_is_loopback", lambda address: address == "127.0.0.11")
    found = check("node0", "node1")
    assert (found["node0"].status, found["node1"].status) == ("ok", "fail")
    assert "GLOO_SOCKET_IFNAME" in found["node1"].remedy
    assert check("node1")["node1"].status == "ok"  # alone it has nobody to reach


@pytest.mark.parametrize("answer", ['raise OSError("unknown")', 'return "192.0.2.7"'])
def test_a_host_alone_does_without_an_address_of_its_name(check, monkeypatch, tmp_path, answer):
    program = hosts._PROGRAM.read_text()
    fake = f"def _lookup(name):\n    {answer}\n_socket.gethostbyname = _lookup\n"
    program = program.replace("_addresses = ", f"{fake}_addresses = ", 1)
    program = program.replace("_socket.gethostbyname = lambda", "_ = lambda", 1)
    (tmp_path / "unnamed.py").write_text(program)
    monkeypatch.setattr(hosts, "_PROGRAM", tmp_path / "unnamed.py")
    assert check("node0")["node0"].value.startswith("127.0.0.1 by ssh: ")
    for finding in check("node0", "node1").values():
        assert finding.status == "fail"
        assert finding.value.startswith(f"its own name {socket.gethostname()} ")


def test_a_host_that_leaves_before_it_is_asked(check, monkeypatch, tmp_path):
    program = hosts._PROGRAM.read_text()
    program = program.replace(
        "    peers = {", "    os._exit(int('node1' in os.environ['NODE']))\n    peers = {"
    )
    (tmp_path / "leaving.py").write_text(program)
    monkeypatch.setattr(hosts, "_PROGRAM", tmp_path / "leaving.py")
    found = check("node0", "node1")
    assert [finding.status for finding in found.values()] == ["fail", "fail"]
    assert found["node1"].value == "it says nothing"


def test_an_interface_that_is_not_there(check, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    value = check("node0")["node0"].value
    assert value.startswith("there is no interface nosuch0 with an IPv4 address (it has lo")


def test_slow_hosts_are_given_up(check, monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "_SECONDS", 0.5)
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 60\n")
    assert "took longer than 0.5 s" in check("node0")["node0"].value


def test_who_does_not_answer_whom():
    """The program itself: one of its peers is a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))
        rows = [
            ["here", *there.getsockname()],
            ["gone", *shut.getsockname()],
        ]
        done = subprocess.run(
            [sys.executable, "-c", open(peer.__file__).read(), "lo", "0", "2"],
            input=json.dumps(rows) + "\n",
            capture_output=True,
            text=True,
            check=True,
        )
    told, answers = map(json.loads, done.stdout.splitlines())
    assert (told["address"], told["problem"]) == ("127.0.0.1", None)
    assert told["versions"] == peer.versions()
    assert answers == {"gone": "Connection refused"}
