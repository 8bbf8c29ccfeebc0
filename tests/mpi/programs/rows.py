# SPDX-License-Identifier: Apache-2.0
"""Rows of a table: duplicates, ranks without any, tables with and without bounds."""

import numpy as np
import torch
from common import digest, sparse_comm
from oracle import same_bits, summed_rows

from wavemare.comm.cost import Constants

SLOW_WIRE = Constants(exchange_s=1e-6, plan_s=0.0)
FAST_WIRE = Constants(exchange_s=0.0, message_s=1.0)


def patterns(ranks, num_rows):
    """Return the ids of each rank by the name of the pattern."""
    rng = np.random.default_rng(ranks)
    half = num_rows // 2
    return {
        "some": [rng.integers(0, num_rows, 17).tolist() for _ in range(ranks)],
        "the same for all": [[3, 1, half]] * ranks,
        "duplicates": [[5, 5, 2, 5, 2, num_rows - 1, 5][: 3 + rank] for rank in range(ranks)],
        "apart": [[rank, rank + ranks] for rank in range(ranks)],
        "none": [[] for _ in range(ranks)],
        "one rank has none": [[7, 0] if rank else [] for rank in range(ranks)],
        "one rank has all": [[] if rank else list(range(20))[::-1] for rank in range(ranks)],
    }


def rows(world, checks, sizes):
    for ranks in sizes:
        group, _, _ = world.groups_of(ranks)
        for average, constants in ((True, SLOW_WIRE), (False, FAST_WIRE)):
            with sparse_comm(world, group, average=average, constants=constants) as comm:
                told = []
                for num_rows, bound in ((40, 40), (40, None), (2**40, None), (2**40, 2**40)):
                    for name, ids in patterns(comm.size, num_rows).items():
                        told += _one(checks, comm, (name, bound), ids)
                group_told = world.gather((world.rank - comm.rank, told))
                mine = [t for first, t in group_told if first == world.rank - comm.rank]
                checks(all(t == mine[0] for t in mine), "replicas differ", comm.size)


def _one(checks, comm, what, ids):
    told = []
    for dtype, dim in ((torch.float32, 8), (torch.bfloat16, 3), (torch.float32, 1)):
        rng = np.random.default_rng(11)
        values = [
            torch.from_numpy(rng.standard_normal((len(numbers), dim))).to(dtype) for numbers in ids
        ]
        if values[0].shape[0]:
            values[0][0] = torch.tensor([1.0, -1.0, 0.0, 0, 0, 0, 0, 0][:dim])
        own = torch.tensor(ids[comm.rank], dtype=torch.int64)
        before = own.clone(), values[comm.rank].clone()
        handle = comm.allreduce_rows_(own, values[comm.rank], what[1])
        found_ids, found = handle.wait()
        scale = 1 / comm.size if comm.average else 1.0
        every, sums = summed_rows(ids, values, scale)
        name = (*what, comm.size, dtype, dim, handle.stats.executor)
        checks(found_ids.tolist() == every, *name, "ids", found_ids.tolist()[:5], every[:5])
        checks(same_bits(found, sums), *name)
        checks(torch.equal(own, before[0]), *name, "changed the ids")
        checks(torch.equal(values[comm.rank], before[1]), *name, "changed the rows")
        told.append((handle.stats.executor, digest(found_ids), digest(found)))
    return told
