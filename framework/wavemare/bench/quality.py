# SPDX-License-Identifier: Apache-2.0
"""What asynchronous pipelines learn at equal tokens, method by method: simulations in one table."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.bench.picture import drawing
from wavemare.errors import LaunchError
from wavemare.observe.run import read_metrics

__all__ = ["SYSTEMS", "System", "draw", "simulate_all", "to_row"]

_PIPELINE = "wavemare.pipeline"
_PIPEMARE = f"{_PIPELINE}.pipemare"
_CORRECTION = f"{_PIPEMARE}.discrepancy_correction.mode"
_FEEDBACK = f"{_PIPEMARE}.error_feedback=true"
_SOAP = ("optimizer.type=SOAP",)
_MUON = ("optimizer.type=Muon", "optimizer.params.adjust_lr_fn=match_rms_adamw")
# torch's begins with half of beta1: so large a momentum_decay makes it whole from the first step.
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
        settings: Changes of the configuration, KEY.KEY=VALUE, on top of PipeMare with AdamW and no
            synchronous steps.
        correction: Mode of the discrepancy correction; None leaves it to the policy.
        delays: Of `wavemare.simulation.Delays`.
        warmup: Share of the steps that are synchronous (T3).
        anneal: Share of the steps in which the rate is rescheduled (T1).
        flushes: Whether it is synchronous: then stages and micro-batches make no difference.
        baseline: The synchronous system with the same optimizer.
    """

    settings: tuple[str, ...] = ()
    correction: str | None = "off"
    delays: str = "pipeline"
    warmup: float = 0.0
    anneal: float = 0.0
    flushes: bool = False
    baseline: str = "flush"


SYSTEMS: Mapping[str, System] = {
    "flush": System(flushes=True),
    "flush-soap": System(_SOAP, flushes=True, baseline="flush-soap"),
    "flush-muon": System(_MUON, flushes=True, baseline="flush-muon"),
    "flush-nadam": System(_NADAM, flushes=True, baseline="flush-nadam"),
    "naive": System(),
    "t1": System(anneal=0.25),
    "t2": System(correction="ema"),
    "t1+t2": System(correction="ema", anneal=0.25),
    "t1+t2+t3": System(correction="ema", anneal=0.25, warmup=0.2),
    "stashing": System(correction="exact"),
    "2bw": System(correction="exact", delays="one-step"),
    "prediction": System(correction="predict"),
    "nadam": System(_NADAM, baseline="flush-nadam"),
    "feedback": System((_FEEDBACK,)),
    "soap": System(_SOAP, correction="auto", baseline="flush-soap"),
    "soap+feedback": System((*_SOAP, _FEEDBACK), correction="auto", baseline="flush-soap"),
    "muon": System(_MUON, correction="auto", baseline="flush-muon"),
    "muon+feedback": System((*_MUON, _FEEDBACK), correction="auto", baseline="flush-muon"),
    "auto": System((f"{_PIPEMARE}.optimizer_policy=auto",), correction=None, baseline="flush-soap"),
}
"""By name. ``flush`` is any synchronous schedule; ``naive`` PACI; ``stashing`` PipeDream; ``2bw``
PipeDream-2BW; ``prediction`` PipeOptim; ``auto`` what the policy makes of AdamW."""


# Matplotlib's ten would come again from the eleventh system on.
_COLOURS = [
    *("tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown", "tab:pink"),
    *("tab:gray", "tab:olive", "tab:cyan", "black", "gold", "navy", "lime", "darkred", "teal"),
    *("magenta", "peru", "slateblue"),
]


