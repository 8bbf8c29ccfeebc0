# SPDX-License-Identifier: Apache-2.0
"""What the asynchronous engine refuses, and how it ends when something breaks within a step.

Arguments: folder, then "refused" for all refusals before the first step, or one of "additional",
"data" and "loss", which break on the last stage, or "shapes", which breaks on the first: they end
both processes.
"""

import json
import sys
from itertools import count, islice
from pathlib import Path

import deepspeed
import torch
from common import leave, sine_batches
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import WavemareError

WIDTH, SIZE = 8, 2


def tied(key):
    return deepspeed.pipe.TiedLayerSpec(key, torch.nn.Linear, WIDTH, WIDTH)


def layers():
    torch.manual_seed(7)
    return [torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def module_of(layers, kind=deepspeed.PipelineModule, **settings):
    settings = {
        "num_stages": 2,
        "loss_fn": torch.nn.functional.mse_loss,
        "partition_method": "uniform",
        **settings,
    }
    return kind(layers, **settings)


def build(model, optimizer=None, micro_batches=2, stages=2, **config):
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": micro_batches,
        "steps_per_print": None,
        "wavemare": {"pipeline": {"schedule": "pipemare", "stages": stages}},
        **({} if optimizer else {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}),
        **config,
    }
    return wavemare.initialize(model=model, optimizer=optimizer, config=config)[0]


def line_search(parameters):
    return torch.optim.LBFGS(parameters, lr=0.1)


def model_axis():
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=2, num_dp=1)
    return module_of(layers(), num_stages=None, topology=topology)


def refused():
    pipeline = module_of(layers())
    cases = {
        "tied": lambda: build(module_of([tied("ends"), *layers()[:2], tied("ends")])),
        "line search": lambda: build(pipeline, line_search),
        "two waves": lambda: build(module_of(layers() * 2, deepspeed.DualPipeVModule)),
        "no pipeline": lambda: build(torch.nn.Linear(WIDTH, WIDTH)),
        "no stages": lambda: build(torch.nn.Linear(WIDTH, WIDTH), stages=1),
        "model axis": lambda: build(model_axis(), stages=1),
    }
    return {name: refusal(case) for name, case in cases.items()} | {"no data": no_data()}


def no_data():
    """Without any iterator."""
    return refusal(build(module_of(layers())).train_batch)


def refusal(case):
    try:
        case()
    except WavemareError as error:
        named = {name: str(getattr(error, name)) for name in ("key", "value", "reason", "remedy")}
        return {"type": type(error).__name__, **named}
    return None


class WithAdditionalLosses(deepspeed.PipelineModule):
    def get_additional_losses(self):
        return {"balance": torch.zeros(())}


def additional():
    engine = build(module_of(layers(), WithAdditionalLosses))
    return engine, count(), sine_batches(WIDTH)


def data():
    """The last stage's iterator has two micro-batches less than the first stage's."""
    engine = build(module_of(layers()))
    return engine, count(), islice(sine_batches(WIDTH), 6 if engine.is_last_stage() else 8)


def loss():
    """The loss function breaks at the sixth micro-batch: the second of the third step."""
    calls = count(1)

    def break_down(outputs, labels):
        if next(calls) == 6:
            raise ArithmeticError("the loss function broke down")
        return torch.nn.functional.mse_loss(outputs, labels)

    return build(module_of(layers(), loss_fn=break_down)), count(), sine_batches(WIDTH)


class Shrinking(torch.nn.Linear):
    """Gives a row less for the fourth micro-batch than it was given."""

    calls = count(1)

    def forward(self, inputs):
        outputs = super().forward(inputs)
        return outputs[1:] if next(self.calls) == 4 else outputs


def shapes():
    """The outputs of the first stage change their shape, and its inputs do not."""
    return build(module_of([Shrinking(WIDTH, WIDTH), *layers()[1:]])), count(), sine_batches(WIDTH)


def main():
    init_distributed()
    name = sys.argv[2]
    if name == "refused":
        leave(refused())
        return
    engine, steps, given = globals()[name]()
    for step in steps:
        Path(sys.argv[1], f"rank_{engine.global_rank}.json").write_text(json.dumps(step))
        engine.train_batch(given)


if __name__ == "__main__":
    main()
