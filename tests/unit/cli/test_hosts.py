# SPDX-License-Identifier: Apache-2.0
"""Hosts seen from within: what is wrong with one is said of that one.

In the place of ssh stands a script that runs its command here. To Python each host has an address
of its own in 192.0.2.0/24, which leads to one in 127.0.0.0/8.
"""

import json
import os
import socket
import subprocess
import sys

import pytest

from wavemare.cli.checks import peer
from wavemare.cli.checks.hostfile import Host
from wavemare.cli.checks.hosts import check_hosts

SSH = """#!/bin/sh
while [ "$1" != -- ]; do shift; done
export NODE=$2 PYTHONPATH=${0%/*}
case $2 in
locked) echo 'locked: Permission denied (publickey).' >&2; exit 255 ;;
bare) echo "sh: python: not found" >&2; exit 127 ;;
broken) echo 'Traceback'; echo 'OSError: no such folder' >&2; exit 1 ;;
greeting) echo 'Welcome!' ;;
leaving) sh -c "$3" 2>/dev/null | head -n 1; exit 1 ;;
sleeping) exec sleep 600 ;;
esac
exec sh -c "$3"
"""
# Python runs it at its start.
NETWORK = """
import os, socket
node = os.environ["NODE"]
names = {"node0": "192.0.2.10", "node1": "192.0.2.11", "greeting": "192.0.2.12",
         "leaving": "192.0.2.13", "loopback": "127.0.0.14", "foreign": "198.51.100.7"}
create_server, create_connection = socket.create_server, socket.create_connection

def here(address):
    return address[0].replace("192.0.2.", "127.0.0."), address[1]

def lookup(name):
    if node == "unnamed":
        raise OSError("unknown")
    return names[node]

socket.gethostbyname = lookup
socket.create_server = lambda address, **options: create_server(here(address), **options)
socket.create_connection = lambda address, **options: create_connection(here(address), **options)
"""


@pytest.fixture
def check(monkeypatch, tmp_path):
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    (tmp_path / "sitecustomize.py").write_text(NETWORK)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def run(*names, **options):
        listed = [Host(name, 1, number) for number, name in enumerate(names, start=1)]
        return {f.check.removeprefix("host "): f for f in check_hosts(listed, **options)}

    return run


def test_good_hosts_reach_each_other(check):
    found = check("node0", "greeting", "node1")
    assert [finding.status for finding in found.values()] == ["ok"] * 3
    value = found["greeting"].value
    assert value.startswith(f"192.0.2.12 by ssh: python {sys.version.split()[0]}, torch ")
    assert value.endswith(", connects to 2 others")


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("locked", "ssh: locked: Permission denied (publickey).", "ssh-copy-id locked"),
        ("bare", f"it has no {sys.executable} (sh: python: not found)", "same environment"),
        ("broken", "OSError: no such folder", "Share"),
        (
            "loopback",
            "to itself it is 127.0.0.14, where no other host reaches it",
            "GLOO_SOCKET_IFNAME",
        ),
        ("unnamed", f"its own name {socket.gethostname()} does not resolve there", "Free the port"),
        (
            "foreign",
            f"its own name {socket.gethostname()} leads to 198.51.100.7, which is no address of it",
            "Free the port",
        ),
    ],
)
def test_a_bad_host_is_named_and_the_others_are_checked(check, name, value, remedy):
    found = check("node0", name, "node1")
    assert (found[name].status, found[name].value) == ("fail", value)
    assert remedy in found[name].remedy
    for other in ("node0", "node1"):
        assert found[other].status == "ok"
        assert "connects to 1 others" in found[other].value


@pytest.mark.parametrize(
    ("name", "address"),
    [("loopback", "127.0.0.14"), ("unnamed", "127.0.0.1"), ("foreign", "127.0.0.1")],
)
def test_a_host_alone_needs_no_address_for_others(check, name, address):
    assert check(name)[name].value.startswith(f"{address} by ssh: ")


def test_other_versions_are_told(check, monkeypatch):
    here = {**peer.versions(), "torch": "0.1", "deepspeed": "0.2"}
    monkeypatch.setattr(peer, "versions", lambda: here)
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


def test_a_host_that_leaves_while_it_is_asked(check):
    finding = check("node0", "leaving")["leaving"]
    assert (finding.status, finding.value) == ("fail", "it says nothing")


def test_an_interface_that_is_not_there(check, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    value = check("node0")["node0"].value
    assert value.startswith("there is no interface nosuch0 with an IPv4 address (it has lo")


def test_slow_hosts_are_given_up(check):
    assert "took longer than 0.5 s" in check("sleeping", limit_s=0.5)["sleeping"].value


def test_who_does_not_answer_whom():
    """The program itself: one of its peers is a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.socket() as shut:
        shut.bind(("127.0.0.1", 0))
        rows = [["here", *there.getsockname()], ["gone", *shut.getsockname()]]
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
