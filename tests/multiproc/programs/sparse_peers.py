# SPDX-License-Identifier: Apache-2.0
"""Streaming, AGsparse and SparCML on the ranks of one network, one bucket after the other."""

import json
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from wavemare.comm.executors import Call, Scratch
from wavemare.comm.executors.agsparse import AGsparse
from wavemare.comm.executors.ranges import equal_pieces
from wavemare.comm.executors.sparcml import SparCML
from wavemare.comm.executors.streaming import Streaming
from wavemare.comm.sparse import SparseComm
from wavemare.comm.transport import open_transport

BLOCK, BLOCKS = 64, 75
NUMEL = BLOCK * (BLOCKS - 1) + 13
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32)
EXECUTORS = {
    "streaming": Streaming(slots_per_rank=2, width=8, depth=4),
    "agsparse": AGsparse(),
    "sparcml": SparCML(),
}
MORE = {
    "streaming as it is": Streaming(),
    "streaming unfused": Streaming(slots_per_rank=2, width=1, depth=1),
    "streaming in one message": Streaming(slots_per_rank=1, width=300, depth=1),
    "streaming with more lanes than blocks": Streaming(slots_per_rank=100, width=300, depth=1),
}


def blocks_of(density, generator):
    blocks = torch.zeros(BLOCKS, BLOCK, dtype=torch.float64)
    chosen = torch.randperm(BLOCKS, generator=generator)[: round(BLOCKS * density)]
    values = torch.randn(len(chosen), BLOCK, generator=generator, dtype=torch.float64)
    # Sums of such numbers are different in another order. Some elements are zero.
    magnitudes = 10.0 ** torch.randint(-3, 4, (len(chosen), 1), generator=generator)
    keeps = torch.rand(values.shape, generator=generator) < 0.7
    blocks[chosen] = values * magnitudes * keeps
    return blocks.view(-1)[:NUMEL].clone()


def special(rank, generator):
    values = blocks_of(0.3, generator)
    values[0:5] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 1e-40])
    if rank == 1:
        values[0:4] = torch.tensor([-float("nan"), -float("inf"), -0.0, -0.0])
    values[5 * BLOCK : 9 * BLOCK] = -0.0
    values[12 * BLOCK] = float("nan") if rank == 0 else 0.0
    return values


def cases(rank, size):
    generator = torch.Generator().manual_seed(100 + rank)
    for density in (1.0, 0.5, 0.1, 0.01, 0.0):
        yield f"density {density}", blocks_of(density, generator)
    yield "one empty rank", blocks_of(0.3, generator) * (rank != size - 1)
    last = torch.zeros(NUMEL, dtype=torch.float64)
    last[-1] = rank + 1
    yield "last element only", last
    yield "special numbers", special(rank, generator)


def same(a, b):
    nan_a, nan_b = a.isnan(), b.isnan()
    words = WORDS[a.element_size()]
    a, b = a.masked_fill(nan_a, 7), b.masked_fill(nan_b, 7)
    return torch.equal(nan_a, nan_b) and torch.equal(a.view(words), b.view(words))


def gathered(transport, flat):
    table = flat.new_empty(transport.size, flat.numel())
    transport.all_gather(flat, table)
    return table


def ordered_sum(table, scale):
    wide = torch.float32 if table.element_size() == 2 else table.dtype
    total = torch.zeros(table.shape[1], dtype=wide)
    for row in table:
        total += row.to(wide)
    return (total * scale if scale != 1 else total).to(table.dtype)


def expected_counters(table, rank, lanes):
    wide = torch.zeros(len(table), BLOCKS * BLOCK, dtype=table.dtype)
    wide[:, :NUMEL] = table
    masks = (wide != 0).view(len(table), BLOCKS, BLOCK).any(dim=2)
    firsts = torch.arange(BLOCKS) < lanes.count
    owned = torch.arange(BLOCKS) % lanes.count // lanes.width % len(table) == rank
    up = int((masks[rank] | firsts).sum())
    down = int(((masks.any(dim=0) | firsts) & owned).sum())
    return up, down


