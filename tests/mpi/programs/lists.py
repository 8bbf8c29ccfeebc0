# SPDX-License-Identifier: Apache-2.0
"""Buckets whose non-zero blocks the caller lists, and dense ones that a sample tells."""

import torch
from common import sparse_comm
from oracle import mask_of, ordered_sum, same_bits

from wavemare.comm.cost import Constants
from wavemare.comm.rows import blocks_of_rows
from wavemare.errors import CommError

BLOCK = 64
SLOW_WIRE = Constants(message_s=1e-6, exchange_s=8e-9, plan_s=0.0)


def _buckets(size, share, numel=BLOCK * 900 + 17):
    made = []
    for rank in range(size):
        draw = torch.Generator().manual_seed(rank)
        blocks = torch.rand(-(-numel // BLOCK), generator=draw) < share
        spread = blocks.repeat_interleave(BLOCK)[:numel]
        made.append(torch.randn(numel, generator=draw).masked_fill(~spread, 0.0))
    return made


def lists(world, checks, sizes):
    """The same bits as by a search, also where one rank has no list or lists too much."""
    for mode in ("auto", "pushpull", "allgather", "ordered"):
        settings = {"mode": mode, "block": BLOCK, "average": False, "constants": SLOW_WIRE}
        with sparse_comm(world, None, **settings) as comm:
            buckets = _buckets(comm.size, 0.05)
            expected = ordered_sum(buckets)
            blocks = torch.tensor(mask_of(buckets[comm.rank], BLOCK), dtype=torch.int64)
            more = torch.cat([blocks.flip(0), torch.arange(900), blocks])
            # The last list is the sixth or seventh, neither of which is checked.
            mixed = None if comm.rank else blocks
            for given in (blocks, more, mixed, *[blocks] * 4):
                flat = buckets[comm.rank].clone()
                handle = comm.allreduce_(flat, key="listed", blocks=given)
                checks(same_bits(flat, expected), mode, "sums")
            phases = handle.stats.phases_s
            looked = mode != "ordered"
            checks(("list" in phases, "mask" in phases) == (looked, False), mode, phases)
            borders = [0, *[expected.numel()] * comm.size]
            if mode in {"auto", "pushpull", "ordered"}:
                flat = buckets[comm.rank].clone()
                comm.reduce_scatter_(flat, borders, blocks=blocks)
                own = flat if comm.rank == 0 else expected
                checks(same_bits(own, expected), mode, "scattered sums")

    # A rank that must search decides for all: here a search costs more than sending everything.
    reading = Constants(message_s=1e-6, exchange_s=8e-9, mask_s=1.0, plan_s=0.0)
    with sparse_comm(world, None, mode="auto", block=BLOCK, constants=reading) as comm:
        scale = 1 / comm.size
        for given, dense in ((blocks, False), (None if comm.rank else blocks, comm.size > 1)):
            flat = buckets[comm.rank].clone()
            stats = comm.allreduce_(flat, key=f"searched {dense}", blocks=given).stats
            checks(same_bits(flat, ordered_sum(buckets, scale)), "sums of unlike lists")
            checks((stats.executor == "ordered") == dense, stats.executor, "of unlike lists")


def rows(world, checks, sizes):
    """Blocks of a table's rows, whatever the width of a row beside that of a block."""
    with sparse_comm(world, None, mode="auto", block=BLOCK) as comm:
        for dim in (1, 10, 63, 64, 65, 200):
            for start in (0, 64, 7):
                ids = torch.tensor([3, 0, 3, 7 + comm.rank])
                flat = torch.zeros(start + 20 * dim)
                flat[start:].view(20, dim)[ids] = 1.0
                blocks = blocks_of_rows(ids, dim, BLOCK, start)
                found = sorted(set(blocks.tolist()))
                checks(found == mask_of(flat, BLOCK), dim, start, found)
                comm.allreduce_(flat, blocks=blocks)


def strays(world, checks, sizes):
    """A wrong list: searched from then on if it is the first, refused everywhere if it is later."""
    wrong = world.rank == world.size - 1
    buckets = _buckets(world.size, 0.05)
    blocks = torch.tensor(mask_of(buckets[world.rank], BLOCK), dtype=torch.int64)
    settings = {"block": BLOCK, "average": False, "constants": SLOW_WIRE}
    with sparse_comm(world, None, **settings) as comm:
        for _ in range(3):
            flat = buckets[world.rank].clone()
            comm.allreduce_(flat, key="first", blocks=blocks[wrong:])
            checks(same_bits(flat, ordered_sum(buckets)), "sums despite a wrong first list")
        checks(comm.allreduce_(flat, key="right", blocks=blocks[:0]) is not None, "goes on")
    # Wherever the block is, samples of a few calls find it.
    with sparse_comm(world, None, **settings) as comm:
        right = torch.arange(0, 250, 50)
        for number in range(20):
            flat = torch.zeros(BLOCK * 255).index_fill_(0, BLOCK * right, 1.0)
            if number > 16 and wrong:
                flat[-1] = 1.0
            try:
                comm.allreduce_(flat, key="the last block", blocks=right)
            except CommError as error:
                checks((error.value, number in (17, 18)) == (254, True), number, error)
                break
        else:
            checks(False, "the last block is in no sample")
    # Later it is an error.
    comm = sparse_comm(world, None, **settings)
    for _ in range(16):
        comm.allreduce_(buckets[world.rank].clone(), blocks=blocks)
    try:
        comm.allreduce_(buckets[world.rank].clone(), blocks=blocks[wrong:])
        checks(False, "a wrong list went through")
    except CommError as error:
        first = mask_of(buckets[-1], BLOCK)[0]
        checks((error.key, error.value) == ("blocks", first), str(error))
        checks(f"rank {world.size - 1} " in error.reason, str(error))
    comm.close()


def samples(world, checks, sizes):
    """Dense buckets are told by a sample, if all ranks find them dense; else masks are taken."""
    settings = {"mode": "auto", "block": BLOCK, "average": False, "constants": SLOW_WIRE}
    with sparse_comm(world, None, **settings) as comm:
        numel = BLOCK * 5000
        dense, sparse = _buckets(comm.size, 1.1, numel), _buckets(comm.size, 0.01, numel)
        mixed = [*dense[:-1], sparse[-1]]
        for name, buckets, masked in (
            ("dense", dense, False),
            ("mixed", mixed, True),
            ("sparse", sparse, True),
        ):
            flat = buckets[comm.rank].clone()
            # A key for each bucket: the selector has no times of earlier calls to learn from.
            stats = comm.allreduce_(flat, key=name).stats
            checks(same_bits(flat, ordered_sum(buckets)), name, "sums")
            checks(("mask" in stats.phases_s) == masked, name, stats)
            checks((stats.union is not None) == masked, name, stats)
            checks(masked or stats.density == 1.0, name, stats)
            checks(masked or stats.executor == "ordered", name, stats)
        # The sample is of the whole bucket, whatever its size.
        flat = torch.zeros(BLOCK * 255)
        flat[: BLOCK * 128] = 1.0
        stats = comm.allreduce_(flat, key="a dense first half").stats
        # One rank sends nothing: it needs no mask to leave a half-empty bucket as it is.
        masked = "mask" in stats.phases_s and stats.density == 128 / 255
        checks(masked or comm.size == 1, stats)
