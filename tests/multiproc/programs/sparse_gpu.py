# SPDX-License-Identifier: Apache-2.0
"""Sum buckets that lie on one GPU, which all ranks share; leave what came out."""

import sys

import torch
from common import leave
from sparse_staging import NUMEL, bucket

import wavemare
from wavemare.comm import SparseComm


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


if __name__ == "__main__":
    wavemare.init_distributed()
    rank = torch.distributed.get_rank()
    modes = sys.argv[2:]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    leave({"exact": {f"{m} {d}": check(m, d, rank) for m in modes for d in dtypes}})
