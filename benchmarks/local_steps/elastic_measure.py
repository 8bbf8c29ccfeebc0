# SPDX-License-Identifier: Apache-2.0
"""Runs of ``benchmarks elastic``: start replicas, kill one after the other, and read what they say.

A step counts if what it has learned was exchanged, or saved: not those of a killed process since
then, and each once.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from benchmarks.local_steps.elastic_request import BASELINE, CALM, ElasticRequest
from benchmarks.ranks import ratio_row
from wavemare.errors import LaunchError
from wavemare.observe.run import describe_machine

_PROGRAM = str(Path(__file__).with_name("elastic_replica.py"))
_RESTARTS = 1000
_RESTARTED = (
    "import sys; from wavemare.cli.job import Job; sys.exit(Job(program=sys.argv[1], "
    f"options=sys.argv[3:], num_processes=int(sys.argv[2]), max_restarts={_RESTARTS}).run())"
)
_PAUSE_S = 0.2


class Line(NamedTuple):
    """What a replica writes of a step; see `elastic_replica`."""

    step: int
    time: float
    replicas: float
    missed: float
    pid: int


class Kill(NamedTuple):
    """A kill, and the process that it has ended."""

    replica: int
    time: float
    pid: int


def measure(request: ElasticRequest) -> dict[str, Any]:
    """Run all systems in turns and return the result."""
    seconds: dict[str, list[float]] = {name: [] for name in request.systems}
    figures: dict[str, dict[str, Any]] = {name: {} for name in request.systems}
    for _ in range(request.rounds):
        for name in (n for n in request.systems if n in CALM):
            lines, _ = _run(request, name)
            seconds[name].append(_seconds(lines))
    for name in (n for n in request.systems if n not in CALM):
        lines, kills = _run(request, name)
        seconds[name].append(_seconds(lines))
        calm = name.removesuffix("-killed")
        own = seconds.get(calm if calm in CALM else BASELINE, ())
        calm_s = median(own) if own else request.step_ms / 1000
        figures[name] = figures_of(request, lines, kills, calm_s)
    rows = [
        {"system": name, **ratio_row(s, seconds.get(BASELINE)), **figures[name]}
        for name, s in seconds.items()
    ]
    return {
        "machine": describe_machine(),
        "baseline": BASELINE,
        "request": request.model_dump(),
        "parameters": request.weights,
        "rows": rows,
        "skipped": [],
    }


def _run(request: ElasticRequest, name: str) -> tuple[list[list[Line]], list[Kill]]:
    """Run a system to its end; return the lines of each replica, and the kills."""
    with tempfile.TemporaryDirectory(prefix="wavemare-elastic-") as folder:
        words = [folder, request.model_dump_json(), name]
        start = [sys.executable, "-m", "wavemare", "launch"]
        count = str(request.replicas)
        if name.startswith(("elastic", "torchft")):
            start += ["--replicas", count, "--nproc", "1", _PROGRAM]
        elif name == BASELINE:
            start += ["--nproc", count, _PROGRAM]
        else:
            start = [sys.executable, "-c", _RESTARTED, _PROGRAM, count]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        variables = {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen([*start, *words], env={**os.environ, **variables})
        files = [Path(folder, f"{n}.jsonl") for n in range(request.replicas)]
        kills: list[Kill] = []
        try:
            _kill_until_the_end(request, name, process, files, kills)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            code = process.wait()
        if code:
            raise LaunchError("--systems", name, f"it ended with code {code}", "See above")
        return [read(file) for file in files], kills


def _kill_until_the_end(
    request: ElasticRequest,
    name: str,
    process: subprocess.Popen[bytes],
    files: Sequence[Path],
    kills: list[Kill],
) -> None:
    due, last = math.inf, request.steps - request.every
    while process.poll() is None:
        time.sleep(_PAUSE_S)
        lines = [read(file)[-1:] for file in files]
        if name in CALM or not all(lines):
            continue
        now = time.monotonic()
        due = now + request.kill_every if due == math.inf else due
        if now >= due and max(line.step for (line,) in lines) < last:
            due = now + request.kill_every
            replica = len(kills) % request.replicas
            pid = lines[replica][0].pid
            with suppress(ProcessLookupError):  # it is on its way back
                os.kill(pid, signal.SIGKILL)
                kills.append(Kill(replica, time.time(), pid))


def read(file: Path) -> list[Line]:
    """Return the whole lines of a replica."""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = text.splitlines(keepends=True)
    return [Line(*json.loads(line)) for line in lines if line.endswith("\n")]


def _seconds(lines: Sequence[Sequence[Line]]) -> float:
    """Return the seconds of an optimizer step, from the first one of all to the last one."""
    first, last = _span(lines)
    return (last.time - first.time) / (last.step - first.step)


def _span(lines: Sequence[Sequence[Line]]) -> tuple[Line, Line]:
    first = max((own[0] for own in lines), key=lambda line: line.time)
    return first, max((line for own in lines for line in own), key=lambda line: line[:2])


def figures_of(
    request: ElasticRequest, lines: Sequence[Sequence[Line]], kills: Sequence[Kill], calm_s: float
) -> dict[str, Any]:
    """Return what kills have cost.

    Args:
        request: The sizes.
        lines: Of each replica, of all its processes.
        kills: In their order.
        calm_s: Seconds of a step of the same system that nobody kills.

    Returns:
        ``progress``: the optimizer steps of the run in the time of undisturbed ones; ``goodput``:
        the steps of all replicas that count, in the same way; ``kills``, and ``back_s``: from a
        kill to the end of the replica's next step that counts, in seconds; 0 if there was none;
        ``missed``: exchanges that the replica has missed that has missed most.
    """
    first, last = _span(lines)
    nominal = (last.time - first.time) / calm_s
    killed = {kill.pid: kill for kill in kills}
    counted, back = 0, []
    for own in lines:
        steps: set[int] = set()
        for pid, group in groupby(own, key=lambda line: line.pid):
            made = [line.step for line in group]
            kept = made[-1] // request.every * request.every if pid in killed else made[-1]
            steps |= {step for step in made if first.step < step <= kept}
            if (kill := killed.get(pid)) is not None:
                later = (line.time for line in own if line.time > kill.time and line.step > kept)
                back.append(next(later, kill.time) - kill.time)
        counted += len(steps)
    missed = [
        sum(line.missed > 0 for line in own if line.step % request.every == 0) for own in lines
    ]
    return {
        "progress": (last.step - first.step) / nominal,
        "goodput": counted / nominal / request.replicas,
        "kills": len(kills),
        "back_s": mean(back) if back else None,
        "back_each_s": back,
        "missed": max(missed),
        "run_s": last.time - first.time,
    }
