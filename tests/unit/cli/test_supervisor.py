# SPDX-License-Identifier: Apache-2.0
"""The supervisor: what ends a job, what is left to end, the exit code, and another attempt."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from wavemare.cli.supervisor import exit_code, launcher_code

# Starts two ranks; or, with a launcher, what stands for it, which starts them.
SUPERVISED = """
import json, sys
from wavemare.cli.supervisor import Command, supervise
seconds, launcher, words = json.loads(sys.argv[1])
start = [sys.executable, "-c"]
ranks = [Command([*start, *words], {"RANK": str(rank)}) for rank in (0, 1)]
by_launcher = Command([*start, launcher, *words], {}, is_launcher=True)
sys.exit(supervise(lambda attempt: [by_launcher] if launcher else ranks, 0, seconds))
"""
# Stands for "deepspeed": it starts the part for this host, and takes over its exit code.
LAUNCHER = """
import subprocess, sys
code = subprocess.Popen([sys.executable, "-u", "-m", "deepspeed.launcher.launch", *sys.argv[1:]])
code.wait()
sys.exit(max(code.returncode, 0))
"""
# Stands for that part: as DeepSpeed's it ends its ranks when it is told to, and reports a failure.
HERE = """
import os, signal, subprocess, sys, time
start = [sys.executable, "-c", *sys.argv[1:]]
ranks = [subprocess.Popen(start, env={**os.environ, "RANK": str(r)}) for r in range(2)]

def end(*_):
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.wait()
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
signal.signal(signal.SIGINT, end)
while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
    time.sleep(0.02)
for rank in ranks:
    rank.terminate()
for rank in ranks:
    rank.wait()
sys.exit(next((code for code in codes if code), 0))
"""
# A rank with a helper process, which takes some seconds to "save" after SIGTERM.
RANK = """
import os, signal, subprocess, sys, time
folder, seconds, code = sys.argv[1:]
stop, rank = [], os.environ["RANK"]
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(f"{folder}/up{rank}", "w").write(f"{os.getpid()} {helper.pid}")
while not stop:
    time.sleep(0.01)
open(f"{folder}/told{rank}", "w").close()
time.sleep(float(seconds))
helper_lived = helper.poll() is None
open(f"{folder}/saved{rank}", "w").write(str(helper_lived))
sys.exit(int(code))
"""
KINDS = pytest.mark.parametrize("launcher", ["", LAUNCHER], ids=["ranks", "launcher"])

pytestmark = pytest.mark.long


class Supervised:
    """A supervisor with two ranks, each of which has a helper."""

    def __init__(self, folder, wait_for, launcher, seconds, code, limit_s):
        package = folder / "path" / "deepspeed" / "launcher"
        package.mkdir(parents=True)
        for file in (package.parent / "__init__.py", package / "__init__.py"):
            file.touch()
        (package / "launch.py").write_text(HERE)
        words = [RANK, str(folder), str(seconds), str(code)]
        paths = [str(folder / "path")] * bool(launcher) + [os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISED, json.dumps([limit_s, launcher, words])],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stderr=subprocess.PIPE,
            text=True,
        )
        files = [folder / f"up{rank}" for rank in (0, 1)]
        wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        self.pids = [int(pid) for file in files for pid in file.read_text().split()]
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        self._wait_for = wait_for

    def ended(self, code):
        """Wait for the end, of which nothing may be left; return what was said."""
        _, errors = self.process.communicate(timeout=600)
        assert self.process.returncode == code, errors
        self._wait_for(lambda: not any(map(lives, self.pids)))
        return errors


def lives(pid):
    """Whether it has not ended; a zombie may wait for its parent."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path, wait_for):
    """Start a supervisor, and wait until its ranks are up."""
    started = []

    def run(launcher="", *, seconds=0.5, code=0, limit_s=600.0):
        started.append(Supervised(tmp_path, wait_for, launcher, seconds, code, limit_s))
        return started[-1]

    yield run
    for one in started:
        for process in [psutil.Process(), *one.family][1:]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        one.process.kill()
        one.process.communicate()


def saved(folder):
    return [file.read_text() for file in sorted(folder.glob("saved*"))]


@KINDS
@pytest.mark.parametrize("code", [0, 3])
def test_ranks_save_and_leave(start, tmp_path, launcher, code):
    supervised = start(launcher, code=code)
    supervised.process.terminate()
    assert supervised.ended(code) == ""
    assert saved(tmp_path) == ["True", "True"]  # their helpers were left to them


