# SPDX-License-Identifier: Apache-2.0
"""What pipelines learn with PipeMare's own optimizer, SGD with momentum: images of digits.

A residual network of 20 layers is cut into stages and trained version by version, with one
micro-batch per step. Each method's learning rate is tuned on one fold. Results join those in the
file; what is there is not repeated. Many runs train side by side in one model: its weights have a
dimension for them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import MultiStepLR

from wavemare.pipeline.staleness.replay import Replay

FOLDS, SEEDS, TUNING_SEEDS = 5, 5, 2
LAYERS, WIDTH, PIXELS, CLASSES = 20, 32, 64, 10
BATCH, EPOCHS, DECAY_EPOCH = 32, 20, 14
RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
T1, T3 = {"anneal": 5}, {"warmup": 3}  # epochs
T2, COPIES = {"correction": "ema"}, {"correction": "exact"}
METHODS: dict[str, dict[str, Any]] = {
    "naive": {},
    "T1": T1,
    "T1 + T2": T1 | T2,
    "T1 + copies": T1 | COPIES,
    "T1 + T2 + T3": T1 | T2 | T3,
    "T1 + copies + T3": T1 | COPIES | T3,
}
# Delays of the stages, in steps: ours, and those of the paper's machine.
PIPELINES = {
    "P=20": range(19, -1, -1),
    "P=8": range(7, -1, -1),
    "P=20, paper's delays": range(39, 0, -2),
}

Run = tuple[float, int, int]
"""Learning rate, seed, held-out fold."""


class Layer(nn.Module):
    """A linear layer of each run; a hidden one adds its rectified outputs to its inputs."""

    def __init__(self, place: int, seeds: list[int]) -> None:
        super().__init__()
        self.first, self.last = place == 0, place == LAYERS - 1
        fan_in, fan_out = PIXELS if self.first else WIDTH, CLASSES if self.last else WIDTH
        deviation = ((1 if self.first or self.last else 2) / fan_in) ** 0.5
        generators = [torch.Generator().manual_seed(LAYERS * seed + place) for seed in seeds]
        drawn = [torch.randn(fan_in, fan_out, generator=g) * deviation for g in generators]
        self.weight = nn.Parameter(torch.stack(drawn))
        self.bias = nn.Parameter(torch.zeros(len(drawn), 1, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        seen = x if self.first else F.layer_norm(x, (WIDTH,))
        y = torch.baddbmm(self.bias, seen, self.weight)
        return y if self.first or self.last else x + y.relu()


class Data:
    """All digits, in folds."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images).float() / 8 - 1, torch.tensor(labels)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels)
        self.trained, self.held_out = zip(*[map(torch.tensor, fold) for fold in folds], strict=True)
        self.steps = min(map(len, self.trained)) // BATCH  # of an epoch

    def batches(self, runs: list[Run]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training's batches, of all runs together."""
        own = [(self.trained[fold], torch.Generator().manual_seed(seed)) for _, seed, fold in runs]
        for _ in range(EPOCHS):
            orders = [trained[torch.randperm(len(trained), generator=g)] for trained, g in own]
            for first in range(0, self.steps * BATCH, BATCH):
                chosen = torch.stack([order[first : first + BATCH] for order in orders])
                yield self.images[chosen], self.labels[chosen]

    def accuracies(self, model: nn.Module, runs: list[Run]) -> list[float]:
        """Return the accuracy of each run on its held-out fold."""
        right = model(self.images.expand(len(runs), -1, -1)).argmax(2) == self.labels
        tests = [r[self.held_out[fold]] for r, (*_, fold) in zip(right, runs, strict=True)]
        return [round(float(test.float().mean()), 5) for test in tests]


def train(data: Data, pipeline: str, method: str, runs: list[Run]) -> list[float]:
    """Return the accuracies of runs of one method."""
    layers = [Layer(place, [seed for _, seed, _ in runs]) for place in range(LAYERS)]
    settings, delays = METHODS.get(method, {}), list(PIPELINES.get(pipeline, [0]))
    cuts = [round(LAYERS * stage / len(delays)) for stage in range(len(delays) + 1)]
    rates = torch.tensor([rate for rate, *_ in runs])

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        # SGD is linear in the gradient: a run's rate can be a factor of its loss.
        losses = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return (rates * losses).sum()

    replay = Replay(
        [nn.Sequential(*layers[first:end]) for first, end in pairwise(cuts)],
        loss_of,
        partial(SGD, lr=1.0, momentum=0.9),
        micro_batches=1,
        correction=settings.get("correction", "off"),
        anneal_steps=settings.get("anneal", 0) * data.steps or None,
        make_scheduler=partial(MultiStepLR, milestones=[DECAY_EPOCH * data.steps]),
        warmup_steps=settings.get("warmup", 0) * data.steps,
        delays=delays,
    )
    for batch in data.batches(runs):
        replay.step([batch])
    with torch.no_grad():
        return data.accuracies(nn.Sequential(*layers), runs)


def measure(data: Data, pipeline: str, method: str, synchronous: float) -> dict[str, Any]:
    """Tune a method on fold 0; return its accuracies at its best rate and the synchronous one."""
    found = train(data, pipeline, method, [(r, s, 0) for r in RATES for s in range(TUNING_SEEDS)])
    tuning = [fmean(found[i : i + TUNING_SEEDS]) for i in range(0, len(found), TUNING_SEEDS)]
    best = RATES[tuning.index(max(tuning))]
    places = [(seed, fold) for seed in range(SEEDS) for fold in range(FOLDS)]
    results = {
        str(rate): train(data, pipeline, method, [(rate, *place) for place in places])
        for rate in sorted({best, synchronous or best})
    }
    names = {"pipeline": pipeline, "method": method, "date": str(date.today()), "best_rate": best}
    tuned = dict(zip(map(str, RATES), tuning, strict=True))
    return {**names, "tuning": tuned, "accuracies": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    file = parser.parse_args().json
    report = {"machine": "2 x86-64 cores, 24 GiB, no GPU", "records": []}
    report["command"] = f"python tests/tools/digits.py --json {file}"
    report = json.loads(file.read_text()) if file.exists() else report
    records, data = report["records"], Data()
    cases = [("any", "synchronous"), *((p, m) for p in PIPELINES for m in METHODS)]
    for case in cases[len(records) :]:
        records.append(measure(data, *case, records[0]["best_rate"] if records else 0.0))
        file.write_text(json.dumps(report, indent=1) + "\n")
    expected = fmean(records[0]["accuracies"][str(records[0]["best_rate"])])
    for record in records:
        cells = [record["pipeline"], record["method"]]
        for rate in (record["best_rate"], records[0]["best_rate"]):
            found = record["accuracies"][str(rate)]
            gap, lost = 100 * (fmean(found) - expected), sum(a < 0.2 for a in found)
            cells += [str(rate), f"{100 * fmean(found):.2f} %", f"{gap:+.2f}", str(lost)]
        print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    main()
