# SPDX-License-Identifier: Apache-2.0
"""Replicas that come and go: real kills, a lighthouse that is gone, replicas that do not fit.

Each replica is a job of its own. One test runs in continuous integration, the others at night
(``make test-elastic``).
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import yaml

from benchmarks.cluster import EmulatedCluster
from wavemare.engine.launch.environment import free_port

OBSTACLE = EmulatedCluster.obstacle()
pytestmark = pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft")

PROGRAM = Path(__file__).parent / "programs" / "elastic.py"
CLUSTER = Path(__file__).resolve().parents[2] / "docs" / "cluster"
LIMIT_S = 300
STEPS = 200
WAITS = {"steps": STEPS, "patience": 0.5}
"""Steps that are slow while a replica is away, so that it comes back before the last one."""
STREAM = {"every": 4, "fragments": 2, "overlap": 1}


def elastic(replicas, **keys):
    return {"elastic": {"replicas": replicas, "timeout_s": 20, "start_s": 120, **keys}}


class Run:
    """A job under ``wavemare launch``, and what its ranks have written.

    Args:
        folder: For what they write.
        options: Of the command.
        settings: Of the program.
        replica: Which one the job is; None if the command starts replicas.
        enter: Words that run a command on another host, when put before it.
    """

    def __init__(self, folder, options, settings, *, replica=None, enter=()):
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / f"log{replica}"
        words = [sys.executable, "-m", "wavemare", "launch", *options, str(PROGRAM), str(folder)]
        own = {} if replica is None else {"WAVEMARE_REPLICA": str(replica)}
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [*enter, *words, json.dumps(settings)],
                stdout=log,
                stderr=log,
                env={**os.environ, **own},
            )

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
def started():
    """Take processes, of which none is left at the end."""
    processes = []
    yield processes
    for one in processes:
        if one.poll() is None:
            family = psutil.Process(one.pid).children(recursive=True)
            for process in [one, *family]:
                process.kill()
        one.wait()


@pytest.fixture
def start(tmp_path, started):
    """Start replicas of a rank each, unless a number says otherwise."""

    def run(replicas, settings, *options, ranks=1, name="run"):
        local = {**elastic(replicas), **settings.pop("local", {})}
        words = ["--replicas", str(replicas), "--nproc", str(ranks), *options]
        one = Run(tmp_path / name, words, {"steps": 14, "local": local, **settings})
        started.append(one.process)
        return one

    return run


@pytest.fixture
def single(tmp_path, started):
    """Start one of two replicas, by the address of a lighthouse."""

    def run(address, settings, replica=0, enter=()):
        local = elastic(2, lighthouse=address, **settings.pop("elastic", {}))
        given = {"local": local, **settings}
        one = Run(tmp_path / "run", ["--nproc", "1"], given, replica=replica, enter=enter)
        started.append(one.process)
        return one

    return run


@pytest.fixture
def lighthouse(started):
    """Start a lighthouse on a host; return the process and its address."""

    def serve(host="localhost", enter=()):
        port = free_port()
        limits = ["--min_replicas", "1", "--heartbeat_timeout_ms", "3000"]
        program = str(Path(sys.executable).with_name("torchft_lighthouse"))
        words = [*enter, program, *limits, "--bind", f"[::]:{port}"]
        started.append(subprocess.Popen(words, env={**os.environ, "RUST_LOG": "error"}))
        return started[-1], f"http://{host}:{port}"

    return serve


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


@pytest.mark.nightly
@pytest.mark.world_size(3)
@pytest.mark.parametrize("zero", [0, 1])
def test_without_failures_it_is_the_fixed_run_bit_for_bit(start, tmp_path, zero):
    run = start(3, {"local": {**STREAM, **elastic(3)}, "zero": zero}).wait()
    twin = fixed(tmp_path, 3, {"local": {**STREAM, "replica": "rank"}, "zero": zero})
    for rank in range(3):
        assert losses(run, rank) == losses(twin, rank)
        assert {row["replicas"] for row in run.steps(rank) if "replicas" in row} == {3.0}
    assert len(run.digests(3) | twin.digests(3)) == 1


@pytest.mark.nightly
@pytest.mark.world_size(4)
def test_replicas_of_two_ranks_are_the_fixed_run_bit_for_bit(start, tmp_path):
    run = start(2, {"local": {**STREAM, **elastic(2)}, "zero": 1}, ranks=2).wait()
    twin = fixed(tmp_path, 4, {"local": {**STREAM, "replica": 2}, "zero": 1})
    for rank in range(4):
        assert losses(run, rank) == losses(twin, rank)
    assert len(run.digests(4) | twin.digests(4)) == 1


ZBV = {"pipeline": {"stages": 2, "schedule": "zbv"}}
SPLIT = {"tensor_parallel": {"size": 2}}


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize("section", [{"pipeline": {"stages": 2}}, SPLIT])
def test_replicas_of_parts_are_the_fixed_run_bit_for_bit(start, tmp_path, section):
    given = {"zero": 1, "section": section}
    run = start(2, {"local": {**STREAM, **elastic(2)}, **given}, ranks=2).wait()
    twin = fixed(tmp_path, 4, {"local": {**STREAM, "replica": 2}, **given})
    for rank in range(4):
        assert losses(run, rank) == losses(twin, rank)
    for place in (0, 1):
        ends = [one.rows(rank)[-1]["digest"] for one in (run, twin) for rank in (place, place + 2)]
        assert len(set(ends)) == 1


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.parametrize(
    "given", [{"shapes": {n: {"n_layer": 6} for n in "01"}, "section": ZBV}, {"own": True}]
)
def test_a_killed_pipeline_costs_an_exchange_and_comes_back(start, given):
    """Of layers of one's own, too: in a job of one replica its cut is that of all ranks."""
    run = start(2, {"events": {"1": {"11": "kill"}}, **WAITS, **given}, ranks=2).wait()
    for rank in (0, 1):
        rows = run.steps(rank)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        present = [row["replicas"] for row in rows if "replicas" in row]
        assert present[0] == present[-1] == 2.0
        assert 1.0 in present
    begun = {next(row["step"] for row in run.steps(r) if row["attempt"]) for r in (2, 3)}
    assert len(begun) == 1
    assert begun.pop() % 4 == 1  # after an exchange
    for place in (0, 1):
        ends = [run.rows(rank)[-1]["digest"] for rank in (place, place + 2)]
        assert ends[0] == ends[1]


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