def check(transport, executor, flat, scale, table):
    size = transport.size
    # Ranks come and go at different times: the next collective must not meet this one.
    time.sleep(random.random() * 0.002)
    result = flat.clone()
    call = Call(result, BLOCK, scale, transport, Scratch())
    before = transport.bytes_up, transport.bytes_down
    executor.all_reduce(call, None)
    moved = transport.bytes_up - before[0], transport.bytes_down - before[1]
    wanted = ordered_sum(table, scale)
    faults = []
    if executor.deterministic and not same(result, wanted):
        faults.append("it is not the ordered sum")
    if not executor.deterministic:
        finest = 1e-2 if flat.element_size() == 2 else 1e-5
        terms = float(table.double().abs().nan_to_num(posinf=0, neginf=0).max())
        if not torch.allclose(result, wanted, rtol=finest, atol=1e-5 * terms, equal_nan=True):
            faults.append("it is far from the ordered sum")
    replicas = gathered(transport, result).view(WORDS[flat.element_size()])
    if not all(torch.equal(replica, replicas[0]) for replica in replicas):
        faults.append("replicas differ")
    totals = gathered(transport, torch.tensor(moved)).sum(dim=0).tolist()
    if totals[0] != totals[1]:
        faults.append(f"sent {totals[0]} bytes and received {totals[1]}")
    if isinstance(executor, Streaming):
        told = executor.counters.up_blocks, executor.counters.down_blocks
        counted = expected_counters(table, transport.rank, executor.lanes(BLOCKS, size))
        if told != counted:
            faults.append(f"blocks up and down are {told}, not {counted}")
    return faults


def check_all(transport):
    failures, checks = [], 0
    for dtype in DTYPES:
        for case, values in cases(transport.rank, transport.size):
            finite = dtype.is_floating_point
            flat = (values if finite else values.nan_to_num(0, 1, 1).clamp(-1e6, 1e6)).to(dtype)
            table = gathered(transport, flat)
            scale = 1 / 3 if finite else 1.0
            executors = EXECUTORS | MORE if dtype == torch.float32 else EXECUTORS
            for name, executor in executors.items():
                faults = check(transport, executor, flat, scale, table)
                failures += [f"{dtype} {case} {name}: {fault}" for fault in faults]
                checks += 1
    return failures, checks


def check_modes(transport_name):
    """Sum by the public interface, several buckets at a time."""
    sums = {}
    for mode in ("streaming", "agsparse", "sparcml"):
        deterministic = mode != "sparcml"
        with SparseComm(
            mode=mode, block=BLOCK, transport=transport_name, deterministic=deterministic
        ) as comm:
            buckets = [torch.full((n,), comm.rank + 1.0) for n in (NUMEL, 1, 0, 5 * BLOCK)]
            handles = [comm.allreduce_(bucket, async_op=True) for bucket in buckets]
            for handle in handles:
                handle.wait()
            pieces = equal_pieces(NUMEL, BLOCK, comm.size)
            scattered = torch.full((NUMEL,), comm.rank + 1.0)
            comm.reduce_scatter_(scattered, pieces)
            buckets.append(scattered[pieces[comm.rank].start : pieces[comm.rank].stop])
            wanted = (comm.size + 1) / 2
            sums[mode] = all(bool((bucket == wanted).all()) for bucket in buckets)
    return sums


if __name__ == "__main__":
    folder, kind = sys.argv[1:3]
    if kind == "torch":
        dist.init_process_group("gloo")
    transport = open_transport(choice=kind)
    failures, checks = check_all(transport)
    modes = check_modes(kind)
    result = {"failures": failures, "checks": checks, "modes": modes}
    Path(folder, f"rank_{transport.rank}.json").write_text(json.dumps(result))
    transport.barrier()
    transport.close()
    if kind == "torch":
        dist.destroy_process_group()
