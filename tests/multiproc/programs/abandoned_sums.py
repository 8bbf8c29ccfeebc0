# SPDX-License-Identifier: Apache-2.0
"""Ranks that end while gloo is still summing, with a process group that somebody holds.

Usage: abandoned_sums.py FOLDER CODE, the exit code.
"""

import sys

import torch
from torch import distributed

from wavemare.engine import init_distributed

SUMS = 100
HELD = []

init_distributed()
HELD.append(distributed.group.WORLD)
works = []
for _ in range(SUMS):
    tensor = torch.ones(200_000)
    tensor.owner = object()  # so that it is Python's to free
    works.append(distributed.all_reduce(tensor, async_op=True))
works[SUMS // 2].wait()
del works, tensor
distributed.destroy_process_group()
sys.exit(int(sys.argv[2]))