@pytest.mark.nightly
@pytest.mark.world_size(3)
def test_one_that_comes_back_at_the_last_step_makes_no_other_one(start):
    run = start(3, {"events": {"1": {"14": "kill"}}, "steps": 14, "late": "1"}).wait()
    for rank in (0, 2):
        assert [row["step"] for row in run.steps(rank)] == list(range(1, 15))
    assert {row["attempt"] for row in run.steps(1)} == {0}
    assert len(run.digests(3)) == 1


@pytest.mark.nightly
@pytest.mark.world_size(3)
def test_one_that_dies_within_an_exchange_costs_the_others_that_exchange(start):
    run = start(3, {"events": {"1": {"12": "kill in the exchange"}}, **WAITS}).wait()
    for rank in (0, 2):
        rows = run.steps(rank)
        assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
        assert {row["attempt"] for row in rows} == {0}
        missed = [row["step"] for row in rows if row.get("missed_exchanges")]
        assert missed == [12]
        assert rows[-1]["replicas"] == 3.0
    assert len(run.digests(3)) == 1


@pytest.mark.nightly
@pytest.mark.world_size(3)
def test_all_but_one_are_gone_and_it_goes_on_alone(start):
    events = {"0": {"10": "kill"}, "2": {"15": "kill"}}
    run = start(3, {"events": events, "steps": 30}, "--max-restarts", "0").wait()
    rows = run.steps(1)
    assert [row["step"] for row in rows] == list(range(1, 31))
    assert rows[-3]["replicas"] == 1.0
    assert {len(run.steps(rank)) for rank in (0, 2)} == {9, 14}


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_too_few_replicas_end_after_a_time(start):
    local = elastic(2, min_replicas=2, timeout_s=5)
    given = {"events": {"0": {"10": "kill"}}, "local": local, "watchdog": {"timeout_s": 15}}
    run = start(2, {**given, "steps": 10**6, "sleep": 0.1}, "--max-restarts", "0").wait(137)
    assert "replica = 1: there was no exchange for" in run.said
    assert "Traceback" not in run.said
    assert {row["replicas"] for row in run.steps(1) if "replicas" in row} == {2.0}


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.world_size(3)
@pytest.mark.parametrize(
    "unlike", [{"unlike": {"1": {"every": 8}}}, {"shapes": {"1": {"n_layer": 1}}}]
)
def test_a_replica_that_does_not_fit_is_refused_and_the_others_go_on(start, unlike):
    run = start(3, {**unlike, "local": elastic(3, start_s=10), "steps": 40, "patience": 0.5}).wait(
        2
    )
    assert "replica = 1: replica 0 has" in run.said
    assert "Traceback" not in run.said
    assert run.steps(1) == []
    for rank in (0, 2):
        assert run.steps(rank)[-1]["step"] == 40
    assert len(run.digests(1) | {row["digest"] for row in run.rows(2)[-1:]}) == 1


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_no_lighthouse_is_told_at_once(single):
    run = single("http://localhost:1", {"steps": 4}).wait(2)
    assert "wavemare.local_steps.elastic.lighthouse = 'http://localhost:1'" in run.said
    assert "Traceback" not in run.said


