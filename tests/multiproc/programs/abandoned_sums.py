# SPDX-License-Identifier: Apache-2.0
"""Ranks that end while gloo is still summing, with a process group that somebody holds."""

import torch
from torch import distributed

from wavemare.engine import init_distributed
from wavemare.failure import run_main

SUMS = 100
HELD = []


def main():
    init_distributed()
    HELD.append(distributed.distributed_c10d._get_default_group())
    works = []
    for _ in range(SUMS):
        tensor = torch.ones(200_000)
        tensor.owner = object()  # so that it is Python's to free
        works.append(distributed.all_reduce(tensor, async_op=True))
    works[SUMS // 2].wait()
    del works, tensor
    distributed.destroy_process_group()


if __name__ == "__main__":
    run_main(main)
