# SPDX-License-Identifier: Apache-2.0
"""Losses of asynchronous pipelines at equal tokens: ``wavemare simulate --systems``."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.errors import LaunchError
from wavemare.observe.lines import read_metrics
from wavemare.observe.tables import Column, drawing
from wavemare.pipeline.staleness.staleness import largest_staleness, policy_optimizer

_PIPELINE = "wavemare.pipeline"
_PIPEMARE = f"{_PIPELINE}.pipemare"
_CORRECTION = f"{_PIPEMARE}.discrepancy_correction.mode"
_FEEDBACK = f"{_PIPEMARE}.error_feedback=true"
_SOAP = ("optimizer.type=SOAP",)
_MUON = ("optimizer.type=Muon", "optimizer.params.adjust_lr_fn=match_rms_adamw")
# torch's begins with half of beta1: with so large a momentum_decay it is whole from the first step.
_NADAM = (
    "optimizer.type=NAdam",
    "optimizer.params.betas=[0.99,0.999]",
    "optimizer.params.momentum_decay=1000.0",
    "optimizer.params.decoupled_weight_decay=true",
)


@dataclass(frozen=True)
class System:
    """A way to train.

    Args:
        settings: Changes of the configuration, KEY.KEY=VALUE, of PipeMare with AdamW and without
            synchronous steps.
        correction: Mode of the discrepancy correction; None leaves it to the policy.
        delays: Of `wavemare.simulation.Delays`.
        warmup: Share of the steps that are synchronous (T3).
        anneal: Share of the steps in which the rate is rescheduled (T1).
        flushes: Whether it is synchronous.
        baseline: The synchronous system with the same optimizer.
    """

    settings: tuple[str, ...] = ()
    correction: str | None = "off"
    delays: str = "pipeline"
    warmup: float = 0.0
    anneal: float = 0.0
    flushes: bool = False
    baseline: str = "flush"

    @property
    def place(self) -> str | None:
        """What runs of all stages and micro-batches share; None if these make a difference.

        A synchronous step, and one whose gradients are all one step old, has the gradient of the
        whole batch at the same weights, however it is cut.
        """
        if self.flushes:
            return "synchronous"
        return self.delays if self.delays == "one-step" else None


SYSTEMS: Mapping[str, System] = {
    "flush": System(flushes=True),
    "flush-soap": System(_SOAP, flushes=True, baseline="flush-soap"),
    "flush-muon": System(_MUON, flushes=True, baseline="flush-muon"),
    "flush-nadam": System(_NADAM, flushes=True, baseline="flush-nadam"),
    "naive": System(),
    "naive+muon": System(_MUON, baseline="flush-muon"),
    "t1": System(anneal=0.25),
    "t2": System(correction="ema"),
    "t1+t2": System(correction="ema", anneal=0.25),
    "t1+t2+t3": System(correction="ema", anneal=0.25, warmup=0.2),
    "stashing": System(correction="exact"),
    "2bw": System(correction="exact", delays="one-step"),
    "2bw+muon": System(_MUON, correction="exact", delays="one-step", baseline="flush-muon"),
    "prediction": System(correction="predict"),
    "nadam": System(_NADAM, baseline="flush-nadam"),
    "feedback": System((_FEEDBACK,)),
    "basis-rotation": System(_SOAP, correction="exact", baseline="flush-soap"),
    "soap": System(_SOAP, correction="auto", baseline="flush-soap"),
    "soap+feedback": System((*_SOAP, _FEEDBACK), correction="auto", baseline="flush-soap"),
    "muon": System(_MUON, correction="auto", baseline="flush-muon"),
    "muon+feedback": System((*_MUON, _FEEDBACK), correction="auto", baseline="flush-muon"),
    "muon+feedback+off": System((*_MUON, _FEEDBACK), baseline="flush-muon"),
    "muon+feedback+prediction": System(
        (*_MUON, _FEEDBACK), correction="predict", baseline="flush-muon"
    ),
    "auto": System((f"{_PIPEMARE}.optimizer_policy=auto",), correction=None, baseline="flush-muon"),
}
"""By name. ``flush`` is any synchronous schedule; ``naive`` PACI; ``stashing`` PipeDream; ``2bw``
PipeDream-2BW; ``prediction`` PipeOptim; ``basis-rotation`` Adam in the eigenbasis of both sides of
each matrix, with PipeDream's copies; ``auto`` what the policy makes of AdamW."""

COLUMNS = {
    "system": Column("system"),
    "validation loss": Column("eval_loss", ".4f"),
    "deviation": Column("deviation", ".4f"),
    "gap": Column("gap", "+.2%"),
    "gap to its own": Column("own_gap", "+.2%"),
    "worst": Column("worst_own_gap", "+.2%"),
    "memory": Column("memory_total", ".2f"),
}


@dataclass(frozen=True)
class Shape:
    """What all simulations have in common."""

    recipe: str
    stages: int
    micro_batches: int
    steps: int