SOON = {"elastic": {"timeout_s": 5, "start_s": 1}, "watchdog": {"timeout_s": 15}}
"""Limits for a replica that is to end by itself."""


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_a_server_that_is_no_lighthouse_is_told_after_a_time(single):
    with socket.create_server(("localhost", 0)) as silent:
        address = f"http://localhost:{silent.getsockname()[1]}"
        run = single(address, {"steps": 4, **SOON}).wait(1)
    assert "replica = 0: there was no exchange for" in run.said
    assert address in run.said
    assert "Traceback" not in run.said


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_a_lighthouse_that_stays_away_ends_the_replica(single, lighthouse):
    server, address = lighthouse()
    run = single(address, {"steps": 10**6, "sleep": 0.1, **SOON})
    run.until(6, rank=0)
    server.kill()
    run.wait(1)
    assert "replica = 0: there was no exchange for" in run.said
    assert "Traceback" not in run.said


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
def test_a_link_that_is_cut_for_a_minute(single, lighthouse):
    """The one beside the lighthouse goes on alone; the other one waits, and takes its weights."""
    with EmulatedCluster(2) as cluster:
        _, address = lighthouse("node0", cluster.enter(0))
        given = {"elastic": {"timeout_s": 10}, "steps": 480, "sleep": 0.2, "patience": 0.5}
        runs = [single(address, {**given}, n, cluster.enter(n)) for n in (0, 1)]
        runs[0].until(8, rank=0)
        cluster.unplug(1)
        cut = len(runs[0].steps(0))
        time.sleep(60)
        cluster.plug(1)
        for run in runs:
            run.wait()
    rows = runs[0].steps(0)
    assert 1.0 in {row.get("replicas") for row in rows[cut:]}
    assert rows[-1]["replicas"] == 2.0
    assert len(runs[0].digests(2)) == 1


@pytest.mark.nightly
@pytest.mark.world_size(2)
@pytest.mark.parametrize(("saves", "first"), [({"save": 10, "load": True}, 11), ({}, 1)])
def test_all_are_gone_and_come_back(start, saves, first):
    """They go on from their checkpoints, and begin anew without."""
    events = {"0": {"14": "kill"}, "1": {"15": "kill"}}
    run = start(2, {"events": events, "steps": 40, **saves}).wait()
    for rank in (0, 1):
        again = [row["step"] for row in run.steps(rank) if row["attempt"]]
        assert again == list(range(again[0], 41))
        assert again[0] >= first
    assert min(r["step"] for rank in (0, 1) for r in run.steps(rank) if r["attempt"]) == first
    assert len(run.digests(2)) == 1


@pytest.mark.nightly
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


