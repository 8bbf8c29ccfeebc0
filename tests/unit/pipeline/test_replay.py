# SPDX-License-Identifier: Apache-2.0
"""The replay against plain training, and against formulas written out."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.pipeline.plan.orders import pipemare
from wavemare.pipeline.plan.plan import Kind
from wavemare.pipeline.staleness.replay import Replay

WIDTH = 6
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}
optimizers = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def mlp(num_stages, dtype=torch.float32):
    torch.manual_seed(7)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).to(dtype)
        for _ in range(num_stages)
    ]


def batches(steps, micro_batches, dtype=torch.float32):
    generator = torch.Generator().manual_seed(11)
    draw = partial(torch.randn, 4, WIDTH, generator=generator)
    return [
        [(draw().to(dtype), draw().to(dtype)) for _ in range(micro_batches)] for _ in range(steps)
    ]


def flat(modules):
    return torch.cat([p.detach().reshape(-1) for module in modules for p in module.parameters()])


def plain_training(stages, data, make_optimizer, make_scheduler=None):
    """Train with gradients accumulated over the micro-batches; return the mean losses."""
    trained = [stage for stage in stages if list(stage.parameters())]
    optimizers = [make_optimizer(list(stage.parameters())) for stage in trained]
    schedulers = [make_scheduler(o) for o in optimizers] if make_scheduler else []
    losses = []
    for step in data:
        total = 0.0
        for inputs, labels in step:
            loss = nn.functional.mse_loss(nn.Sequential(*stages)(inputs), labels)
            (loss / len(step)).backward()
            total += loss.item()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        losses.append(total / len(step))
    return losses


def replayed(stages, data, make_optimizer, **options):
    replay = Replay(stages, nn.functional.mse_loss, make_optimizer, len(data[0]), **options)
    losses = [replay.step(step) for step in data]
    assert losses == [record.loss for record in replay.records]
    return replay


SYNCHRONOUS = {
    "one stage": (1, {}),
    "drain at every step": (4, {"drain_interval": 1}),
    "all warm-up": (4, {"warmup_steps": 100}),
    "with an idle correction": (4, {"drain_interval": 1, "correction": "ema"}),
}


@optimizers
@pytest.mark.parametrize(("num_stages", "options"), SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
def test_an_empty_pipeline_at_each_step_is_plain_training_bitwise(
    num_stages, options, make_optimizer
):
    data = batches(12, 3)
    stages, twins = mlp(num_stages), mlp(num_stages)
    make_scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5)
    wanted = plain_training(twins, data, make_optimizer, make_scheduler)
    replay = replayed(stages, data, make_optimizer, make_scheduler=make_scheduler, **options)
    assert torch.equal(flat(stages), flat(twins))
    assert [record.loss for record in replay.records] == pytest.approx(wanted, rel=1e-6)


class Residual(nn.Module):
    """A residual tanh layer, whose backward pass is written out in `HandWritten`."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, h):
        return h + torch.tanh(h @ self.weight)


class HandWritten:
    """Asynchronous training of residual tanh layers without autograd and torch's optimizers."""

    def __init__(self, weights, micro_batches, rule, mode, anneal_steps, decay_base, delays):
        self.history = [[w.clone()] for w in weights]
        self.deltas = [torch.zeros_like(w) for w in weights]
        self.first = [torch.zeros_like(w) for w in weights]
        self.second = [torch.zeros_like(w) for w in weights]
        self.size, self.rule, self.mode = micro_batches, rule, mode
        self.anneal_steps, self.decay_base = anneal_steps, decay_base
        self.delays = delays or range(len(weights) - 1, -1, -1)
        self.version = 0

    def step(self, given):
        grads = [torch.zeros_like(w[0]) for w in self.history]
        for index, (inputs, labels) in enumerate(given):
            m, h, saved = self.version * self.size + index, inputs, []
            for s, history in enumerate(self.history):
                seen = max(0, math.floor((m - self.delays[s]) / self.size))
                z = torch.tanh(h @ history[seen])
                saved.append((h, z, seen))
                h = h + z
            g = 2 * (h - labels) / labels.numel() / self.size
            for s in reversed(range(len(self.history))):
                h, z, seen = saved[s]
                through = g * (1 - z * z)
                grads[s] += h.T @ through
                g = g + through @ self.backward_weight(s, seen).T
        for s, grad in enumerate(grads):
            self.update(s, grad)
        self.version += 1

    def backward_weight(self, s, seen):
        newest, age = self.history[s][-1], self.version - seen
        mode = self.mode
        if mode == "auto":
            mode = "exact" if math.ceil(self.delays[s] / self.size) <= 2 else "ema"
        if mode == "exact":
            return self.history[s][seen]
        return newest - age * self.deltas[s] if mode == "ema" else newest

    def update(self, s, grad):
        rate, t, w = self.rule["lr"], self.version + 1, self.history[s][-1]
        if self.anneal_steps:
            power = 1 - min(self.version / self.anneal_steps, 1)
            rate /= max(1.0, self.delays[s] / self.size) ** power
        if "betas" in self.rule:
            b1, b2 = self.rule["betas"]
            self.first[s] = b1 * self.first[s] + (1 - b1) * grad
            self.second[s] = b2 * self.second[s] + (1 - b2) * grad**2
            root = (self.second[s] / (1 - b2**t)).sqrt() + 1e-8
            new = w - rate * self.rule["weight_decay"] * w
            new = new - rate * (self.first[s] / (1 - b1**t)) / root
        else:
            self.first[s] = self.rule["momentum"] * self.first[s] + grad
            new = w - rate * self.first[s]
        oldest = math.ceil(self.delays[s] / self.size)
        if oldest:
            base = self.decay_base
            decay = base ** (1 / oldest) if base else (oldest - 1) / (oldest + 1)
            self.deltas[s] = decay * self.deltas[s] + (1 - decay) * (new - w)
        self.history[s].append(new)


