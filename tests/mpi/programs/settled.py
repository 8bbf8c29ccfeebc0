# SPDX-License-Identifier: Apache-2.0
"""Buckets that all ranks have found dense call after call are summed without a look."""

import torch
from common import sparse_comm
from oracle import close, same_bits

from wavemare.comm.cost import Constants
from wavemare.errors import CommError

BLOCK = 64
NUMEL = BLOCK * 300
FREE = Constants(dense_latency_s=1e-9, dense_s=1e-12, exchange_s=8e-9, plan_s=0.0)
"""The library's reduction costs nothing, so that it is chosen for all but empty buckets."""


def settled(world, checks, sizes):
    """Sums go on as the library's; values that are not finite stay; thin gradients end it."""
    for mode in ("auto", "dense"):
        settings = {"mode": mode, "block": BLOCK, "constants": FREE, "deterministic": False}
        with sparse_comm(world, None, **settings) as comm:
            looks = []
            for step in range(40):
                drawn = [torch.Generator().manual_seed(step + 100 * r) for r in range(comm.size)]
                everyone = [torch.randn(NUMEL, generator=each) for each in drawn]
                everyone[-1][7] = (torch.nan, torch.inf, -0.0)[step % 3]
                flat = everyone[comm.rank].clone()
                # Two at a time, of which one is not waited for at once; then three of one memory.
                other = torch.full((NUMEL,), float(comm.rank))
                handle = comm.allreduce_(flat, key="dense", async_op=True)
                comm.allreduce_(other, key="other")
                checks(handle.wait() is flat, "gave another tensor")
                again = torch.full((NUMEL,), float(comm.rank))
                three = [comm.allreduce_(again, key=key, async_op=True) for key in "ppq"]
                checks(all(each.wait() is again for each in three), "another tensor")
                checks(again.eq((comm.size - 1) / 2).all(), mode, step, "one after the other")
                finite = torch.arange(NUMEL) != 7
                sums = [each[finite] for each in everyone]
                checks(close(flat[finite], sums, 1 / comm.size), mode, step, "sums")
                checks(other.eq((comm.size - 1) / 2).all(), mode, step, "the other one's")
                checks(flat[7].isfinite() == (step % 3 == 2), mode, step, flat[7])
                checks(handle.stats.executor == "dense", mode, handle.stats)
                looks.append("sample" in handle.stats.phases_s)
            if mode == "auto":
                looked = [step for step, look in enumerate(looks) if look]
                checks(looked == [0, 1, 2, 3, 19, 35], looked)


def thinned(world, checks, sizes):
    """A bucket that has become sparse is found within a few calls."""
    # Sums of few blocks are much faster than the library's, those of all blocks much slower.
    wire = Constants(1e-9, 1e-9, 1e-9, 1e-10, mask_s=0.0, plan_s=0.0)
    settings = {"block": BLOCK, "constants": wire, "deterministic": False, "average": False}
    with sparse_comm(world, None, **settings) as comm:
        found = []
        for step in range(40):
            flat = torch.ones(NUMEL)
            if step >= 8:
                flat[BLOCK:] = 0.0
            expected = flat * comm.size
            found.append(comm.allreduce_(flat, key="thins").stats.executor)
            checks(same_bits(flat, expected), step, "sums")
        checks(comm.size == 1 or found[:8] == ["dense"] * 8, found)
        checks(comm.size == 1 or set(found[-16:]).isdisjoint({"dense"}), found)
        comm.close()
        checks.refuses(CommError, lambda: comm.allreduce_(flat, key="thins"), "after the end")
