# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: real kills, a lighthouse that is gone, replicas that do not fit.

``make test-elastic`` installs torchft and runs these tests. Each replica is a job of its own.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft"),
]

PROGRAM = Path(__file__).parent / "programs" / "elastic.py"
LIMIT_S = 300
STEPS = 200
WAITS = {"steps": STEPS, "patience": 0.5}
"""Steps that are slow while a replica is away, so that it comes back before the last one."""
STREAM = {"every": 4, "fragments": 2, "overlap": 1}


def elastic(replicas, **keys):
    return {"elastic": {"replicas": replicas, "timeout_s": 20, "start_s": 120, **keys}}


class Run:
    """A job under ``wavemare launch``, and what its ranks have written."""

    def __init__(self, folder, options, settings):
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "log"
        words = [sys.executable, "-m", "wavemare", "launch", *options, str(PROGRAM), str(folder)]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen([*words, json.dumps(settings)], stdout=log, stderr=log)

    def wait(self, code=0):
        found = self.process.wait(LIMIT_S)
        assert found == code, self.said
        return self

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    def rows(self, rank):
        """Return what a rank has written, of all its attempts."""
        file = self.folder / f"{rank}.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self, rank):
        return [row for row in self.rows(rank) if "step" in row]

    def digests(self, ranks):
        return {row["digest"] for rank in range(ranks) for row in self.rows(rank)[-1:]}

    def pids(self, replica):
        """Return the processes of a replica's ranks."""
        found = []
        for process in psutil.Process(self.process.pid).children():
            environment = process.environ()
            if environment.get("WAVEMARE_REPLICA") == str(replica) and "RANK" in environment:
                found.append(process.pid)
        return found

    def until(self, step, rank):
        """Wait until a rank has made a step."""
        deadline = time.monotonic() + LIMIT_S
        while not any(row["step"] >= step for row in self.steps(rank)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)


@pytest.fixture
def start(tmp_path):
    """Start replicas of a rank each, unless a number says otherwise; none is left at the end."""
    runs = []

    def run(replicas, settings, *options, ranks=1, name="run"):
        local = {**elastic(replicas), **settings.pop("local", {})}
        words = ["--replicas", str(replicas), "--nproc", str(ranks), *options]
        runs.append(Run(tmp_path / name, words, {"steps": 14, "local": local, **settings}))
        return runs[-1]

    yield run
    for one in runs:
        if one.process.poll() is None:
            family = psutil.Process(one.process.pid).children(recursive=True)
            for process in [one.process, *family]:
                process.kill()
        one.process.wait()


def fixed(tmp_path, ranks, settings, name="fixed"):
    """Run the same replicas as ranks of one job."""
    return Run(tmp_path / name, ["--nproc", str(ranks)], {"steps": 14, **settings}).wait()


def twin_of(folder, **settings):
    """Return the losses of three replicas in one process, of which some are gone after a step."""
    program = PROGRAM.with_name("elastic_twin.py")
    words = [sys.executable, program, folder, json.dumps(settings)]
    subprocess.run(words, check=True, timeout=LIMIT_S)
    return json.loads((folder / "twin.json").read_text())


def losses(run, rank):
    return [[row["step"], row["loss"], row["at"]] for row in run.steps(rank)]


@pytest.mark.world_size(3)
@pytest.mark.parametrize("zero", [0, 1])
def test_without_failures_it_is_the_fixed_run_bit_for_bit(start, tmp_path, zero):
    run = start(3, {"local": {**STREAM, **elastic(3)}, "zero": zero}).wait()
    twin = fixed(tmp_path, 3, {"local": {**STREAM, "replica": "rank"}, "zero": zero})
    for rank in range(3):
        assert losses(run, rank) == losses(twin, rank)
        assert {row["replicas"] for row in run.steps(rank) if "replicas" in row} == {3.0}
    assert len(run.digests(3) | twin.digests(3)) == 1


@pytest.mark.world_size(4)
def test_replicas_of_two_ranks_are_the_fixed_run_bit_for_bit(start, tmp_path):
    run = start(2, {"local": {**STREAM, **elastic(2)}, "zero": 1}, ranks=2).wait()
    twin = fixed(tmp_path, 4, {"local": {**STREAM, "replica": 2}, "zero": 1})
    for rank in range(4):
        assert losses(run, rank) == losses(twin, rank)
    assert len(run.digests(4) | twin.digests(4)) == 1


