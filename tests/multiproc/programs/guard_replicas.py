# SPDX-License-Identifier: Apache-2.0
"""Four ranks, mostly as pipelines of two stages: one rank alone sees a wrong number.

Arguments: folder, and a JSON object of [property, settings] by name.
"""

import json
import math
import sys

import tensor_pipeline
import torch
from common import leave, start_stages, warnings_told, weights_digest
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups
from guard_pipeline import SIZE, WIDTH, Spoil, batches

import wavemare
from wavemare.engine import init_distributed
from wavemare.engine.health.numbers import StepConsensus
from wavemare.errors import NumericsError

STEPS, ACCUMULATION = 6, 2


class Mask(Spoil):
    """Hides its first two columns in one micro-batch, from a softmax that bears it."""

    def forward(self, x):
        key = float(x.detach().sum())
        if self.what and self.seen == self.call:
            self.key = key
        self.seen += 1
        return x.masked_fill(torch.arange(WIDTH) < 2, -math.inf) if key == self.key else x


def build_layers(what):
    """Two stages of three layers each; a stage spoils the second micro-batch of its third step."""
    torch.manual_seed(7)
    spoil = Mask if what == "mask" else Spoil
    layers = []
    for _ in range(2):
        layers += [torch.nn.Softmax(-1), torch.nn.Linear(WIDTH, WIDTH), spoil(what, 5)]
    return layers


def replicas(what, schedule, policy, bad_rank, **sections):
    """Two replicas: what each rank says, which steps it makes, and whether copies stay alike."""
    groups.mpu = None
    rank = torch.distributed.get_rank()
    engine = start_stages(
        build_layers(what if rank == bad_rank else None),
        micro_batches=ACCUMULATION,
        section={"schedule": schedule},
        sections={"guard": {"nonfinite": policy}, **sections},
    )
    data = batches(STEPS + 3, ACCUMULATION)
    applied = []
    with warnings_told("guard") as said:
        try:
            for _ in range(STEPS):
                engine.train_batch((x + engine.data_rank, y) for x, y in data)
                applied.append(bool(engine.was_step_applied()))
        except NumericsError as error:
            return {"error": str(error), "at": len(applied)}
    digest = weights_digest(engine)
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return {"applied": applied, "said": said, "digest": digest, "finite": finite}


def split(schedule, bad_rank=3):
    """Two slices of each stage; one has a bad gradient of a weight that the other has not."""
    engine = tensor_pipeline.start("gpt2-101", {"schedule": schedule})
    name, weight = next(
        (name, p) for name, p in engine.module.named_parameters() if is_model_parallel_parameter(p)
    )
    if torch.distributed.get_rank() == bad_rank:
        # The weight may be a part, which refuses hooks of its own: this spoils one rank's.
        torch.Tensor.register_hook(weight, lambda gradient: gradient * math.inf)
    found = {"name": name, "error": None}
    try:
        tensor_pipeline.train(engine, "gpt2-101", 2)
    except NumericsError as error:
        found["error"] = str(error)
    return found


class Loss(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


def after_reduction(bad_rank):
    """Data parallel without ZeRO, where a rank's gradients change after their reduction."""
    groups.mpu = None
    torch.manual_seed(7)
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "steps_per_print": None,
        "wavemare": {"guard": {"nonfinite": "skip"}},
    }
    engine = wavemare.initialize(model=Loss(WIDTH, WIDTH), config=config)[0]
    applied = []
    for step, (x, _) in enumerate(batches(3, 1)):
        engine.backward(engine(x))
        if step == 1 and torch.distributed.get_rank() == bad_rank:
            engine.module.bias.grad[0] = math.nan
        engine.step()
        applied.append(bool(engine.was_step_applied()))
    return {"applied": applied, "digest": weights_digest(engine)}


def grid(bad_rank):
    """Four ranks in two rows and two columns decide what one of them has seen."""
    rank = torch.distributed.get_rank()
    lines = [[0, 1], [2, 3], [0, 2], [1, 3]]
    made = [(ranks, torch.distributed.new_group(ranks)) for ranks in lines]
    consensus = StepConsensus(group for ranks, group in made if rank in ranks)
    return {
        "agreed": [consensus.agree(torch.tensor(rank == bad)) for bad in (bad_rank, None)],
        "gathered": consensus.gather([rank] if rank else []),
        "speaks": consensus.speaks,
        "alone": StepConsensus([]).agree(torch.tensor(rank == bad_rank)),
    }


if __name__ == "__main__":
    init_distributed()
    cases = json.loads(sys.argv[2])
    leave({key: globals()[name](**settings) for key, (name, settings) in cases.items()})
