# SPDX-License-Identifier: Apache-2.0
"""Sum buckets over NCCL, each rank on a GPU of its own; leave what came out and how fast."""

import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from common import leave
from sparse_gpu import LARGE
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


def seconds(run):
    """Return the least time on the device."""
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times)


def _sum(comm, flat):
    comm.allreduce_(flat.clone())


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    exact = {
        f"{mode} {dtype}": check(mode, dtype)
        for mode in sys.argv[2:]
        for dtype in (torch.float32, torch.bfloat16)
    }
    flat = torch.randn(LARGE).cuda()
    speed = {"ncclAllReduce": seconds(lambda: dist.all_reduce(flat))}
    for density in (1.0, 0.1, 0.01):
        blocks = torch.rand(LARGE // 256, 1, device="cuda") < density
        sparse = (torch.randn(LARGE // 256, 256, device="cuda") * blocks).flatten()
        for mode in sys.argv[2:]:
            with SparseComm(mode=mode) as comm:
                speed[f"{mode} {density}"] = seconds(partial(_sum, comm, sparse))
    leave({"exact": exact, "speed": speed})


main()
