# SPDX-License-Identifier: Apache-2.0
"""Sum buckets over NCCL, each rank on a GPU of its own; leave what came out."""

import os
import sys

import torch
import torch.distributed as dist
from common import leave
from sparse_staging import NUMEL, bucket

from wavemare.comm import SparseComm


def check(mode, dtype):
    """Compare with the sum in rank order, bit for bit, behind and before other work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros(NUMEL)
    for other in range(size):
        total += bucket(other, dtype).float()
    expected = (total / size).to(dtype)  # exact for one or two ranks
    flat = bucket(rank, dtype).cuda()
    with SparseComm(mode=mode) as comm:
        assert comm.transport.name == "nccl"
        flat.mul_(2).mul_(0.5)
        doubled = comm.allreduce_(flat, async_op=True).wait().clone().mul_(2)
        ids, rows = torch.arange(5).cuda() * (rank + 1), torch.ones(5, 7).cuda()
        found, _ = comm.allreduce_rows_(ids, rows, 99).wait()
    found = found.tolist() == sorted({n * (r + 1) for n in range(5) for r in range(size)})
    return found and torch.equal(flat.cpu(), expected) and torch.equal(doubled, flat * 2)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    exact = {
        f"{mode} {dtype}": check(mode, dtype)
        for mode in sys.argv[2:]
        for dtype in (torch.float32, torch.bfloat16)
    }
    leave({"exact": exact})


main()
