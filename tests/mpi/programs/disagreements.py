# SPDX-License-Identifier: Apache-2.0
"""Ranks that call something else than the others: an error that names one of them, and no hang."""

import functools

import torch
from common import sparse_comm

from wavemare.comm.cost import Constants
from wavemare.comm.masks import OwnedRange
from wavemare.comm.transport import open_transport
from wavemare.comm.transport.staging import StagedTransport
from wavemare.errors import CommError


def disagreements(world, checks, sizes):
    """The last rank differs from the others in one thing at a time."""
    odd = world.rank == world.size - 1
    ids = torch.tensor([1, 2])
    halves = [0, *([50] * (world.size - 1)), 100]
    ranges = [OwnedRange(0, 50, 0), OwnedRange(50, 100, world.size - 1)]
    calls = {
        "size": lambda comm: comm.allreduce_(torch.ones(100 + odd)),
        "type": lambda comm: comm.allreduce_(torch.ones(100, dtype=(_F32, _F16)[odd])),
        "name": lambda comm: comm.allreduce_(torch.ones(100), key=f"bucket {odd}"),
        "operation": lambda comm: _either(odd, comm.allreduce_, comm.reduce_scatter_, halves),
        "order": lambda comm: [comm.allreduce_(torch.ones(n)) for n in ((50, 60), (60, 50))[odd]],
        "partition": lambda comm: comm.reduce_scatter_(
            torch.ones(100), halves if odd else ranges[:1]
        ),
        "gathered": lambda comm: comm.allgather_(torch.ones(100), halves if odd else ranges[:1]),
        "columns": lambda comm: comm.allreduce_rows_(ids, torch.ones(2, 3 + odd), 9),
        "rows": lambda comm: comm.allreduce_rows_(ids, torch.ones(2, 3), 9 + odd),
        "bound": lambda comm: comm.allreduce_rows_(ids, torch.ones(2, 3), None if odd else 9),
    }
    for name, call in calls.items():
        _expect(world, checks, name, {}, call)
    settings = {
        "block": {"block": 64 if odd else 256},
        "mode": {"mode": "pushpull" if odd else "ordered"},
        "mode, masks alike": {"mode": "pushpull" if odd else "allgather"},
        "mean": {"average": odd},
        "order of sums": {"mode": "auto", "deterministic": odd},
        "constants": {"constants": Constants(exchange_s=1e-12 if odd else 1e-3)},
    }
    for name, keys in settings.items():
        _expect(world, checks, name, keys, lambda comm: comm.allreduce_(torch.ones(10_000)))


_F32, _F16 = torch.float32, torch.float16


def _either(odd, one, other, partition):
    return other(torch.ones(100), partition) if odd else one(torch.ones(100))


def _expect(world, checks, name, keys, call, opened=lambda: None):
    world.meet()
    others = "rank 0" if world.rank == world.size - 1 else f"rank {world.size - 1}"
    made = []

    def make_and_call():
        made.append(sparse_comm(world, opened(), **keys))
        call(made[0])

    checks.refuses(CommError, make_and_call, "differ in", name, says=f"{others} calls")
    for comm in made:  # whatever else is called fails too
        again = functools.partial(comm.allreduce_, torch.ones(3))
        checks.refuses(CommError, again, name, "afterwards")
    world.meet()
    for comm in made:
        comm.close()


def staging(world, checks, sizes):
    """Ranks that cut their messages differently are refused, and no message is taken for another.

    One of 8 MiB travels in chunks where it is staged, and in one where it is not.
    """
    odd = world.rank == world.size - 1

    def opened():
        inner = open_transport(choice=world.kind, staging="direct", timeout_s=600)
        return StagedTransport(inner, stages_host=True) if odd else inner

    _expect(world, checks, "staging", {}, lambda comm: comm.allreduce_(torch.ones(9)), opened)
    _expect(world, checks, "staging, measured", {"constants": None}, lambda comm: None, opened)
    if world.kind == "torch":
        return  # gloo does not tell how long a message was
    transport = opened()
    arrived = torch.empty(transport.size, 2 << 20)
    parts = list(arrived)
    checks.refuses(CommError, lambda: transport.all_gather_parts(parts), "cut", says="bytes")
    world.meet()
    transport.close()