@KINDS
@pytest.mark.parametrize("second", [False, True], ids=["too slow", "a second signal"])
def test_slow_ranks_are_ended(start, tmp_path, wait_for, launcher, second):
    supervised = start(launcher, seconds=600, limit_s=600.0 if second else 0.5)
    supervised.process.terminate()
    if second:
        wait_for(lambda: len(list(tmp_path.glob("told*"))) == 2)
        supervised.process.send_signal(signal.SIGHUP)
    supervised.ended(143)
    assert saved(tmp_path) == []


@KINDS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_all_processes(start, launcher, number):
    supervised = start(launcher, seconds=0)
    supervised.process.send_signal(number)
    supervised.ended(128 + number)


def test_ranks_save_although_every_process_was_signalled(start, tmp_path):
    """DeepSpeed's launcher has no handler: it leaves the ranks, which the supervisor finds."""
    supervised = start(LAUNCHER)
    launchers = [p for p in supervised.family if p.pid not in supervised.pids]
    assert len(launchers) == 2
    supervised.process.terminate()
    for process in launchers:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, errors = supervised.process.communicate(timeout=600)
    assert supervised.process.returncode in (143, 1), errors
    assert len(saved(tmp_path)) == 2
    assert not any(map(lives, supervised.pids))


@KINDS
def test_the_first_rank_that_ends_badly_ends_the_others(start, launcher):
    supervised = start(launcher)
    os.kill(supervised.pids[2], signal.SIGKILL)
    last = supervised.ended(137).splitlines()[-1]
    assert "memory ran out" in last
    assert ("rank 1" in last) is not bool(launcher)  # which tells the signal alone


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([0, None], 0),
        ([-15, 1], 1),  # the supervisor itself sends SIGTERM to other ranks
        ([1, 2], 2),
        ([2, -9, 1], 137),
        ([-15], 143),
        ([130], 130),
        ([255], 255),
    ],
)
def test_the_cause_decides_the_exit_code(codes, expected):
    assert exit_code(codes) == expected


@pytest.mark.parametrize(("code", "meant"), [(3, 3), (247, -9), (250, -6), (255, 255), (-9, -9)])
def test_what_a_launcher_says_of_a_rank(code, meant):
    assert launcher_code(code) == meant


RESTARTED = """
import json, os, signal, sys, time
folder, end, *words = sys.argv[1:]
attempt, rank = (int(os.environ[name]) for name in ("TORCHELASTIC_RESTART_COUNT", "RANK"))
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
place = {**os.environ, "words": words}
open(f"{folder}/{attempt}_{rank}", "w").write(json.dumps(place))
while rank == 1 and not os.path.exists(f"{folder}/{attempt}_0"):
    time.sleep(0.02)  # the end of a rank ends the other one
if rank == 1 and end.isdigit():
    sys.exit(int(end))
if rank == 1 and end == "kill" and attempt == 0:
    os.kill(os.getpid(), signal.SIGKILL)
while not stopped and not (end == "kill" and attempt == 1):
    time.sleep(0.02)
"""
JOB = """
import sys
from wavemare.cli.job import Job
sys.exit(Job(program=sys.argv[1], options=sys.argv[2:], num_processes=2, max_restarts=2).run())
"""
WORDS = ["$HOME", "$$", "${local_rank}", ""]


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    """Start a job that may start its ranks again."""
    monkeypatch.delenv("MASTER_PORT", raising=False)
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    places = tmp_path / "places"
    places.mkdir()
    return lambda end: subprocess.Popen(
        [sys.executable, "-c", JOB, program, places, end, *WORDS],
        stderr=subprocess.PIPE,
        text=True,
    )


def attempts_of(folder):
    """Return the environments of the ranks of each attempt."""
    found = {}
    for file in sorted((folder / "places").glob("*_*")):
        if text := file.read_text():
            found.setdefault(file.name[0], []).append(json.loads(text))
    return list(found.values())


