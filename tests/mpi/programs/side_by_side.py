# SPDX-License-Identifier: Apache-2.0
"""Collectives in flight while others run: handles, two communicators, nodes, a selector at work."""

import threading
import time
from dataclasses import astuple

import torch
from common import sparse_comm
from inputs import buckets
from oracle import ordered_sum, same_bits

from wavemare.comm.cost import Constants
from wavemare.comm.sparse import SparseComm
from wavemare.comm.transport import open_transport
from wavemare.errors import CommError

# So fast that dense is the best for dense buckets, in any case.
FAST_WIRE = Constants(exchange_s=1e-10, message_s=1e-6, mask_s=1e-9, plan_s=1e-7)


def handles(world, checks, sizes):
    """Many buckets in flight at once, waited for in another order, with callbacks."""
    with sparse_comm(world) as comm:
        pending, ended = [], []
        for number, pattern in enumerate(("half", "tenth", "dense", "zero") * 5):
            numel = 10_000 + 37 * number
            everyone = buckets(pattern, comm.size, numel, 256, torch.float32)
            flat = everyone[comm.rank].clone()
            handle = comm.allreduce_(flat, key=f"{number}", async_op=True)
            handle.then(lambda _, number=number: ended.append(number))
            pending.append((handle, flat, everyone))
        main = threading.current_thread()
        sums = torch.zeros(200, 200)
        while not all(handle.done() for handle, _, _ in pending):
            sums += torch.ones(200, 200) @ torch.ones(200, 200)
            time.sleep(0.001)
        for handle, flat, everyone in reversed(pending):
            checks(handle.wait() is flat and handle.wait() is flat, "waits")
            checks(same_bits(flat, ordered_sum(everyone, 1 / comm.size)), "in flight")
        checks(ended == list(range(20)), "callbacks", ended)
        late = []
        pending[0][0].then(lambda _: late.append(threading.current_thread() is main))
        checks(late == [True], "late callback")
        totals = comm.totals.take()
        checks(sum(v for k, v in totals.items() if k.startswith("sparse_calls_")) == 20, totals)
        checks(comm.totals.take() == {}, "taken")
        pending.clear()


def retried(world, checks, sizes):
    """A transport that one rank tried to open alone opens when all do."""
    if world.rank == world.size - 1:
        checks.refuses(CommError, lambda: open_transport(choice="torch", timeout_s=1.0), "alone")
    world.meet()
    with sparse_comm(world, average=False, timeout_s=20) as comm:
        flat = torch.full((8,), float(world.rank))
        comm.allreduce_(flat)
        checks(bool((flat == sum(range(world.size))).all()), "together")


