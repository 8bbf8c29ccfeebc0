# SPDX-License-Identifier: Apache-2.0
"""Trains for hours under faults, watches, and reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from wavemare.bench.soak.faults import Fault, Link, draw_faults, inflict
from wavemare.bench.soak.watch import Losses, Sizes, left_behind
from wavemare.errors import LaunchError

__all__ = ["SYSTEMS", "Soak", "configuration"]

SYSTEMS = ("pipemare", "sparse")
"""What is trained: an asynchronous pipeline, or replicas whose gradients travel as blocks."""

RANKS = 2
_SAVE_INTERVAL = 100
_TIMEOUT_S = 30.0
_POLL_S = 0.5
_SAMPLE_S = 2.0
_START_S = 300.0
_END_S = 180.0
_MODEL = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def configuration(system: str) -> dict[str, Any]:
    """Return the configuration of a system, with everything on that is meant for bad days."""
    section: dict[str, Any] = {
        "watchdog": {"timeout_s": _TIMEOUT_S},
        "checkpoint": {"keep": 2, "background": True},
    }
    if system == "pipemare":
        section["pipeline"] = {"schedule": "pipemare", "stages": RANKS, "inputs": ["input_ids"]}
    else:
        section["sparse_collective"] = {"mode": "auto"}
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "wavemare": section,
    }


@dataclass
class Soak:
    """One system under faults.

    Args:
        system: Of `SYSTEMS`.
        minutes: How long.
        seed: Of the faults.
        folder: Of the run, made anew.
        warmup_s: Seconds after the first step of started ranks in which they may grow.
        reference_steps: How many steps are trained once more, in peace, to compare the losses.
        note: Told what happens.
    """

    system: str
    minutes: float
    seed: int
    folder: Path
    warmup_s: float
    reference_steps: int
    note: Callable[[str], None]
    inflicted: list[Fault] = field(default_factory=list)
    _planned: list[Fault] = field(default_factory=list)
    _sizes: dict[int, Sizes] = field(default_factory=dict)
    _launcher: Sizes | None = None
    _ranks: list[psutil.Process] = field(default_factory=list)
    _lines_before: int = 0

    def run(self) -> dict[str, Any]:
        """Train, and return the row of the report.

        Raises:
            LaunchError: The job ended by itself, or did not begin or end in time.
        """
        with ExitStack() as stack:
            link = None
            if (obstacle := Link.obstacle()) is None:
                link = Link()
                stack.callback(link.close)
            else:
                self.note(f"no slow link: {obstacle}")
            run = self.folder / "run"
            losses = Losses(run / "metrics.jsonl")
            job = self._start(run, link, steps=10**6)
            stack.callback(_end_all, job)
            self._train(job, losses, link)
            code = self._stop(job)
        losses.update()
        left = left_behind(name for sizes in self._sizes.values() for name in sizes.segments)
        expected = self._reference()
        compared = {step: loss for step, loss in expected.items() if step in losses.by_step}
        launcher = [self._launcher] if self._launcher is not None else []
        growth = [sizes.growth() for sizes in (*self._sizes.values(), *launcher)]
        longest = max((len(s.samples) for s in self._sizes.values()), default=0) * _SAMPLE_S
        keys = ("memory_mib", "files", "threads", "children")
        return {
            "system": self.system,
            "minutes": self.minutes,
            "exit_code": code,
            "steps": max(losses.by_step, default=0),
            "first_loss": losses.by_step.get(1),
            "last_loss": losses.by_step.get(max(losses.by_step, default=0)),
            "faults": _count(self.inflicted),
            "planned_faults": _count(self._planned),
            "repeated_steps": losses.repeated,
            "different_losses": len(losses.different),
            "reference_steps": len(compared),
            "reference_differs": sum(losses.by_step[s] != loss for s, loss in compared.items()),
            "longest_watch_s": longest,
            "watched_attempts": sum(bool(g) for g in growth) // RANKS,
            "growth": {k: max((g[k] for g in growth if g), default=None) for k in keys},
            "shared_memory_segments": len(left),
        }

    def _start(self, run: Path, link: Link | None, *, steps: int) -> subprocess.Popen[bytes]:
        self.folder.mkdir(parents=True, exist_ok=True)
        model, config = self.folder / "model.json", self.folder / "config.json"
        model.write_text(json.dumps(_MODEL), encoding="utf-8")
        config.write_text(json.dumps(configuration(self.system)), encoding="utf-8")
        options = {
            "--nproc": RANKS,
            "--max-restarts": 1000,
            "--config": config,
            "--model_config": model,
            "--output": run,
            "--sequence_length": 64,
            "--vocab_size": 512,
            "--max_steps": steps,
            "--save_interval": _SAVE_INTERVAL,
            "--eval_interval": 10**6,
            "--log_interval": 1,
        }
        words = [str(word) for pair in options.items() for word in pair]
        command = [sys.executable, "-m", "wavemare", "train", "gpt", *words]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [*(link.enter if link is not None else []), *command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"},
                start_new_session=True,
            )

    def _train(self, job: subprocess.Popen[bytes], losses: Losses, link: Link | None) -> None:
        """Follow the run to its end, with faults on the way, in a thread of their own."""
        deadline = time.monotonic() + _START_S
        while not losses.by_step:
            if job.poll() is not None or time.monotonic() > deadline:
                raise LaunchError("soak", self.system, "the training did not begin", self._look)
            losses.update()
            time.sleep(_POLL_S)
        self._find_ranks(job, losses)
        started, stop = time.monotonic(), threading.Event()
        self._planned = draw_faults(self.minutes, RANKS, self.seed, links=link is not None)
        # It lives through all attempts, as no rank does.
        self._launcher = Sizes(job.pid, self.warmup_s)
        self._launcher.begin()
        failed: list[Exception] = []

        def inflict_all() -> None:
            try:
                self._inflict(started, stop, link)
            except Exception as error:  # told below: a soak without faults shows nothing
                failed.append(error)

        thread = threading.Thread(target=inflict_all)
        thread.start()
        try:
            next_sample = 0.0
            while (now := time.monotonic()) < started + self.minutes * 60:
                if job.poll() is not None:
                    reason = f"the job ended by itself with {job.returncode}"
                    raise LaunchError("soak", self.system, reason, self._look)
                losses.update()
                if now >= next_sample:
                    next_sample = now + _SAMPLE_S
                    self._find_ranks(job, losses)
                    for sizes in (*self._sizes.values(), self._launcher):
                        sizes.sample()
                if failed:
                    raise failed[0]
                time.sleep(_POLL_S)
        finally:
            stop.set()
            thread.join()
        if failed:  # since the last look
            raise failed[0]
        self._await_steps(job, losses)

    def _inflict(self, started: float, stop: threading.Event, link: Link | None) -> None:
        """Let what is planned befall the ranks, each at its time, until the run stops."""
        for fault in self._planned:
            if stop.wait(max(0.0, started + fault.at_s - time.monotonic())):
                return
            if inflict(fault, list(self._ranks), link):
                self.inflicted.append(fault)
                self.note(f"{fault.at_s:6.0f} s: {fault.kind} {fault.seconds:.1f} s")

    def _await_steps(self, job: subprocess.Popen[bytes], losses: Losses) -> None:
        """Wait until the ranks train again, if they have just died."""
        deadline, lines = time.monotonic() + _START_S, losses.lines
        while losses.lines <= lines:
            if job.poll() is not None or time.monotonic() > deadline:
                raise LaunchError("soak", self.system, "the training did not go on", self._look)
            losses.update()
            time.sleep(_POLL_S)

    @property
    def _look(self) -> str:
        return f"Look at {self.folder / 'log'}"

    def _find_ranks(self, job: subprocess.Popen[bytes], losses: Losses) -> None:
        """Find the processes that train; those of a new attempt begin a record of their own."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.Process(job.pid).children(recursive=True):
            with suppress(psutil.Error):
                options = [w for w in process.cmdline() if w.startswith("--local_rank=")]
                if options and "--deepspeed_config" in process.cmdline():
                    found[int(options[0].partition("=")[2])] = process
        self._ranks = [found[rank] for rank in sorted(found)] if len(found) == RANKS else []
        for process in self._ranks:
            if process.pid not in self._sizes:
                self._sizes[process.pid] = Sizes(process.pid, self.warmup_s)
                self._lines_before = losses.lines
            elif losses.lines > self._lines_before:
                self._sizes[process.pid].begin()

    def _stop(self, job: subprocess.Popen[bytes]) -> int:
        """End the training as a scheduler does, by a checkpoint; return the exit code."""
        job.send_signal(signal.SIGTERM)
        try:
            return job.wait(_END_S)
        except subprocess.TimeoutExpired:
            reason = f"SIGTERM did not end it within {_END_S:g} s"
            raise LaunchError("soak", self.system, reason, self._look) from None

    def _reference(self) -> dict[int, float]:
        """Return the first losses of a run that is left in peace."""
        run = self.folder / "reference"
        job = self._start(run, None, steps=self.reference_steps)
        try:
            with suppress(subprocess.TimeoutExpired):  # as many steps as there are then
                job.wait(_START_S + self.minutes * 60)
        finally:
            _end_all(job)
        losses = Losses(run / "metrics.jsonl")
        losses.update()
        return losses.by_step


def _count(faults: Sequence[Fault]) -> dict[str, int]:
    return {k: sum(f.kind == k for f in faults) for k in ("pause", "kill", "slow link")}


def _end_all(job: subprocess.Popen[bytes]) -> None:
    if job.poll() is None:
        with suppress(psutil.NoSuchProcess):
            for process in psutil.Process(job.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        job.kill()
        job.wait()
