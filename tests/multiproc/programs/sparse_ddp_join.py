# SPDX-License-Identifier: Apache-2.0
"""Train with uneven numbers of batches inside ``join()``, with and without the hook."""

import torch
import torch.distributed as dist
from common import leave
from torch.nn.parallel import DistributedDataParallel

import wavemare
from wavemare.comm import register_ddp_hook


def train(hooked):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model = DistributedDataParallel(layers)
    comm = register_ddp_hook(model, mode="pushpull") if hooked else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with model.join():
            for number in range(2 + 3 * dist.get_rank()):
                optimizer.zero_grad()
                model(torch.linspace(-1, number, 32).view(4, 8)).mean().backward()
                optimizer.step()
    if comm is not None:
        comm.close()
    return [float(p.double().sum()) for p in model.parameters()]


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({"plain": train(False), "hooked": train(True)})