def large_message(world, checks, sizes):
    """A message of more than 2 GiB between two ranks, and a byte of each of its parts."""
    transport = open_transport(choice=world.kind, timeout_s=600)
    num_bytes = (2 << 30) + 12_345
    content = torch.arange(251, dtype=torch.uint8).repeat(num_bytes // 251 + 1)[:num_bytes]
    exchange = transport.begin()
    if world.rank == 0:
        exchange.send(1, content)
        exchange.wait()
        checks(transport.bytes_up == num_bytes, "bytes", transport.bytes_up)
    else:
        arrived = torch.zeros(num_bytes, dtype=torch.uint8)
        exchange.receive(0, arrived)
        exchange.wait()
        checks(transport.bytes_down == num_bytes, "bytes", transport.bytes_down)
        checks(torch.equal(arrived, content), "content")
    transport.close()


def two_communicators(world, checks, sizes):
    """Two threads, each with a communicator of its own, whose calls interleave at random."""
    pair = [sparse_comm(world, mode=mode) for mode in ("pushpull", "ordered")]
    failures = []

    def work(comm, seed):
        for step in range(25):
            everyone = buckets("half", comm.size, 3000 + seed + step, 256, torch.float32)
            flat = everyone[comm.rank].clone()
            # The ranks' threads get out of step.
            time.sleep(0.003 * ((step * 7 + world.rank * 3 + seed) % 4))
            comm.allreduce_(flat, async_op=bool(step % 2)).wait()
            if not same_bits(flat, ordered_sum(everyone, 1 / comm.size)):
                failures.append((seed, step))

    threads = [threading.Thread(target=work, args=(comm, seed)) for seed, comm in enumerate(pair)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    checks(not failures, "two communicators", failures)
    # Two of one thread: what the ranks submit in different orders runs independently.
    flats = [torch.full((5000,), float(world.rank + 1)) for _ in pair]
    order = (0, 1) if world.rank % 2 else (1, 0)
    pending = [pair[which].allreduce_(flats[which], async_op=True) for which in order]
    for handle in pending:
        handle.wait()
    mean = (world.size + 1) / 2
    checks(all((flat == mean).all() for flat in flats), "crosswise")
    for comm in pair:
        comm.close()


def nodes(world, checks, sizes):
    """Four ranks as two nodes of two: dense within, sparse between."""
    if world.size < 4:
        checks(False, "needs four ranks")
        return
    group, rank, count = world.groups_of(4)
    if count != 4:
        return
    for names in (("a", "a", "b", "b"), ("a", "b", "a", "b")):
        for mode in ("ordered", "pushpull", "allgather", "auto"):
            transport = open_transport(group, choice=world.kind, timeout_s=600)
            transport.host = names[rank]
            with SparseComm(
                transport,
                mode=mode,
                hierarchical=True,
                # Those of "auto" are measured by the ranks of each place among themselves.
                constants=None if mode == "auto" else Constants(),
            ) as comm:
                for pattern, numel in (("tenth", 9000), ("negative zeros", 4096), ("dense", 300)):
                    for dtype in (torch.float32, torch.bfloat16):
                        everyone = buckets(pattern, 4, numel, 256, dtype)
                        flat = everyone[rank].clone()
                        comm.allreduce_(flat)
                        sums = [
                            ordered_sum([everyone[r] for r in range(4) if names[r] == node])
                            for node in ("a", "b")
                        ]
                        expected = ordered_sum(sums, 0.25)
                        checks(same_bits(flat, expected), "nodes", names, mode, pattern, dtype)
                for numel in (0, 1, 7):
                    flat = torch.full((numel,), float(rank))
                    comm.allreduce_(flat)
                    checks(bool((flat == 1.5).all()), "nodes", names, mode, numel)


def unnamed(world, checks, sizes):
    """Buckets without a key: a scatter has a history of its own, whatever reductions had."""
    with sparse_comm(world, constants=FAST_WIRE, deterministic=False) as comm:
        numel = 256 * comm.size
        for _ in range(8):  # until it goes without looking
            flat = torch.full((numel,), float(comm.rank + 1))
            comm.allreduce_(flat)
        mean = (comm.size + 1) / 2
        checks(bool((flat == mean).all()), "unnamed", "reduced")
        flat = torch.full((numel,), float(comm.rank + 1))
        comm.reduce_scatter_(flat, [256 * rank for rank in range(comm.size + 1)])
        own = flat[256 * comm.rank : 256 * (comm.rank + 1)]
        checks(bool((own == mean).all()), "unnamed", "scattered")


def selection(world, checks, sizes):
    """The ranks choose alike, although their clocks differ; a sample tells dense buckets."""
    with sparse_comm(world, constants=FAST_WIRE) as comm:
        told, looked = [], []
        for step in range(60):
            pattern = "dense" if step < 40 else "hundredth"
            everyone = buckets(pattern, comm.size, 256 * 40, 256, torch.float32)
            flat = everyone[comm.rank].clone()
            if world.rank == 1:
                time.sleep(0.001 * (step % 3))
            stats = comm.allreduce_(flat, key="bucket").stats
            told.append(stats.executor)
            looked.append(stats.union is not None)
            checks(same_bits(flat, ordered_sum(everyone, 1 / comm.size)), "step", step)
        every = world.gather((told, looked))
        checks(all(one == every[0] for one in every), "the ranks chose differently", told)
        dense = [place for place in range(40) if told[place] != "ordered"]
        if world.size > 1 and not dense:
            checks(not any(looked[:40]), "masks of dense buckets", looked)


def calibrated(world, checks, sizes):
    """Constants that are measured are positive and the same on all ranks."""
    with sparse_comm(world, constants=None) as comm:
        told = world.gather(list(astuple(comm.constants)))
        checks(all(one == told[0] for one in told), "constants", told)
        checks(all(0 < value < 1 for value in told[0]) or comm.size == 1, "sane", told[0])
        everyone = buckets("tenth", comm.size, 5000, 256, torch.float32)
        flat = everyone[comm.rank].clone()
        comm.allreduce_(flat)
        checks(same_bits(flat, ordered_sum(everyone, 1 / comm.size)), "calibrated")
