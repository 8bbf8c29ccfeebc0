# SPDX-License-Identifier: Apache-2.0
"""What pipelines learn with PipeMare's own optimizer, SGD with momentum: images of digits.

A residual network is cut into stages and trained version by version, with one micro-batch per step.
The runs of a seed, one for each learning rate and fold, train side by side in one model, whose
weights have a dimension for them. Results join those in the file. ``--plain`` leaves out the
network's normalization, which slows a run whose steps are too large, and T1 takes the whole run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import date
from functools import partial
from itertools import pairwise, product
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

FOLDS = 5
LAYERS, WIDTH = 20, 32
BATCH, DECAY, ANNEAL, WARMUP = 32, 2 / 3, 4 / 15, 2 / 15  # parts of the training but for BATCH
RATES = (0.0005, 0.002, 0.005, 0.01, 0.03, 0.1)
PLAIN_RATES = (0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.03)
METHODS = ("naive", "T1", "T1 + T2", "T1 + copies", "T1 + T2 + T3", "T1 + copies + T3")
PIPELINES = {"P=8": range(7, -1, -1), "P=20": range(19, -1, -1)}  # delays of the stages, in steps


class Layer(nn.Module):
    """A linear layer of each run; a hidden one adds its rectified outputs to its inputs."""

    def __init__(self, place: int, seed: int, runs: int, *, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.first, self.last = place == 0, place == LAYERS - 1
        fan_in, fan_out = 64 if self.first else WIDTH, 10 if self.last else WIDTH
        deviation = ((1 if self.first or self.last else 2) / fan_in) ** 0.5
        generator = torch.Generator().manual_seed(LAYERS * seed + place)
        drawn = torch.randn(fan_in, fan_out, generator=generator) * deviation
        self.weight = nn.Parameter(drawn.repeat(runs, 1, 1))
        self.bias = nn.Parameter(torch.zeros(runs, 1, fan_out))

    def forward(self, x: Tensor) -> Tensor:
        seen = x if self.first or self.plain else F.layer_norm(x, (WIDTH,))
        y = torch.baddbmm(self.bias, seen, self.weight)
        if self.first or self.last:
            return y
        return x + y.relu() * (LAYERS**-0.5 if self.plain else 1)


class Data:
    """All digits, in folds."""

    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images).float() / 8 - 1, torch.tensor(labels)
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels)
        trained, held_out = zip(*[map(torch.tensor, fold) for fold in folds], strict=True)
        self.trained, self.held_out = trained, torch.zeros(FOLDS, len(labels), dtype=torch.bool)
        for fold, chosen in enumerate(held_out):
            self.held_out[fold, chosen] = True
        self.steps = min(map(len, trained)) // BATCH  # of an epoch

    def batches(self, seed: int, epochs: int, num_rates: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the training's batches, of all runs together."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(epochs):
            orders = [t[torch.randperm(len(t), generator=generator)] for t in self.trained]
            for first in range(0, self.steps * BATCH, BATCH):
                chosen = torch.stack([order[first : first + BATCH] for order in orders * num_rates])
                yield self.images[chosen], self.labels[chosen]

    def accuracies(self, model: nn.Module) -> list[list[float]]:
        """Return the accuracies on the held-out folds, a list for each learning rate."""
        runs = len(next(model.parameters()))
        right = model(self.images.expand(runs, -1, -1)).argmax(2) == self.labels
        right = right.view(-1, FOLDS, len(self.labels)) & self.held_out
        accuracies = right.sum(2).double() / self.held_out.sum(1)
        return accuracies.mul(1e5).round().div(1e5).tolist()


def train(
    data: Data, epochs: int, seed: int, pipeline: str, method: str, *, plain: bool = False
) -> list[list[float]]:
    """Return the accuracies of a method's runs with a seed, a list for each learning rate."""
    steps = epochs * data.steps
    rates = torch.tensor(PLAIN_RATES if plain else RATES).repeat_interleave(FOLDS)
    layers = [Layer(place, seed, len(rates), plain=plain) for place in range(LAYERS)]
    delays = list(PIPELINES.get(pipeline, [0]))
    cuts = [round(LAYERS * stage / len(delays)) for stage in range(len(delays) + 1)]

    def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
        # SGD is linear in the gradient: a run's rate can be a factor of its loss.
        losses = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none").mean(1)
        return (rates * losses).sum()

    replay = Replay(
        [nn.Sequential(*layers[first:end]) for first, end in pairwise(cuts)],
        loss_of,
        partial(SGD, lr=1.0, momentum=0.9),
        micro_batches=1,
        correction="ema" if "T2" in method else "exact" if "copies" in method else "off",
        anneal_steps=round((1 if plain else ANNEAL) * steps) if "T1" in method else None,
        make_scheduler=partial(MultiStepLR, milestones=[round(DECAY * steps)]),
        warmup_steps=round(WARMUP * steps) if "T3" in method else 0,
        delays=delays,
    )
    for batch in data.batches(seed, epochs, len(rates) // FOLDS):
        replay.step([batch])
    with torch.no_grad():
        return data.accuracies(nn.Sequential(*layers))


def print_row(record: dict[str, Any]) -> None:
    """Print the folds' mean accuracies: at the rate that is best on the first fold, and at all."""
    rates, found = record["rates"], record["accuracies"]
    means = [f"{fmean(row):.2%}" for row in found]
    best = max(range(len(rates)), key=lambda i: found[i][0])
    print("|", record["method"], "|", rates[best], "|", " | ".join([means[best], *means]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--pipelines", nargs="+", default=PIPELINES, choices=PIPELINES)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--plain", action="store_true", help="without normalization")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    report = {"machine": "2 x86-64 cores, 24 GiB, no GPU", "records": []}
    if options.json.exists():
        report = json.loads(options.json.read_text())
    cases = [("any", "synchronous"), *product(options.pipelines, options.methods)]
    for seed, (pipeline, method) in product(range(options.seeds), cases):
        case = {"epochs": options.epochs, "seed": seed, "pipeline": pipeline, "method": method}
        case |= {"plain": options.plain}
        if not any(case.items() <= {"plain": False, **r}.items() for r in report["records"]):
            rates = PLAIN_RATES if options.plain else RATES
            results = {"rates": rates, "accuracies": train(Data(), **case)}
            report["records"].append({**case, "date": str(date.today()), **results})
            options.json.write_text(json.dumps(report) + "\n")
    for record in report["records"]:
        print_row(record)


if __name__ == "__main__":
    main()
