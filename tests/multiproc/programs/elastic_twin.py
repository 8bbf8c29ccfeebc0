# SPDX-License-Identifier: Apache-2.0
"""The replicas of elastic.py beside each other in one process, by the equations of local steps.

Arguments: result folder, settings as JSON: ``steps``, and ``gone``, the last step of some replicas.
Writes the losses of all replicas in each step.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from common import ACCUMULATION, MICRO, QUIET, build_gpt2
from elastic import Rows
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from wavemare.data.loader import ResumableLoader

REPLICAS, EVERY, HALF = 3, 4, np.float32(0.5)


def flat(model):
    return parameters_to_vector(model.parameters()).detach().numpy().copy()


def build():
    torch.manual_seed(7)
    return build_gpt2(**QUIET)


def main(folder, steps, gone):
    models = [build() for _ in range(REPLICAS)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    sizes = {"micro_batch_size": MICRO, "data_world_size": REPLICAS, "seed": 1}
    loaders = [ResumableLoader(Rows(), data_rank=rank, **sizes) for rank in range(REPLICAS)]
    common = flat(models[0])
    momentum, losses = np.zeros_like(common), {}
    for step in range(1, steps + 1):
        here = [n for n in range(REPLICAS) if step <= gone.get(str(n), steps)]
        for n in here:
            total = torch.zeros(())
            for _ in range(ACCUMULATION):
                loss = models[n](**next(loaders[n])).loss
                total = total + loss.detach()
                (loss / ACCUMULATION).backward()
            optimizers[n].step()
            optimizers[n].zero_grad()
            losses.setdefault(n, []).append(float(total / ACCUMULATION))
        if step % EVERY == 0:
            change = np.zeros_like(common)
            for n in here:
                change += common - flat(models[n])
            change *= np.float32(1 / len(here))
            momentum = momentum * HALF + change
            common = common - (momentum * HALF + change)
            for model in models:
                vector_to_parameters(torch.from_numpy(common.copy()), model.parameters())
    Path(folder, "twin.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], **json.loads(sys.argv[2]))