@pytest.mark.parametrize(
    ("end", "code", "attempts"),
    [("kill", 0, 2), ("3", 3, 3), ("2", 2, 1)],  # 2: a mistake of the user is not repeated
)
def test_ranks_restart_as_often_as_allowed(restarted, tmp_path, end, code, attempts):
    begun, job = time.time(), restarted(end)
    _, errors = job.communicate(timeout=600)
    assert job.returncode == code, errors
    found = attempts_of(tmp_path)
    assert [len(ranks) for ranks in found] == [2] * attempts
    assert errors.count("; restart") == attempts - 1
    for ranks in found:
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
        sizes = {
            (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["MASTER_PORT"]) for rank in ranks
        }
        assert len(sizes) == 1
        assert all(rank["words"] == WORDS for rank in ranks)
    # Each attempt but the first hears when the one before has ended, and when it has started.
    told = [rank.get("WAVEMARE_RESTARTED") for ranks in found for rank in ranks]
    assert told[:2] == [None, None]
    times = [begun, *(float(one) for pair in told[2::2] for one in pair.split()), time.time()]
    assert times == sorted(times)
    # Ranks of one attempt meet at a port that no other attempt has used.
    assert len({ranks[0]["MASTER_PORT"] for ranks in found}) == attempts
    # All attempts are of one job, whose checkpoints they resume.
    assert len({rank["WAVEMARE_JOB_STARTED"] for ranks in found for rank in ranks}) == 1


def test_stopped_ranks_leave_and_are_not_restarted(restarted, tmp_path, wait_for):
    job = restarted("wait")
    wait_for(lambda: [*map(len, attempts_of(tmp_path))] == [2])
    job.send_signal(signal.SIGTERM)
    assert job.communicate(timeout=600) == (None, "")
    assert job.returncode == 0
    assert len(attempts_of(tmp_path)) == 1


# Replica 1 is killed at its first attempt; replica 0 waits for its second one. The server is
# killed once, too.
REPLICA = """
import os, signal, sys, time
folder, who, end = sys.argv[1:]
file = f"{folder}/{who}_{time.time_ns()}"
open(file, "w").write(os.environ.get("WAVEMARE_RESTARTED", ""))
mine = [name for name in os.listdir(folder) if name.startswith(f"{who}_")]
if who in ("1", "server") and len(mine) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if end == "typed" and who == "1":
    sys.exit(2)
while who == "server" or len([n for n in os.listdir(folder) if n.startswith(("1_", "s"))]) < 4:
    time.sleep(0.02)
while who == "2":  # it would never end
    time.sleep(0.02)
"""
REPLICAS = """
import sys
from wavemare.cli.supervisor import Command, supervise_replicas
words = [sys.executable, "-c", *sys.argv[1:3]]

def of(who):
    return Command([*words, str(who), sys.argv[3]], {})

sys.exit(supervise_replicas(of("server"), lambda n: [of(n)], 3, 5, seconds_to_finish=1.0))
"""


@pytest.mark.parametrize(("end", "code"), [("well", 0), ("typed", 2)])
def test_each_replica_starts_again_by_itself(tmp_path, end, code):
    begun, words = time.time(), [sys.executable, "-c", REPLICAS, REPLICA, str(tmp_path), end]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == code, done.stderr
    started = [file.name.split("_")[0] for file in tmp_path.iterdir()]
    assert sorted(started) == ["0", "1", "1", "2", "server", "server"]
    first, second = (file.read_text() for file in sorted(tmp_path.glob("1_*")))
    assert first == ""
    times = [begun, *map(float, second.split()), time.time()]
    assert times == sorted(times)
    lines = sorted(line.split(";")[0] for line in done.stderr.splitlines())
    assert lines == [f"wavemare: {who} ended with 137" for who in ("replica 1", "the server")]
    told = [process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"])]
    assert not [words for words in told if str(tmp_path) in words]


@pytest.mark.parametrize(("number", "code", "attempts"), [("1", 0, 2), (None, 2, 0)])
def test_a_job_that_is_a_replica_starts_again_and_no_other(
    tmp_path, monkeypatch, number, code, attempts
):
    monkeypatch.delenv("WAVEMARE_REPLICA", raising=False)
    if number is not None:
        monkeypatch.setenv("WAVEMARE_REPLICA", number)
    script, tried = tmp_path / "dies_once.py", tmp_path / "tried"
    again = f"again = os.path.exists({str(tried)!r})\nopen({str(tried)!r}, 'a').write('x')\n"
    script.write_text(f"import os\n{again}again or os.kill(os.getpid(), 9)\n")
    words = [sys.executable, "-m", "wavemare", "launch", "--nproc", "1", "--max-restarts", "3"]
    done = subprocess.run(
        [*words, str(script)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == code, done.stderr
    assert (len(tried.read_text()) if attempts else tried.exists()) == attempts