def simulate_all(
    systems: Sequence[str],
    seeds: Iterable[int],
    *,
    recipe: str,
    stages: int,
    micro_batches: int,
    steps: int,
    options: Sequence[str],
    folder: Path,
    jobs: int,
    note: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Simulate each system with each seed, several at a time; what is there already is taken.

    Args:
        systems: Names of `SYSTEMS`.
        seeds: Of weights and data order.
        recipe: gpt or bert.
        stages: Length of the pipeline.
        micro_batches: Per optimizer step.
        steps: Optimizer steps.
        options: More options of ``wavemare simulate``; the same ones for all runs in the folder.
        folder: Of the runs; synchronous ones serve all numbers of stages and micro-batches.
        jobs: Processes at a time.
        note: Told of each run that ends.

    Returns:
        For each run ``system``, ``seed``, ``held_out_loss``, ``seconds``, ``memory`` and ``curve``,
        pairs of step and held-out loss.

    Raises:
        LaunchError: A simulation failed.
    """

    def one(case: tuple[str, int]) -> dict[str, Any]:
        name, seed = case
        flushes = SYSTEMS[name].flushes
        place = "synchronous" if flushes else f"{stages}x{micro_batches}"
        run = folder / f"{recipe}-{steps}-{place}-{name}-{seed}"
        if not (run / "summary.json").is_file():
            shape = (1, 1) if flushes else (stages, micro_batches)
            command = _command(SYSTEMS[name], recipe, *shape, steps, seed, run)
            _run([*command, *options], run)
        found = {"system": name, "seed": seed, **_read(run)}
        note(f"{run.name}: {found['held_out_loss']:.4f}")
        return found

    cases = [(name, seed) for seed in seeds for name in systems]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, cases))


def _command(
    system: System, recipe: str, stages: int, micro_batches: int, steps: int, seed: int, run: Path
) -> list[str]:
    changes = [
        f"{_PIPELINE}.schedule=pipemare",
        f"{_PIPEMARE}.warmup_steps={round(system.warmup * steps)}",
        *system.settings,
    ]
    if system.correction is not None:
        changes.append(f"{_CORRECTION}={system.correction}")
    if system.anneal:
        changes += [
            f"{_PIPEMARE}.lr_rescheduling.enabled=true",
            f"{_PIPEMARE}.lr_rescheduling.anneal_steps={round(system.anneal * steps)}",
        ]
    words = {
        "--stages": stages,
        "--micro_batches": micro_batches,
        "--delays": system.delays,
        "--max_steps": steps,
        "--eval_interval": max(1, steps // 16),
        "--seed": seed,
        "--output": run,
    }
    options = [word for name, value in words.items() for word in (name, str(value))]
    program = [sys.executable, "-m", "wavemare", "simulate", recipe]
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
    curve = [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line]
    return {
        "held_out_loss": figures["eval_loss"],
        "bigram": figures.get("bigram cross-entropy"),
        "seconds": figures["seconds"],
        "memory": figures["memory"],
        "curve": curve,
    }


def to_row(name: str, runs: Sequence[Mapping[str, Any]], **parameters: Any) -> dict[str, Any]:
    """Return one system's figures over its seeds.

    Args:
        name: Of `SYSTEMS`.
        runs: Of all systems and seeds.
        parameters: Added to the row, such as ``stages``.

    Returns:
        Beside these: mean and largest deviation of the held-out loss, its ``gap`` to ``flush`` and
        ``own_gap`` to the synchronous system with the same optimizer (relative, mean over seeds),
        the steps to the final loss of ``flush`` (None if a seed never comes there), and
        ``memory``, in weights: of the optimizer's states and of the correction.
    """
    own = {run["seed"]: run for run in runs if run["system"] == name}
    losses = [run["held_out_loss"] for run in own.values()]
    mean = statistics.fmean(losses)
    return {
        "system": name,
        **parameters,
        "seeds": len(losses),
        "held_out_loss": mean,
        "deviation": max(abs(loss - mean) for loss in losses),
        "gap": _gap(own, runs, "flush"),
        "own_gap": _gap(own, runs, SYSTEMS[name].baseline),
        "steps_to_flush": _steps(own, runs),
        "memory": next(iter(own.values()))["memory"],
    }


def _gap(
    own: Mapping[int, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]], baseline: str
) -> float | None:
    others = {run["seed"]: run["held_out_loss"] for run in runs if run["system"] == baseline}
    gaps = [r["held_out_loss"] / others[seed] - 1 for seed, r in own.items() if seed in others]
    return statistics.fmean(gaps) if gaps else None


def _steps(own: Mapping[int, Mapping[str, Any]], runs: Sequence[Mapping[str, Any]]) -> float | None:
    finals = {run["seed"]: run["held_out_loss"] for run in runs if run["system"] == "flush"}
    reached = [steps_to(run["curve"], finals[seed]) for seed, run in own.items() if seed in finals]
    return statistics.fmean(reached) if reached and math.isfinite(max(reached)) else None


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Return the step at which a curve first is at a loss, on straight lines; inf if never.

    Args:
        curve: Pairs of step and loss.
        loss: To be reached.
    """
    before: Sequence[float] | None = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] <= loss:
                return float(step)
            return before[0] + (before[1] - loss) / (before[1] - value) * (step - before[0])
        before = (step, value)
    return math.inf


def draw(file: Path, runs: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the held-out losses over the steps, each system's mean over its seeds."""
    with drawing(file, figsize=(9, 5)) as axes:
        axes.set_prop_cycle(color=_COLOURS)
        for name in dict.fromkeys(run["system"] for run in runs):
            curves = [run["curve"] for run in runs if run["system"] == name]
            steps = [step for step, _ in curves[0]]
            means = [statistics.fmean(c[i][1] for c in curves) for i in range(len(steps))]
            axes.plot(steps, means, label=name, linestyle="--" if SYSTEMS[name].flushes else "-")
        bigram = runs[0].get("bigram")
        if bigram is not None:
            axes.axhline(bigram, color="grey", linewidth=0.8, label="bigrams")
        axes.set(xlabel="optimizer steps", ylabel="held-out loss (nats per token)", title=title)
        handles, labels = axes.get_legend_handles_labels()
        order = sorted(range(len(labels)), key=lambda i: -handles[i].get_ydata()[-1])  # as they end
        axes.legend(
            [handles[i] for i in order],
            [labels[i] for i in order],
            fontsize=7,
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
        )
