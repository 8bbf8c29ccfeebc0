# SPDX-License-Identifier: Apache-2.0
"""What stages may send, read and leave frozen: pipelines of three stages against one process.

Usage: stage_inputs.py FOLDER CASE/SCHEDULE...; each rank leaves the losses of both by case.
"""

import copy
import sys
import time
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from common import furthest, leave, refusal
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

import wavemare
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.run_plan import homes_of

WIDTH, SIZE, MICRO, STEPS, STAGES, RATE = 8, 2, 3, 4, 3, 0.01


class Body(nn.Module):
    """A layer of (hidden, what travels beside it)."""

    def __init__(self, beside=lambda hidden, given: given):
        super().__init__()
        self.linear, self.beside = nn.Linear(WIDTH, WIDTH), beside

    def forward(self, given):
        hidden, *others = given if isinstance(given, tuple) else (given,)
        hidden = torch.tanh(self.linear(hidden))
        for mask in others:
            if mask.is_floating_point():
                hidden = hidden + 0.1 * mask.mean().to(hidden.dtype)
        return (hidden, *self.beside(hidden, others))


class Head(nn.Linear):
    def forward(self, given):
        return super().forward(given[0] if isinstance(given, tuple) else given)


class Pool(nn.Module):
    """Makes one length of any."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.linear(tokens).mean(1)


def mixed(hidden, _):
    """A float without gradient, integers, and a smaller float with one."""
    return hidden.detach()[:, :3], torch.arange(4), hidden[:, :1].to(torch.float64)


def growing(hidden, given):
    """One tensor more at each layer."""
    return [*given, hidden.detach()[: len(given) + 1, :2].half()]


def bodies(beside=lambda hidden, given: given):
    return [Body(beside) for _ in range(5)] + [Head(WIDTH, WIDTH)]


def embedded(**changes):
    return [nn.Embedding(30, WIDTH, **changes), *bodies()[1:]]


def frozen(stage):
    layers = bodies()
    for layer in layers[2 * stage : 2 * stage + 2]:
        layer.requires_grad_(False)
    return layers


def layers_of(case):
    torch.manual_seed(5)
    makers = {
        "mixed": partial(bodies, mixed),
        "growing": partial(bodies, growing),
        "lengths": lambda: [Pool(), *bodies()[1:]],
        "sparse": partial(embedded, sparse=True),
        **{f"frozen {stage}": partial(frozen, stage) for stage in range(STAGES)},
    }
    return makers.get(case, bodies)()


def batches(case):
    generator = torch.Generator().manual_seed(3)
    for number in range(10**6):
        target = torch.randn(SIZE, WIDTH, generator=generator)
        if case == "sparse":
            yield torch.randint(0, 4, (SIZE,), generator=generator), target
        elif case == "lengths":
            yield torch.randn(SIZE, 3 + number % 4, WIDTH, generator=generator), target
        else:
            yield torch.randn(SIZE, WIDTH, generator=generator), target


CHANGES = {
    "bf16": {"bf16": {"enabled": True}},
    "zero": {"zero_optimization": {"stage": 1}},
    "clipped": {"gradient_clipping": 0.2},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}


def start(layers, schedule, *changes, kind=None, sparse=False, **options):
    settings = PipelineConfig(schedule=schedule)
    homes = homes_of(settings, STAGES)
    if len(homes) > STAGES:
        kind = partial(ChunkedPipelineModule, homes=homes)
    module = (kind or deepspeed.PipelineModule)(
        layers,
        num_stages=STAGES,
        loss_fn=nn.functional.mse_loss,
        partition_method="uniform",
        **options,
    )
    pipeline = {"schedule": schedule}
    if schedule == "pipemare":  # drained at each step it is synchronous
        pipeline["pipemare"] = {"drain_interval": 1}
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD" if sparse else "AdamW", "params": {"lr": RATE}},
        "steps_per_print": None,
        "wavemare": {"pipeline": pipeline},
    }
    for change in changes:
        config |= CHANGES[change]
    return wavemare.initialize(model=module, config=config)[0]


def trained(case, schedule, *changes):
    """Train by a schedule and in one process; return both losses and the furthest weight."""
    layers = layers_of(case)
    twin = nn.Sequential(*copy.deepcopy(layers))
    engine, data = start(layers, schedule, *changes, sparse=case == "sparse"), batches(case)
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    norm, expected, data = engine.get_global_grad_norm(), [], batches(case)
    parameters = [p for p in twin.parameters() if p.requires_grad]
    kind = torch.optim.SGD if case == "sparse" else torch.optim.AdamW
    optimizer = kind(parameters, lr=RATE, weight_decay=0.0)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in changes)
    for _ in range(STEPS):
        total = 0.0
        for inputs, labels in islice(data, MICRO):
            with autocast:
                outputs = twin(inputs)
            loss = nn.functional.mse_loss(outputs, labels) / MICRO
            loss.backward()
            total += float(loss.detach())
        for parameter in parameters:
            parameter.grad = parameter.grad.to_dense()
        limit = 0.2 if "clipped" in changes else float("inf")
        expected_norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(total)
    local = dict(engine.module.named_parameters())
    theirs = {name: p for name, p in twin.named_parameters() if name in local}
    assert list(theirs) == [name for name in local if name in theirs]
    return {
        "losses": [losses, expected],
        "norms": [float(norm), float(expected_norm)],
        "furthest": furthest((local[name] for name in theirs), theirs.values()) if theirs else 0.0,
    }


def alternating(_, schedule):
    """Train and evaluate from one iterator; all schedules see the same order of batches."""
    engine, data = start(bodies_seeded(), schedule), batches("")
    found = []
    for _ in range(3):
        found.append(float(engine.train_batch(data)))
        found.append(float(engine.eval_batch(data, num_micro_batches=2)))
        next(data)  # so does the caller, on all ranks
    return found


def bodies_seeded():
    torch.manual_seed(5)
    return bodies()


def epochs(_, schedule):
    """Data that ends after each two steps, and evaluations between, one of them without data."""
    engine, found = start(bodies_seeded(), schedule), []

    def ends(call):
        try:
            call()
        except StopIteration:
            return True
        return False

    for _ in range(2):
        data = islice(batches(""), 2 * MICRO)
        found += [float(engine.train_batch(data)) for _ in range(2)]
        assert ends(partial(engine.train_batch, data))
        found.append(float(engine.eval_batch(batches(""), num_micro_batches=2)))
        assert ends(partial(engine.eval_batch, iter(()), num_micro_batches=2))
    return found


def reentrant(_, schedule):
    """Activation checkpoints that lose the gradients of the first layers' weights."""
    torch.manual_seed(5)
    engine = start(
        [nn.Embedding(30, WIDTH), *bodies()[1:]], schedule, activation_checkpoint_interval=1
    )
    return refusal(lambda: engine.train_batch(batches("sparse")))