@pytest.mark.nightly
@pytest.mark.world_size(2)
def test_the_benchmark_kills_replicas_and_counts(tmp_path):
    file, systems = tmp_path / "result.json", "fixed,elastic,elastic-killed,restarts-killed"
    sizes = ["--replicas", "2", "--steps", "960", "--calm-steps", "32", "--every", "8"]
    words = [*sizes, "--step-ms", "50", "--weights", "1000", "--kill-every", "30"]
    command = [sys.executable, "-m", "benchmarks", "elastic", *words, "--systems", systems]
    subprocess.run([*command, "--json", str(file)], check=True, timeout=2 * LIMIT_S)
    rows = {row["system"]: row for row in json.loads(file.read_text())["rows"]}
    assert [*rows] == systems.split(",")
    for name in ("elastic-killed", "restarts-killed"):
        assert rows[name]["kills"] >= 1
        assert 0 < rows[name]["goodput"] <= rows[name]["progress"] + 1e-9
        assert all(seconds > 0 for seconds in rows[name]["back_each_s"][:1])


def containers(file):
    """Return command and variables of each container by its name; the lighthouse comes first.

    A pod has the number of its replica as an annotation, which the cluster writes.
    """
    documents = list(yaml.safe_load_all((CLUSTER / file).read_text()))
    if "services" in documents[0]:
        services = documents[0]["services"].items()
        given = {n: (s["command"], s.get("environment", {})) for n, s in services if n != "prepare"}
        return dict(sorted(given.items()))
    by_kind = {one["kind"]: one for one in documents}
    pods = {kind: by_kind[kind]["spec"]["template"]["spec"] for kind in ("Deployment", "Job")}
    [server], [replica] = (pod["containers"] for pod in pods.values())
    quiet = {each["name"]: each["value"] for each in server["env"]}
    given = {by_kind["Service"]["metadata"]["name"]: (server["args"], quiet)}
    for number in range(by_kind["Job"]["spec"]["completions"]):
        variables = {each["name"]: each.get("value", str(number)) for each in replica["env"]}
        given[f"replica{number}"] = replica["args"], variables
    return given


class Containers:
    """The containers of a file, each on an emulated host of its own; those that fail start again.

    Args:
        cluster: Has a host for each of them.
        given: See `containers`.
        folder: For logs; what containers share lies in it, too.
        started: See the fixture.
    """

    def __init__(self, cluster, given, folder, started):
        self._cluster, self._given, self._started = cluster, given, started
        self.folder, self._processes, self.codes = folder, {}, []
        names = (cluster.folder / "hosts").read_text()
        for number, name in enumerate(given):
            names = names.replace(f" node{number}\n", f" node{number} {name}\n")
        (cluster.folder / "hosts").write_text(names)
        for name in given:
            self._run(name)

    def _run(self, name):
        (words, variables), number = self._given[name], [*self._given].index(name)
        enter = [*self._cluster.enter(number), "sh", "-c", 'cd "$0" && exec "$@"', self.folder]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        with open(self.folder / f"{name}.log", "a") as log:
            self._processes[name] = subprocess.Popen(
                [*enter, CLUSTER / "entrypoint", *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path, **variables},
            )
        self._started.append(self._processes[name])

    def kill(self, name):
        """Let the rank of a replica die."""
        for process in psutil.Process(self._processes[name].pid).children(recursive=True):
            if "RANK" in process.environ():
                process.kill()

    def said(self, name):
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def present(self, name):
        """Return whose changes each exchange had, by what a replica has printed."""
        return [float(found) for found in re.findall(r"replicas ([0-9.]+)", self.said(name))]

    def until(self, condition):
        """Do what containers' restart policy does, until the condition holds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, "\n".join(map(self.said, self._given))
            for name, process in list(self._processes.items()):
                if process.poll() is not None:
                    assert process.returncode != 0, self.said(name)
                    self.codes.append(process.returncode)
                    self._run(name)
            time.sleep(0.1)


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))
@pytest.mark.parametrize("file", ["replicas.compose.yaml", "replicas.yaml"])
def test_a_container_that_is_killed_comes_back(tmp_path, started, file):
    given = containers(file)
    with EmulatedCluster(len(given)) as cluster:
        run = Containers(cluster, given, tmp_path, started)
        run.until(lambda: run.present("replica0")[-1:] == [4.0])
        run.kill("replica2")
        run.until(lambda: 3.0 in run.present("replica0"))
        run.until(lambda: run.present("replica0")[-1] == 4.0)
        assert run.codes == [137]
        assert "this replica goes on from another one's step" in run.said("replica2")
        steps = [int(found) for found in re.findall(r"step (\d+): loss", run.said("replica0"))]
        assert steps == list(range(32, steps[-1] + 1, 32))