RULES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.0}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.2}),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("mode", ["off", "ema", "exact", "auto"])
@pytest.mark.parametrize("anneal_steps", [None, 15])
@pytest.mark.parametrize(
    ("micro_batches", "decay_base", "delays"), [(1, None, None), (2, 0.2, [9, 7, 5, 3, 1])]
)
def test_every_remedy_and_optimizer_against_formulas_written_out(
    rule, mode, anneal_steps, micro_batches, decay_base, delays
):
    kind, settings = RULES[rule]
    data = batches(25, micro_batches, torch.float64)
    torch.manual_seed(5)
    weights = [torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 2 for _ in range(5)]
    stages = [Residual(w) for w in weights]
    options = {"anneal_steps": anneal_steps, "decay_base": decay_base, "delays": delays}
    replayed(stages, data, partial(kind, **settings), correction=mode, **options)
    twin = HandWritten(weights, micro_batches, settings, mode, **options)
    for given in data:
        twin.step(given)
    for stage, history in zip(stages, twin.history, strict=True):
        torch.testing.assert_close(stage.weight.detach(), history[-1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 6])
@pytest.mark.parametrize(("warmup_steps", "drain_interval"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_staleness_is_that_of_the_plan(num_stages, micro_batches, warmup_steps, drain_interval):
    steps = 8
    drains = {"warmup_steps": warmup_steps, "drain_interval": drain_interval}
    plan = pipemare(num_stages, micro_batches, steps, **drains)
    versions = {(a.kind, a.stage, a.micro_batch): a.version for rank in plan.ranks for a in rank}
    data = batches(steps, micro_batches)
    replay = replayed(mlp(num_stages), data, OPTIMIZERS["sgd"], **drains)
    for record in replay.records:
        first = record.step * micro_batches
        assert record.staleness == tuple(
            tuple(
                versions[Kind.BACKWARD, s, m] - versions[Kind.FORWARD, s, m]
                for m in range(first, first + micro_batches)
            )
            for s in range(num_stages)
        )


class Paired(nn.Module):
    """A stage from two tensors to two, of which one needs no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, pair):
        value, side = pair
        return torch.tanh(self.linear(value) + side), side


class Last(Paired):
    def forward(self, pair):
        return super().forward(pair)[0]


@pytest.mark.parametrize("mode", ["off", "exact", "ema", "predict"])
@pytest.mark.parametrize("micro_batches", [1, 3, 4])
def test_micro_batches_together_give_what_they_give_one_by_one(mode, micro_batches):
    draw = partial(torch.randn, 2, WIDTH, generator=torch.Generator().manual_seed(3))
    data = [
        [((draw().double(), draw().double()), draw().double()) for _ in range(micro_batches)]
        for _ in range(6)
    ]
    weights, losses, calls = [], [], []
    for together in (False, True):
        torch.manual_seed(5)
        stages = [Paired(), Paired(), Paired(), Last()]
        for stage in stages:
            stage.register_forward_hook(lambda *_, mark=together: calls.append(mark))
        options = {"correction": mode, "error_feedback": True, "clip": 0.1, "warmup_steps": 1}
        replay = replayed(
            stages, data, OPTIMIZERS["momentum"], together=together, slack=1, **options
        )
        weights.append(flat(stages))
        losses.append([each for record in replay.records for each in record.losses])
    assert torch.allclose(*weights, rtol=0, atol=1e-12)
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert calls.count(False) == 4 * 6 * micro_batches
    assert calls.count(True) < calls.count(False) or micro_batches == 1


class Summed(nn.Linear):
    def forward(self, value):
        return super().forward(value).sum()


def test_wrong_calls_are_refused():
    loss, make = nn.functional.mse_loss, OPTIMIZERS["sgd"]
    with refuses(PlanError, "correction", "emma"):
        Replay(mlp(2), loss, make, 1, correction="emma")
    with refuses(PlanError, "micro_batches", 1):
        Replay(mlp(2), loss, make, 2).step(batches(1, 1)[0])
    mixing = [*mlp(1), Summed(WIDTH, WIDTH)]
    with refuses(PlanError, "together"):
        Replay(mixing, lambda value, _: value, make, 2, together=True).step(batches(1, 2)[0])