@pytest.mark.world_size(3)
def test_a_killed_replica_costs_an_exchange_and_comes_back(start):
    """The others never stop; it takes their weights, their step and its place in the data."""
    run = start(3, {"events": {"1": {"11": "kill"}}, **WAITS}).wait()
    for rank in (0, 2):
        rows = run.steps(rank)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert {row["attempt"] for row in rows} == {0}
        present = [row["replicas"] for row in rows if "replicas" in row]
        assert present[0] == present[-1] == 3.0
        assert 2.0 in present
        assert max(row.get("missed_exchanges", 0) for row in rows) <= 1
    first, second = ([r for r in run.steps(1) if r["attempt"] == n] for n in (0, 1))
    assert [row["step"] for row in first] == list(range(1, 11))
    begun = second[0]["step"]
    assert begun % 4 == 1  # after an exchange
    assert [row["step"] for row in second] == list(range(begun, STEPS + 1))
    samples = second[0]["at"] // second[0]["step"]
    for row in [*first, *second]:  # no other replica reads what it reads
        assert row["at"] == samples * row["step"]
    assert len(run.digests(3)) == 1
    # Until the exchange in which its change counts again, the others train as a slow twin does.
    twin = twin_of(run.folder, steps=begun + 3, gone={"1": 10})
    for rank in (0, 1, 2):
        own = [row["loss"] for row in run.steps(rank)[: len(twin[str(rank)])]]
        assert own == twin[str(rank)]


@pytest.mark.world_size(3)
def test_a_replica_that_diverges_leaves_and_the_others_go_on(start):
    run = start(3, {"events": {"2": {"6": "nan"}}, "steps": 30}).wait(2)
    assert "Traceback" not in run.said
    assert "replica = 2: the weights of this replica are not finite" in run.said
    for rank in (0, 1):
        rows = run.steps(rank)
        assert rows[-1]["step"] == 30
        assert all(row["loss"] < 10 for row in rows)
    assert len(run.digests(2)) == 1


@pytest.mark.world_size(3)
def test_a_replica_with_other_settings_is_refused_and_the_others_go_on(start):
    unlike = {"unlike": {"1": {"every": 8}}, "local": elastic(3, start_s=20)}
    run = start(3, {**unlike, "steps": 60, "patience": 0.5}).wait(2)
    assert "replica = 1: replica 0 has other settings" in run.said
    for rank in (0, 2):
        assert run.steps(rank)[-1]["step"] == 60


@pytest.mark.world_size(2)
def test_no_lighthouse_is_told_at_once(tmp_path):
    folder = tmp_path / "none"
    folder.mkdir()
    settings = {"steps": 4, "local": elastic(2, lighthouse="http://localhost:1")}
    words = [sys.executable, "-m", "wavemare", "launch", "--nproc", "1", str(PROGRAM), str(folder)]
    environment = {**os.environ, "WAVEMARE_REPLICA": "0"}
    done = subprocess.run(
        [*words, json.dumps(settings)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "wavemare.local_steps.elastic.lighthouse = 'http://localhost:1'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.world_size(2)
def test_one_that_stands_still_for_long_is_left_out_and_catches_up(start):
    """As a link that stalls: the other goes on alone, and the late one takes its weights."""
    local = elastic(2, timeout_s=5)
    run = start(2, {"local": local, "sleep": 0.2, **WAITS})
    run.until(8, rank=1)
    [pid] = run.pids(1)
    os.kill(pid, signal.SIGSTOP)
    stopped = len(run.steps(0))
    time.sleep(12)
    os.kill(pid, signal.SIGCONT)
    run.wait()
    assert 1.0 in {row.get("replicas") for row in run.steps(0)[stopped:]}
    assert run.steps(0)[-1]["replicas"] == 2.0
    assert len(run.digests(2)) == 1


@pytest.mark.world_size(2)
def test_all_are_gone_and_come_back_from_their_checkpoints(start):
    events = {"0": {"14": "kill"}, "1": {"15": "kill"}}
    given = {"events": events, "save": 10, "load": True, "steps": 40}
    run = start(2, given).wait()
    for rank in (0, 1):
        again = [row["step"] for row in run.steps(rank) if row["attempt"]]
        assert again == list(range(again[0], 41))
        assert again[0] >= 11
    assert min(r["step"] for rank in (0, 1) for r in run.steps(rank) if r["attempt"]) == 11
    assert len(run.digests(2)) == 1


@pytest.mark.world_size(2)
def test_a_lighthouse_that_dies_is_started_again(start):
    run = start(2, {"steps": 100, "sleep": 0.2})
    run.until(6, rank=0)
    [lighthouse] = [
        process
        for process in psutil.Process(run.process.pid).children()
        if "torchft_lighthouse" in " ".join(process.cmdline())
    ]
    lighthouse.kill()
    run.wait()
    assert "the server ended with 137" in run.said
    assert run.steps(0)[-1]["replicas"] == 2.0
    assert len(run.digests(2)) == 1
