# SPDX-License-Identifier: Apache-2.0
"""Sum buckets through a transport that copies everything as if it came from a device."""

import sys

import torch
from common import leave

import wavemare
from wavemare.comm import SparseComm
from wavemare.comm.transport.staging import StagedTransport
from wavemare.comm.transport.torch_transport import TorchTransport

NUMEL = 3 * (1 << 20) + 77  # more than one chunk, and a ragged tail


def bucket(rank, dtype):
    generator = torch.Generator().manual_seed(rank)
    flat = torch.randn(NUMEL, generator=generator)
    blocks = torch.arange(NUMEL) // 256
    active = torch.rand(int(blocks[-1]) + 1, generator=generator) < 0.3
    return (flat * active[blocks]).to(dtype)


def run(staged, mode, dtype):
    inner = TorchTransport()
    transport = StagedTransport(inner, stages_host=True) if staged else inner
    deterministic = mode not in ("dense", "packed")
    flats = [bucket(transport.rank, dtype) for _ in range(3)]
    with SparseComm(transport, mode=mode, deterministic=deterministic) as comm:
        handles = [comm.allreduce_(flat, async_op=True) for flat in flats]
        for handle in handles:
            handle.wait()
        ids = torch.arange(50) * (transport.rank + 1)
        rows = comm.allreduce_rows_(ids, torch.ones(50, 7), 200).wait()
        traffic = handles[0].stats.bytes_up, handles[0].stats.bytes_down
    digest = [int(flat.view(torch.uint8).long().sum()) for flat in flats]
    same = all(torch.equal(flats[0].view(torch.uint8), flat.view(torch.uint8)) for flat in flats)
    return {
        "digest": digest,
        "bytes": flats[0][:5000].float().tolist(),
        "same": same,
        "traffic": traffic,
        "rows": [row.tolist() for row in rows],
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for mode in sys.argv[2:]:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{mode} {dtype}"
            results[name] = {"staged": run(True, mode, dtype), "plain": run(False, mode, dtype)}
    leave(results)
