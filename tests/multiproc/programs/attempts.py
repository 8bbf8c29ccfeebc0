# SPDX-License-Identifier: Apache-2.0
"""Ranks that meet over the store of torchrun's agent, sum, and end without a word."""

import os
import sys
import time

import torch
from common import leave
from torch import distributed

from wavemare.engine import init_distributed

if __name__ == "__main__":
    slow = int(sys.argv[2])
    if int(os.environ["RANK"]) == slow:
        time.sleep(1)
    init_distributed()
    value = torch.ones(2)
    distributed.all_reduce(value)
    distributed.new_group([0, 1]).barrier().wait()
    leave(value.tolist(), part=False)
    os._exit(0)
