# SPDX-License-Identifier: Apache-2.0
"""A rank of ``wavemare bench local-steps``: rounds of training steps, then losses over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavemare.bench.local_steps.request import BASELINE, BOUND, FRAGMENTS, LocalStepsRequest
from wavemare.bench.local_steps.systems import System, build_system
from wavemare.bench.ranks import interleaved, ratio_row
from wavemare.bench.sparse.step import StepSample, run_round
from wavemare.errors import DataError
from wavemare.observe import Screen
from wavemare.parallel.planner.local_steps import SlowLink

_POINTS = 16
_WARMUP = 0.05
_EVAL_BATCHES = 16
_SUCCESSORS = 16


def measure(request: LocalStepsRequest) -> dict[str, Any]:
    """Build all systems, run all rounds and return the result."""
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    data = _Batches(request)
    systems = {}
    for name in (*_measured(request), BOUND):
        screen.note(f"building {name}")
        systems[name] = build_system(name, request, data.train, tunes=True)
    samples: dict[str, list[StepSample]] = {name: [] for name in systems}
    for timed, name in interleaved(request, list(systems), screen.note):
        system = systems[name]
        for _ in range(system.lead):
            system.step(data.train())
        sample = run_round(request, system, [data.train() for _ in range(request.steps(name))])
        system.drain()
        if timed:
            samples[name].append(sample)
    parameters = sum(p.numel() for p in systems[BOUND].model.parameters())
    tuned = systems[BASELINE].tuned if BASELINE in systems else {}
    for system in systems.values():
        system.close()
    return {**build_result(request, samples, parameters), "tuned": tuned}


def _measured(request: LocalStepsRequest) -> list[str]:
    return [name for name in request.systems if request.obstacle(name) is None]


def build_result(
    request: LocalStepsRequest, samples: Mapping[str, Sequence[StepSample]], parameters: int
) -> dict[str, Any]:
    """Return the result without command and machine."""
    seconds = {name: [s.seconds for s in rounds] for name, rounds in samples.items()}
    compute_s = median(seconds[BOUND])
    link = None
    if request.mbit is not None:
        link = SlowLink(
            parameters=parameters,
            replicas=request.ranks // request.ranks_per_host,
            ranks=request.ranks_per_host,
            mbit=request.mbit,
            step_s=compute_s,
        )
    rows = []
    for name, rounds in samples.items():
        steps = None if link is None else _predicted(name, link, request.every)
        through_link = [s.link_bytes for s in rounds if s.link_bytes is not None]
        rows.append(
            {
                "system": name,
                "ranks": request.ranks,
                "ranks_per_host": request.ranks_per_host,
                "mbit": request.mbit,
                **ratio_row(seconds[name], seconds.get(BASELINE)),
                "model": None if link is None or steps is None else link.dense / steps,
                "model_s": None if steps is None else steps * compute_s,
                "bytes": median(through_link) if through_link else None,
                "loss": rounds[-1].loss,
            }
        )
    return {
        "baseline": BASELINE,
        "request": request.model_dump(),
        "parameters": parameters,
        "compute_s": compute_s,
        "r": None if link is None else link.messages(),
        "rows": rows,
        "skipped": [
            {"system": name, "reason": reason}
            for name in request.systems
            if (reason := request.obstacle(name)) is not None
        ],
    }


def _predicted(name: str, link: SlowLink, every: int) -> float | None:
    """Return how many steps' computation the model predicts for a step; None if it does not."""
    if name in (BASELINE, "ddp"):
        return link.dense
    if name in ("ddp-powersgd-4", "wavemare-sparse-auto"):
        return None
    if name == BOUND:
        return 1.0
    streams = name.endswith("-streaming")
    return link.local(every, *((FRAGMENTS, every // FRAGMENTS) if streams else ()))


def measure_losses(request: LocalStepsRequest) -> dict[str, Any]:
    """Train each system by itself on the same data; return the curves, [[step, loss], ...]."""
    torch.set_num_threads(1)
    screen = Screen(rank=dist.get_rank())
    curves: dict[str, list[list[float]]] = {}
    for name in sorted(_measured(request), key=lambda name: name != BASELINE):
        screen.note(f"losses of {name}")
        data = _Batches(request)
        warmup = round(_WARMUP * request.quality)
        system = build_system(name, request, data.train, warmup=warmup)
        curves[name] = _train(request, system, data, warmup, curves.get(BASELINE))
        system.close()
    return {"curves": curves}


def _train(
    request: LocalStepsRequest,
    system: System,
    data: _Batches,
    warmup: int,
    baseline: list[list[float]] | None,
) -> list[list[float]]:
    curve: list[list[float]] = []
    interval = max(1, request.quality // _POINTS)
    for step in range(1, (1 if baseline is None else 2) * request.quality + 1):
        for group in system.optimizer.param_groups:
            group["lr"] = request.learning_rate * min(1.0, step / max(1, warmup))
        system.step(data.train())
        if step % interval == 0 or step == request.quality:
            curve.append([step, _evaluate(system.model, data.held_out)])
            if step >= request.quality and baseline and steps_to(curve, baseline[-1][1]):
                break
    return curve


def _evaluate(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> float:
    """Return the loss of the mean of all ranks' weights, and leave each rank its own."""
    ranks = dist.get_world_size()
    with torch.no_grad():
        own = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data.div_(ranks)
        loss = torch.stack([model(**batch).loss for batch in batches]).mean()
        for parameter, kept in zip(model.parameters(), own, strict=True):
            parameter.data.copy_(kept)
    dist.all_reduce(loss)
    return float(loss) / ranks


def add_losses(result: dict[str, Any], curves: Mapping[str, Any], steps: int) -> None:
    """Add to the rows each system's loss after so many steps, and its steps to the baseline's."""
    goal = curves[BASELINE][-1][1]
    for row in result["rows"]:
        if row["system"] in curves:
            curve = curves[row["system"]]
            loss = next(loss for step, loss in curve if step == steps)
            needed = steps_to(curve, goal)
            row |= {
                "eval_loss": loss,
                "loss_gap": loss / goal - 1,
                "steps_to_loss": needed,
                "time_to_loss_s": None if needed is None else needed * row["median_s"],
                "curve": curve,
            }


def steps_to(curve: Sequence[Sequence[float]], goal: float) -> float | None:
    """Return the step at which a curve first has a loss, between its points; None if never."""
    if curve[0][1] <= goal:
        return curve[0][0]
    for (before, high), (after, low) in pairwise(curve):
        if low <= goal:
            return before + (after - before) * (high - goal) / (high - low)
    return None


class _Batches:
    """Micro-batches of this rank, the same for each system.

    Attributes:
        held_out: To evaluate on.
    """

    def __init__(self, request: LocalStepsRequest) -> None:
        self._shape = (request.batch, request.sequence)
        self._words = request.vocabulary
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._generator = np.random.default_rng([request.seed, 0, rank])
        held = np.random.default_rng([request.seed, 1, rank])
        self._train = test = None
        if request.text is not None:
            data = np.frombuffer(Path(request.text).read_bytes(), np.uint8).astype(np.int64)
            cut = len(data) * 9 // 10
            self._train, test = data[:cut], data[cut:]
            if len(test) <= request.sequence:
                raise DataError("--text", request.text, "it is too short", "Give a longer one")
        self.held_out = [self._draw(held, test) for _ in range(_EVAL_BATCHES)]

    def train(self) -> dict[str, Tensor]:
        """Return the next one to train on."""
        return self._draw(self._generator, self._train)

    def _draw(self, generator: np.random.Generator, text: Any) -> dict[str, Tensor]:
        rows, length = self._shape
        if text is not None:
            starts = generator.integers(len(text) - length, size=(rows, 1))
            ids = text[starts + np.arange(length)]
        else:  # each word has some likely successors
            ids = generator.integers(self._words, size=self._shape)
            chosen = np.minimum(generator.geometric(0.3, size=self._shape), _SUCCESSORS)
            for column in range(1, length):
                ids[:, column] = (ids[:, column - 1] * 31 + chosen[:, column]) % self._words
        tokens = torch.from_numpy(ids)
        return {"input_ids": tokens, "labels": tokens}
