# SPDX-License-Identifier: Apache-2.0
"""A rank of ``benchmarks losses``: train all systems in turns, and evaluate them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, islice
from statistics import median
from typing import Any

import torch.distributed as dist

from benchmarks.curve import first_at
from benchmarks.losses.request import LossesRequest
from benchmarks.pipeline.request import BASELINE, PipelineRequest
from benchmarks.pipeline.systems import BUILDERS, EngineRunner, Place
from benchmarks.pipeline.workloads import Batch, GPTWorkload
from benchmarks.ranks import interleaved
from wavemare.cli.train import find_recipe
from wavemare.data.loader import ResumableLoader, evaluation_batches
from wavemare.engine.launch.group import gather
from wavemare.models.timing import device_time
from wavemare.observe import Screen
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.training.text import TrainingText, find_data, read_text

_RISE = 0.1  # of the steps, as in the recipes


class TextWorkload(GPTWorkload):
    """The GPT, on text, with the settings of the recipe ``gpt/pretrain``.

    All processes must build it at the same time.

    Attributes:
        held_out: Micro-batches to evaluate.
    """

    def __init__(self, request: LossesRequest, text: TrainingText) -> None:
        sizes = {"layers", "hidden", "heads", "vocabulary", "sequence", "batch", "stages"}
        super().__init__(PipelineRequest(**request.model_dump(include=sizes)))
        train, validation = text.causal_samples(request.sequence, num_samples=0, seed=request.seed)
        loader = ResumableLoader(
            train,
            micro_batch_size=request.batch,
            data_rank=0,
            data_world_size=1,
            seed=request.seed,
        )
        self.batches = list(map(_pair, islice(loader, request.steps * request.micro_batches)))
        held_out = evaluation_batches(validation, request.batch, limit=request.eval_samples)
        self.held_out = list(map(_pair, held_out))
        recipe = json.loads(find_recipe("gpt").config.read_text(encoding="utf-8"))
        self.adamw = recipe["optimizer"]["params"]
        self.rates = {"AdamW": request.adamw_lr, "Muon": request.muon_lr}
        scheduler = recipe["scheduler"]
        rise = max(1, round(_RISE * request.steps))
        scheduler["params"] |= {"total_num_steps": request.steps, "warmup_num_steps": rise}
        self.settings = {key: recipe[key] for key in ("gradient_clipping", "scheduler")}


def _pair(sample: Any) -> Batch:
    return sample["input_ids"], sample["labels"]


def measure(request: LossesRequest) -> dict[str, Any]:
    """Build all systems, train them in turns and return the result."""
    rank = dist.get_rank()
    screen = Screen(rank=rank)
    arguments = PretrainArguments(vocab_size=request.vocabulary)
    text = read_text(find_data(arguments), arguments, special_tokens="gpt")
    workload = TextWorkload(request, text)
    place = Place(rank, request.stages, request.micro_batches)
    runners: dict[str, Any] = {}
    for name in request.systems:
        screen.note(f"building {name}")
        runners[name] = BUILDERS[name](workload, place)
    seconds: dict[str, list[float]] = {name: [] for name in runners}
    losses: dict[str, list[float]] = {name: [] for name in runners}
    for _, name in interleaved(request, list(runners), screen.note):
        seconds[name].append(_train(runners[name], request.steps_per_round))
        losses[name].append(_evaluate(runners[name], workload.held_out))
        screen.note(f"{name}: {losses[name][-1]:.4f} after {sum(seconds[name]):.1f} s")
    results, _ = text.baselines(request.sequence, request.eval_samples)
    return {
        "baseline": BASELINE,
        "request": request.model_dump(mode="json"),
        "text": text.source.name,
        "bigram": results.get("bigram cross-entropy"),
        "rows": build_rows(request, seconds, losses),
    }


def _train(runner: EngineRunner, steps: int) -> float:
    """Train some steps to their end, in which an asynchronous pipeline empties too.

    Returns:
        The seconds of the slowest rank.
    """
    dist.barrier()
    started = device_time()
    for _ in range(steps):
        runner.step()
    runner.drain()
    return max(gather(device_time() - started))


def _evaluate(runner: EngineRunner, batches: Sequence[Batch]) -> float:
    return float(runner.engine.eval_batch(iter(batches), num_micro_batches=len(batches)))


def build_rows(
    request: LossesRequest,
    seconds: dict[str, list[float]],
    losses: dict[str, list[float]],
) -> list[dict[str, Any]]:
    """Return a row for each system.

    Args:
        request: What was measured.
        seconds: Of each system's rounds.
        losses: After them.
    """
    goal = losses[BASELINE][-1] if BASELINE in losses else None
    each = request.steps_per_round
    rows = []
    for name, own in seconds.items():
        ends = list(accumulate(own))
        reached = (
            None if goal is None else first_at(list(zip(ends, losses[name], strict=True)), goal)
        )
        steps = range(each, request.steps + 1, each)
        rows.append(
            {
                "system": name,
                "stages": request.stages,
                "micro_batches": request.micro_batches,
                "rate": request.rate(name),
                "steps": request.steps,
                "eval_loss": losses[name][-1],
                "seconds": ends[-1],
                "median_s": median(own) / each,
                "ratio": median(seconds[BASELINE]) / median(own) if BASELINE in seconds else None,
                "seconds_to_loss": reached,
                "sooner": sum(seconds[BASELINE]) / reached if reached else None,
                "rounds_s": [spent / each for spent in own],
                "curve": [list(point) for point in zip(steps, ends, losses[name], strict=True)],
            }
        )
    return rows
