# SPDX-License-Identifier: Apache-2.0
"""Sum buckets that lie on one GPU, which all ranks share; leave what came out and how fast."""

import sys
import time

import torch
from common import leave
from sparse_staging import NUMEL, bucket

import wavemare
from wavemare.comm import SparseComm

LARGE = 100 * 2**20 // 4


def check(mode, dtype, rank):
    """Compare the sums of buckets on the device with those on the host, bit for bit."""
    host, device = bucket(rank, dtype), bucket(rank, dtype).cuda()
    with SparseComm(transport="torch", mode=mode) as comm:
        comm.allreduce_(host)
        # Whatever is queued on the stream before must be seen, and what comes after must wait.
        device.mul_(2).mul_(0.5)
        handle = comm.allreduce_(device, async_op=True)
        doubled = handle.wait().clone().mul_(2)
    expected = host.view(torch.uint8)
    same = torch.equal(device.cpu().view(torch.uint8), expected)
    return same and torch.equal(doubled.cpu(), host * 2) and device.numel() == NUMEL


def speed(mode, density, rank):
    """Time 100 MiB from the device to the device; return the phases of the last call."""
    generator = torch.Generator().manual_seed(rank)
    blocks = torch.rand(LARGE // 256, 1, generator=generator) < density
    flat = (torch.randn(LARGE // 256, 256, generator=generator) * blocks).flatten().cuda()
    with SparseComm(transport="torch", mode=mode) as comm:
        for _ in range(4):
            work = flat.clone()
            torch.cuda.synchronize()
            started = time.perf_counter()
            stats = comm.allreduce_(work).stats
            torch.cuda.synchronize()
            seconds = time.perf_counter() - started
    return {"seconds": seconds, "phases_s": stats.phases_s, "bytes_up": stats.bytes_up}


if __name__ == "__main__":
    wavemare.init_distributed()
    rank = torch.distributed.get_rank()
    modes = sys.argv[2:]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    leave(
        {
            "exact": {f"{m} {d}": check(m, d, rank) for m in modes for d in dtypes},
            "speed": {
                f"{m} {density:g}": speed(m, density, rank)
                for m in modes
                for density in (1.0, 0.1, 0.01)
            },
        }
    )
