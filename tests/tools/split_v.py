# SPDX-License-Identifier: Apache-2.0
"""What PipeMare's pipeline of 8 ranks learns if ranks have two stages in a V and split passes.

The GPT of ``docs/results/async-quality.md``, cut into 16 stages: a block is two, its attention and
its MLP. Both pipelines are replayed on these, with the delays of their stages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Sequence
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.models.chains import GPT2BlockLayer
from wavemare.recipes import simulate
from wavemare.simulation import SimulatedPipeline
from wavemare.simulation.quality import SYSTEMS

STEPS, RANKS, BLOCKS = 800, 8, 8
PERIOD = 6  # ticks; a stage of a V has one for each of F, B and W
OPTIONS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 2 --vocab_size 320 --sequence_length 64 "
    "--lr 8e-3 --deepspeed_config recipes/gpt/pretrain.json"
)


def v_delays(end: str) -> list[int]:
    """Return the delays of a V's stages at full use, as `PERIOD` repeats without an idle tick.

    Each pass takes the first tick that is free on its rank. A stage steps behind its last W, so
    that a gradient is as late as its W; the design of the schedules counts to B.

    Args:
        end: The pass to which the delay counts, "B" or "W".
    """
    stages = range(2 * RANKS)
    taken: list[set[int]] = [set() for _ in range(RANKS)]
    start: dict[tuple[str, int], int] = {}
    tick = 0
    for kind, stage in [*product("F", stages), *product("BW", reversed(stages))]:
        if kind == "W":
            tick = start["B", stage] + 1
        busy = taken[min(stage, stages[-1] - stage)]
        while tick % PERIOD in busy:
            tick += 1
        start[kind, stage] = tick
        busy.add(tick % PERIOD)
        tick += 1
    return [(start[end, stage] - start["F", stage]) // PERIOD for stage in stages]


PIPELINES = {
    "1F1B": [delay for delay in range(RANKS - 1, -1, -1) for _ in range(2)],
    "V": v_delays("W"),
    "V, W at once": v_delays("B"),
}


class Half(GPT2BlockLayer):
    """Attention or MLP of a block of GPT-2, with its norm."""

    def __init__(self, layer: GPT2BlockLayer, names: Sequence[str]) -> None:
        parts = nn.ModuleDict({name: getattr(layer.block, name) for name in names})
        super().__init__(layer.inputs, parts, layer.context)

    def run(self, hidden: Tensor, sides: Any) -> Tensor:
        """Add what the half makes of its normalized input."""
        norm, inner = self.block.values()
        given = {"attention_mask": self.context.mask("full_attention", hidden, sides)}
        result = inner(norm(hidden), **given if "attn" in self.block else {})
        return hidden + (result[0] if "attn" in self.block else result)


class HalvedPipeline(SimulatedPipeline):
    """A simulated pipeline with two stages for each block."""

    until = STEPS

    def cut(self, model: Any, pipeline: Any) -> list[nn.Module]:
        """Return the stages."""
        layers = [layer for stage in super().cut(model, pipeline) for layer in stage.children()]
        place = [isinstance(layer, GPT2BlockLayer) for layer in layers].index(True)
        halves: list[nn.Module] = [
            Half(layer, names)
            for layer in layers
            if isinstance(layer, GPT2BlockLayer)
            for names in (("ln_1", "attn"), ("ln_2", "mlp"))
        ]
        halves[0] = nn.Sequential(*layers[:place], halves[0])
        halves[-1] = nn.Sequential(halves[-1], *layers[place + BLOCKS :])
        return halves

    def train_batch(self, batches: Any) -> float:
        """Train one step, if the run shall have it."""
        if self.global_steps == self.until:
            sys.exit()
        return super().train_batch(batches)


def train(case: dict[str, Any], until: int, run: Path) -> None:
    """Simulate a pipeline in this process."""
    HalvedPipeline.until = until
    system = SYSTEMS[case["system"]]
    settings = ["schedule=pipemare", "pipemare.warmup_steps=0", "pipemare.optimizer_policy=keep"]
    settings = [f"wavemare.pipeline.{each}" for each in settings]
    if system.correction is not None:
        mode = f"wavemare.pipeline.pipemare.discrepancy_correction.mode={system.correction}"
        settings.append(mode)
    sizes = {"stages": RANKS, "micro_batches": case["micro_batches"], "max_steps": STEPS}
    sizes |= {"seed": case["seed"], "eval_interval": STEPS // 4, "output": run}
    words = [str(word) for name, size in sizes.items() for word in (f"--{name}", size)]
    sys.argv = ["simulate", "gpt", *words, *OPTIONS.split(), "--set", *settings, *system.settings]
    torch.set_num_threads(1)
    delays = [0] * 2 * RANKS if system.flushes else PIPELINES[case["pipeline"]]
    simulate.main(partial(HalvedPipeline, delays=delays))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--until", type=int, default=STEPS, help="step at which a run ends")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--systems", nargs="+", default=["flush", "flush-soap", "naive", "auto"])
    parser.add_argument("--pipelines", nargs="+", default=["1F1B", "V"], choices=PIPELINES)
    parser.add_argument("--runs", type=Path, default=Path("runs/split-v"))
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    print(PIPELINES)
    report: dict[str, Any] = {"machine": "2 x86-64 cores, 24 GiB, no GPU", "records": []}
    if options.json.exists():
        report = json.loads(options.json.read_text())
    report["delays"] = PIPELINES
    axes = options.seeds, options.micro_batches, options.systems, options.pipelines
    for seed, micro_batches, system, pipeline in product(*axes):
        case = {"until": options.until, "seed": seed, "system": system}
        flushes = SYSTEMS[system].flushes
        case |= {"micro_batches": 1 if flushes else micro_batches}
        case |= {"pipeline": "any" if flushes else pipeline}
        if any(case.items() <= record.items() for record in report["records"]):
            continue
        run = options.runs / "-".join(map(str, case.values())).replace(" ", "_")
        if not (run / "metrics.jsonl").exists():
            start = multiprocessing.get_context("spawn").Process
            process = start(target=train, args=(case, options.until, run))
            process.start()
            process.join()
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        curve = [[line["step"], line["eval_loss"]] for line in lines if "eval_loss" in line]
        report["records"].append({**case, "date": str(date.today()), "eval_loss": curve})
        options.json.parent.mkdir(exist_ok=True, parents=True)
        options.json.write_text(json.dumps(report) + "\n")
        print(case, curve[-1], flush=True)


if __name__ == "__main__":
    main()
