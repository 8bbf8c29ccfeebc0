# SPDX-License-Identifier: Apache-2.0
"""Ranks that train nothing, under supervisors; one of them may come to a bad end.

Usage: supervised.py FOLDER mpirun CASES, a JSON list of [restarts, fault, victim]. In each case the
supervisors start this again as ranks, which leave ``case_N/attempt_A_rank_R.json``. Each has a
child, as one with a data loader has.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from wavemare.cli.supervisor import supervise
from wavemare.engine.launch.environment import mpi_place, place_of

PATIENCE_S = 600


def attend(folder, attempt, size):
    """Wait until all ranks of an attempt have left their word."""
    deadline = time.monotonic() + PATIENCE_S
    while len(list(folder.glob(f"attempt_{attempt}_rank_*.json"))) < size:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def be_a_rank(folder, fault, victim):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["WAVEMARE_RESTART_COUNT"])
    # Those of a data loader look whether their parent is there; nobody else can, if all is killed.
    looks = 'while kill -0 "$PPID"; do sleep 0.1; done'
    helper = subprocess.Popen(
        ["sh", "-c", looks] if fault == "supervisor" else ["sleep", "1000"],
        stderr=subprocess.DEVNULL,
    )
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    known = {
        "size": size,
        "pids": [os.getpid(), helper.pid],
        "supervisor": os.getppid(),
        "in_mpi": place_of(os.environ) is not None,
        **{name: os.environ[name] for name in names},
    }
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(attempt))
    file = folder / f"attempt_{attempt}_rank_{rank}.json"
    file.with_suffix(".part").write_text(json.dumps(known))
    file.with_suffix(".part").rename(file)
    attend(folder, attempt, size)
    if rank == victim and (attempt == 0 or fault == "exit 3"):
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "supervisor":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(PATIENCE_S)  # the kernel ends this process
        if fault == "term":
            os.kill(os.getppid(), signal.SIGTERM)
        if fault.startswith("exit"):
            sys.exit(int(fault.split()[1]))
    waits = attempt == 0 or fault == "exit 3"
    while waits and fault != "peace":  # for a rank that does not come any more
        time.sleep(0.05)
        if told or (fault == "term" and (folder / "stopped").exists()):
            (folder / "stopped").touch()
            helper.kill()
            sys.exit(0)
    helper.kill()


def supervise_cases(folder, cases):
    os.environ["SUPERVISED"] = "rank"
    place = mpi_place(os.environ)
    codes = []
    for number, (restarts, fault, victim) in enumerate(cases):
        if place.rank == 0:
            sys.stderr.write("next case\n")
        own = folder / f"case_{number}"
        own.mkdir(exist_ok=True)
        words = [sys.executable, __file__, str(own), fault, str(victim)]
        codes.append(supervise(place, words, restarts, grace_s=0.5))
    (folder / f"rank_{place.rank}.json").write_text(json.dumps(codes))
    sys.exit(codes[-1])


if os.environ.get("SUPERVISED") == "rank":
    be_a_rank(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
else:
    supervise_cases(Path(sys.argv[1]), json.loads(sys.argv[3]))
