# SPDX-License-Identifier: Apache-2.0
"""Many steps of everything, at random but alike on all ranks."""

import gc
import threading
import weakref

import numpy as np
import torch
from common import resident_bytes, sparse_comm
from inputs import DENSITIES, buckets
from oracle import ordered_sum, same_bits, summed_rows

CALLS = ("allreduce", "reduce_scatter", "rows")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 300, 5_000, 20_001)


def soak(world, checks, sizes, steps=1000):
    comms = [sparse_comm(world, mode=mode) for mode in ("auto", "pushpull")]
    rng = np.random.default_rng(5)
    resident, threads, references, pending = [], set(), [], []
    for step in range(steps):
        comm = comms[int(rng.integers(2))]
        call, dtype = CALLS[int(rng.integers(3))], DTYPES[int(rng.integers(3))]
        numel = SIZES[int(rng.integers(4))]
        pattern = [*DENSITIES][int(rng.integers(5))]
        cut, waits = int(rng.integers(numel + 1)), int(rng.integers(1, 6))
        everyone = buckets(pattern, comm.size, numel, 256, dtype)
        begun = _begin(comm, call, everyone, cut, step)
        references.append(weakref.ref(begun[0]))
        pending.append((step, call, *begun))
        while len(pending) >= waits:
            _check(checks, *pending.pop(0))
        if step % max(steps // 20, 1) == 0:
            while pending:
                _check(checks, *pending.pop(0))
            del begun
            for each in comms:
                each.totals.take()
            gc.collect()
            resident.append(resident_bytes())
            threads.add(threading.active_count())
    while pending:
        _check(checks, *pending.pop(0))
    begun = None
    held = sum(reference() is not None for reference in references)
    checks(held == 0, held, "handles are held")
    checks(len(threads) == 1 or len(threads - {min(threads)}) == 1, "threads", threads)
    settled = resident[len(resident) // 4 :]
    grown = settled[-1] - settled[0]
    print(f"{steps} steps, grown by {grown / 2**20:.1f} MiB", flush=True)
    checks(grown < 8 << 20, "memory", [size >> 20 for size in resident])
    for comm in comms:
        comm.close()


def _begin(comm, call, everyone, cut, step):
    """Return a handle and what it must give."""
    scale, own = 1 / comm.size, everyone[comm.rank]
    if call == "rows":
        ids = [[(7 * k * (rank + 1) + step) % 50 for k in range(rank + 3)] for rank in range(4)]
        ids = ids[: comm.size]
        values = [torch.full((len(numbers), 2), float(len(numbers))) for numbers in ids]
        numbers = torch.tensor(ids[comm.rank])
        handle = comm.allreduce_rows_(numbers, values[comm.rank], 50, async_op=True)
        return handle, summed_rows(ids, values, scale)
    flat = own.clone()
    if call == "allreduce":
        return comm.allreduce_(flat, async_op=True), (flat, ordered_sum(everyone, scale))
    borders = [0] + [cut] * (comm.size - 1) + [flat.numel()]
    handle = comm.reduce_scatter_(flat, borders, async_op=True)
    own = slice(borders[comm.rank], borders[comm.rank + 1])
    return handle, (flat[own], ordered_sum(everyone, scale)[own])


def _check(checks, step, call, handle, expected):
    found = handle.wait()
    if call == "rows":
        ids, sums = found
        checks(ids.tolist() == expected[0], step, "ids")
        checks(same_bits(sums, expected[1]), step, "rows")
    else:
        checks(same_bits(expected[0].clone(), expected[1]), step, call)