def tied_inside(_, schedule):
    """Weights tied within one stage, whose gradients add up there."""
    torch.manual_seed(5)
    layers = [
        *[TiedLayerSpec("twice", nn.Linear, WIDTH, WIDTH) for _ in range(2)],
        *[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)],
    ]
    engine, data = start(layers, schedule), batches("")
    return [float(engine.train_batch(data)) for _ in range(STEPS)]


def tied_sparse(_, schedule):
    """A sparse embedding on the first and the last stage."""

    def head(layer, hidden):
        return (hidden @ layer.weight.t())[:, :WIDTH]

    layers = [
        TiedLayerSpec("ends", nn.Embedding, 30, WIDTH, sparse=True),
        *[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)],
        TiedLayerSpec("ends", nn.Embedding, 30, WIDTH, sparse=True, forward_fn=head),
    ]
    return refusal(lambda: start(layers, schedule, sparse=True))


def connected(_, schedule):
    """The groups that each rank has connected when `initialize` ends here; one rank is slow."""
    made, folder = dist.new_group, Path(sys.argv[1])

    def slow(*args, **kwargs):
        if dist.get_rank() == 1:
            time.sleep(0.1)
        group = made(*args, **kwargs)
        with Path(folder, f"connected-{schedule}-{dist.get_rank()}").open("a") as file:
            file.write(".")
        return group

    with mock.patch.object(dist, "new_group", slow):
        start(bodies_seeded(), schedule)
    files = [Path(folder, f"connected-{schedule}-{rank}") for rank in range(STAGES)]
    return [len(file.read_text()) for file in files]


SPECIAL = {
    "connected": connected,
    "alternating": alternating,
    "epochs": epochs,
    "reentrant": reentrant,
    "tied": tied_inside,
    "tied-sparse": tied_sparse,
}

if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for name in sys.argv[2:]:
        case, schedule, *changes = name.split("/")
        results[name] = SPECIAL.get(case, trained)(case, schedule, *changes)
    leave(results)
