# SPDX-License-Identifier: Apache-2.0
"""Sums over two ranks, of which one begins when the other has begun all of its own.

Argument: result folder.
"""

import threading

import torch
from common import leave

from wavemare.engine import init_distributed
from wavemare.engine.health.pending import PendingSums


def ahead(rank):
    """Rank 0 starts three sums before rank 1 starts any; results come in their order."""
    sums, store = (
        PendingSums(torch.distributed.group.WORLD),
        torch.distributed.PrefixStore(
            "ahead", torch.distributed.distributed_c10d._get_default_store()
        ),
    )
    if rank == 1:
        store.wait(["begun"])
    for number in range(3):
        sums.start([1.0, 10.0**number + rank])
    if rank == 0:
        store.set("begun", "yes")
    found = {"pending": [len(sums)], "sums": [sums.wait(keep=2)]}
    found["pending"].append(len(sums))
    found["sums"] += [sums.wait(keep=2), sums.wait()]
    found["pending"].append(len(sums))
    sums.close()
    return found


def precise():
    """Squares that fp32 would drop."""
    sums = PendingSums(torch.distributed.group.WORLD)
    sums.start([1e12 if torch.distributed.get_rank() else 1.0])
    return sums.wait()


def forgotten():
    """A group that is not read to the end is closed; it is the engine's, and still works."""
    group = torch.distributed.group.WORLD
    sums = PendingSums(group)
    sums.start([1.0])
    sums.close()
    total = torch.ones(())
    torch.distributed.all_reduce(total, group=group)
    return {"left": len(sums), "total": float(total), "threads": threading.active_count()}


if __name__ == "__main__":
    init_distributed()
    leave(
        {
            "ahead": ahead(torch.distributed.get_rank()),
            "precise": precise(),
            "forgotten": forgotten(),
        }
    )