def simulate_all(
    systems: Sequence[str],
    seeds: Iterable[int],
    shape: Shape,
    *,
    options: Sequence[str],
    folder: Path,
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Simulate each system with each seed, unless its run is there already.

    A run that was stopped goes on from its checkpoint.

    Args:
        systems: Names of `SYSTEMS`.
        seeds: Of weights and data order.
        shape: Of the simulations.
        options: More options of ``wavemare simulate``.
        folder: Of the runs; those with a `System.place` serve all stages and micro-batches.
        note: Shows a line for each run.

    Returns:
        For each run ``system``, ``seed``, ``eval_loss``, ``bigram``, ``seconds``, ``memory``
        and ``curve``, pairs of step and validation loss.

    Raises:
        LaunchError: A simulation failed.
    """
    found = []
    mark = zlib.crc32(repr(list(map(str, options))).encode())
    for seed in seeds:
        for name in systems:
            own = SYSTEMS[name]
            size = (1, 1) if own.place else (shape.stages, shape.micro_batches)
            place = own.place or "{}x{}".format(*size)
            run = folder / f"{shape.recipe}-{shape.steps}-{place}-{name}-{seed}-{mark:08x}"
            if not (run / "summary.json").is_file():
                stopped = (run / "checkpoints" / "simulation.pt").is_file()
                resume = ["--resume"] if stopped else []
                _run([*_command(own, shape, size, seed, run), *options, *resume], run)
            found.append({"system": name, "seed": seed, **_read(run)})
            note(f"{run.name}: {found[-1]['eval_loss']:.4f}")
    return found


def _command(
    system: System, shape: Shape, size: tuple[int, int], seed: int, run: Path
) -> list[str]:
    changes = [
        f"{_PIPELINE}.schedule=pipemare",
        f"{_PIPEMARE}.warmup_steps={round(system.warmup * shape.steps)}",
        f"{_PIPEMARE}.optimizer_policy=keep",
        *system.settings,
    ]
    if system.correction is not None:
        changes.append(f"{_CORRECTION}={system.correction}")
    if system.anneal:
        changes += [
            f"{_PIPEMARE}.lr_rescheduling.enabled=true",
            f"{_PIPEMARE}.lr_rescheduling.anneal_steps={round(system.anneal * shape.steps)}",
        ]
    words = {
        "--stages": size[0],
        "--micro_batches": size[1],
        "--delays": system.delays,
        "--max_steps": shape.steps,
        "--eval_interval": max(1, shape.steps // 16),
        "--seed": seed,
        "--output": run,
    }
    options = [str(word) for pair in words.items() for word in pair]
    program = [sys.executable, "-m", "wavemare", "simulate", shape.recipe]
    return [*program, *options, "--set", *changes]


def _run(command: list[str], run: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        reason = f"it ended with {done.returncode}: {''.join(last).rstrip('.?')}"
        raise LaunchError("wavemare simulate", run.name, reason, "Run it by itself")


def _read(run: Path) -> dict[str, Any]:
    figures = json.loads((run / "summary.json").read_text(encoding="utf-8"))["results"]
    lines = read_metrics(run / "metrics.jsonl")
    return {
        "eval_loss": figures["eval_loss"],
        "bigram": figures.get("bigram cross-entropy"),
        "seconds": figures["seconds"],
        "memory": figures["memory"],
        "curve": [[n["step"], n["eval_loss"]] for n in lines if "eval_loss" in n],
    }


def to_row(name: str, runs: Sequence[Mapping[str, Any]], **parameters: Any) -> dict[str, Any]:
    """Return one system's figures over its seeds.

    Returns:
        Beside these: mean and largest deviation of the validation loss, its ``gap`` to ``flush``
        and ``own_gap`` to the synchronous system with the same optimizer (relative, mean over
        seeds; ``worst_own_gap`` is the largest), and ``memory``, in weights: of the optimizer's
        states and of the correction.
    """
    own = {run["seed"]: run["eval_loss"] for run in runs if run["system"] == name}
    mean = statistics.fmean(own.values())
    memory = next(run["memory"] for run in runs if run["system"] == name)
    own_gaps = _gaps(own, runs, _baseline(name, parameters))
    return {
        "system": name,
        **parameters,
        "seeds": len(own),
        "eval_loss": mean,
        "deviation": max(abs(loss - mean) for loss in own.values()),
        "gap": _mean(_gaps(own, runs, "flush")),
        "own_gap": _mean(own_gaps),
        "worst_own_gap": max(own_gaps, default=None),
        "memory": memory,
        "memory_total": memory["optimizer"] + memory["correction"],
    }


def _baseline(name: str, parameters: Mapping[str, Any]) -> str:
    """Return the synchronous system with the optimizer of a system, also if the policy chose it."""
    worst, _ = largest_staleness(*(parameters.get(key, 1) for key in ("stages", "micro_batches")))
    own = SYSTEMS[name].baseline
    return f"flush-{policy_optimizer(worst).lower()}" if name == "auto" and worst else own


def _gaps(
    own: Mapping[int, float], runs: Sequence[Mapping[str, Any]], baseline: str
) -> list[float]:
    others = {run["seed"]: run["eval_loss"] for run in runs if run["system"] == baseline}
    return [loss / others[seed] - 1 for seed, loss in own.items() if seed in others]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def draw(file: Path, runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the validation losses over the steps, each system's mean over its seeds."""
    from matplotlib import colormaps

    with drawing(file, figsize=(9, 5)) as axes:
        for number, name in enumerate(dict.fromkeys(run["system"] for run in runs)):
            curves = [run["curve"] for run in runs if run["system"] == name]
            steps = [step for step, _ in curves[0]]
            means = [statistics.fmean(c[i][1] for c in curves) for i in range(len(steps))]
            style = "--" if SYSTEMS[name].flushes else "-"
            axes.plot(steps, means, style, label=name, color=colormaps["tab20"](number % 20))
        if runs[0].get("bigram") is not None:
            axes.axhline(runs[0]["bigram"], color="grey", linewidth=0.8, label="bigrams")
        axes.set(xlabel="optimizer steps", ylabel="validation loss (nats per token)", title=title)
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
