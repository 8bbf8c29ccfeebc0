# SPDX-License-Identifier: Apache-2.0
"""What cannot be summed is refused before anything is sent: the next collective works as ever."""

import functools
import threading

import torch
from common import sparse_comm
from inputs import buckets
from oracle import ordered_sum, same_bits

from wavemare.comm.masks import OwnedRange
from wavemare.errors import CommError, ConfigError


def refusals(world, checks, sizes):
    """Buckets, rows and partitions that are refused, on all ranks or on one."""
    with sparse_comm(world) as comm:
        sparse = torch.eye(4).to_sparse()
        eight = [0] * comm.size + [8]
        with torch.inference_mode():
            inferred = torch.zeros(8)
        bad_buckets = {
            "made in inference mode": inferred,
            "two dimensions": torch.zeros(3, 4),
            "transposed": torch.zeros(3, 4).t(),
            "no dimension": torch.tensor(1.0),
            "every other": torch.zeros(8)[::2],
            "expanded": torch.zeros(1).expand(8),
            "int64": torch.zeros(8, dtype=torch.int64),
            "bool": torch.zeros(8, dtype=torch.bool),
            "complex": torch.zeros(8, dtype=torch.complex64),
            "int32 mean": torch.zeros(8, dtype=torch.int32),
            "sparse": sparse,
            "sparse rows": torch.eye(4).to_sparse_csr(),
        }
        for name, flat in bad_buckets.items():
            checks.refuses(ConfigError, lambda flat=flat: comm.allreduce_(flat), name)
            checks.refuses(ConfigError, lambda flat=flat: comm.reduce_scatter_(flat, eight), name)
        numel, last = 100, comm.size - 1
        bad_partitions = {
            "too few": [0, numel] if comm.size > 1 else [0],
            "too many": [0] * (comm.size + 1) + [numel],
            "descending": [50] + [0] * comm.size,
            "outside": [0] * comm.size + [numel + 1],
            "negative": [-1] + [numel] * comm.size,
            "overlapping": [OwnedRange(0, 60, 0), OwnedRange(50, 100, last)],
            "no such owner": [OwnedRange(0, 100, comm.size)],
            "backwards": [OwnedRange(60, 50, 0)],
        }
        for name, partition in bad_partitions.items():
            for function in (comm.reduce_scatter_, comm.allgather_):
                refused = functools.partial(function, torch.zeros(numel), partition)
                checks.refuses(ConfigError, refused, name)
        ids, rows = torch.tensor([0, 1]), torch.ones(2, 3)
        bad_rows = {
            "int32 ids": (ids.int(), rows, 4),
            "matrix of ids": (ids.view(1, 2), rows, 4),
            "fewer ids": (ids[:1], rows, 4),
            "flat rows": (ids, rows.view(-1), 4),
            "transposed rows": (ids, torch.ones(3, 2).t(), 4),
            "sparse rows": (ids, rows.to_sparse(), 4),
            "int64 rows": (ids, rows.long(), 4),
            "beyond": (ids, rows, 1),
            "negative id": (torch.tensor([-1, 0]), rows, 4),
            "no columns": (ids, torch.ones(2, 0), 4),
            "negative table": (ids[:0], rows[:0], -1),
        }
        before = {
            "of another size": torch.ones(3),
            "of another type": torch.ones(3000 // comm.size).bfloat16(),
        }
        borders = [3000 * owner // comm.size for owner in range(comm.size + 1)]
        for name, value in before.items():
            function = functools.partial(comm.allgather_, torch.ones(3000), borders, before=value)
            checks.refuses(ConfigError, function, name, says="before")
        function = functools.partial(comm.allgather_, torch.ones(8), [], before=torch.ones(8))
        checks.refuses(ConfigError, function, "before of ranges", says="borders")
        for name, arguments in bad_rows.items():
            checks.refuses(ConfigError, lambda a=arguments: comm.allreduce_rows_(*a), name)
        if world.rank == 0:
            checks.refuses(ConfigError, lambda: comm.allreduce_(torch.zeros(2, 2)), "on one rank")
        # Nothing was sent, so the ranks are not out of step.
        everyone = buckets("half", comm.size, 3000, 256, torch.float32)
        flat = everyone[comm.rank].clone()
        comm.allreduce_(flat)
        checks(same_bits(flat, ordered_sum(everyone, 1 / comm.size)), "after refusals")
    for name, value in {"block": 0, "mode": "ordred"}.items():
        checks.refuses(ConfigError, lambda n=name, v=value: sparse_comm(world, **{n: v}), name)
    for mode in ("dense", "packed"):
        checks.refuses(
            ConfigError, lambda m=mode: sparse_comm(world, mode=m), mode, says="determin"
        )


def unusual(world, checks, sizes):
    """Tensors that look odd and are sums all the same."""
    with sparse_comm(world) as comm:
        everyone = buckets("half", comm.size, 3000, 256, torch.float32)
        expected = ordered_sum(everyone, 1 / comm.size)

        leaf = everyone[comm.rank].clone().requires_grad_()
        comm.allreduce_(leaf)
        checks(same_bits(leaf, expected) and leaf.is_leaf and leaf.requires_grad, "leaf")

        parameter = torch.nn.Parameter(everyone[comm.rank].clone().view(50, 60))
        comm.allreduce_(parameter.view(-1))
        checks(same_bits(parameter.view(-1), expected), "view of a parameter")

        whole = torch.full((3200,), 5.0)
        whole[100:3100] = everyone[comm.rank]
        comm.allreduce_(whole[100:3100])
        inside = same_bits(whole[100:3100].clone(), expected)
        around = bool((whole[:100] == 5).all() and (whole[3100:] == 5).all())
        checks(inside and around, "part of a bucket", inside, around)

        odd = torch.zeros(4 * 3000 + 4, dtype=torch.uint8)[4:].view(torch.float32)
        odd.copy_(everyone[comm.rank])
        comm.allreduce_(odd)
        checks(same_bits(odd, expected), "aligned to four bytes")

        leaf_rows = torch.ones(2, 3, requires_grad=True)
        _, summed = comm.allreduce_rows_(torch.tensor([1, 3]), leaf_rows, 4).wait()
        checks(bool((summed == 1).all()) and not summed.requires_grad, "leaf of rows")

        ids, none = comm.allreduce_rows_(torch.empty(0, dtype=torch.int64), rows_of(0), 0).wait()
        checks(ids.shape == (0,) and none.shape == (0, 3), "table without rows", ids, none.shape)

        counts = torch.arange(comm.size, dtype=torch.int32) * (world.rank + 1)
        comm.allgather_(counts, list(range(comm.size + 1)))
        checks(counts.tolist() == [r * (r + 1) for r in range(comm.size)], "counts", counts)

        ranges = torch.arange(comm.size + 1) * 10
        comm.reduce_scatter_(torch.ones(10 * comm.size), ranges)


def closing(world, checks, sizes):
    """A closed communicator says so; closing twice is nothing; the thread ends."""
    before = {thread.name for thread in threading.enumerate()}
    comm = sparse_comm(world, average=False)
    comm.allreduce_(torch.ones(300))
    pending = comm.allreduce_(torch.ones(300), async_op=True)
    comm.close()
    checks(pending.done() and bool((pending.wait() == world.size).all()), "pending at close")
    comm.close()
    checks.refuses(CommError, lambda: comm.allreduce_(torch.ones(3)), "closed")
    left = {thread.name for thread in threading.enumerate()} - before
    checks(not any(name.startswith("wavemare") for name in left), "threads", left)


def rows_of(count):
    return torch.ones(count, 3)
