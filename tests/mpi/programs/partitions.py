# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter and allgather for partitions of all kinds."""

import functools
import itertools

import torch
from common import sparse_comm
from inputs import buckets
from oracle import ordered_sum, same_bits

from wavemare.comm.masks import OwnedRange
from wavemare.comm.reduction import HEADER_BYTES
from wavemare.errors import ConfigError

BLOCK = 64
NUMEL = BLOCK * 31 + 13
MODES = ("ordered", "pushpull", "allgather", "auto", "packed", "dense")


def partitions(ranks):
    """Return partitions by name: borders, or ranges."""
    equal = [NUMEL * owner // ranks for owner in range(ranks + 1)]
    blocks = [min(BLOCK * (32 * owner // ranks), NUMEL) for owner in range(ranks)] + [NUMEL]
    odd = [0, *sorted((7 * owner * owner + 5) % NUMEL for owner in range(1, ranks)), NUMEL]
    cuts = [0, 1, 63, 64, 65, 190, 191, 500, 1000, 1001, NUMEL - 1, NUMEL]
    many = [OwnedRange(*pair, place % ranks) for place, pair in enumerate(itertools.pairwise(cuts))]
    return {
        "equal": equal,
        "whole blocks": blocks,
        "borders inside blocks": odd,
        "empty for all but the last": [0] * ranks + [NUMEL],
        "empty for all but the first": [0] + [NUMEL] * ranks,
        "several ranges": many,
        "several ranges, out of order": many[::-1],
        "with gaps": [owned for owned in many if owned.stop - owned.start > 1],
        "with empty ranges": [OwnedRange(64, 64, 0), *many, OwnedRange(NUMEL, NUMEL, ranks - 1)],
        "nobody's": [],
    }


def as_pieces(partition):
    if all(isinstance(item, OwnedRange) for item in partition):
        return partition
    return [OwnedRange(*pair, owner) for owner, pair in enumerate(itertools.pairwise(partition))]


def reduce_scatters(world, checks, sizes):
    for ranks in sizes:
        group, _, _ = world.groups_of(ranks)
        for mode in MODES:
            exact = mode not in {"packed", "dense"}
            with sparse_comm(world, group, mode=mode, block=BLOCK, deterministic=exact) as comm:
                if mode not in {"ordered", "pushpull", "auto"}:
                    scatter = functools.partial(comm.reduce_scatter_, torch.ones(8), [])
                    checks.refuses(ConfigError, scatter, mode, says="reduce_scatter_")
                    continue
                for name, partition in partitions(comm.size).items():
                    for pattern, dtype in (
                        ("tenth", torch.float32),
                        ("negative zeros", torch.bfloat16),
                        ("zero", torch.float32),
                    ):
                        everyone = buckets(pattern, comm.size, NUMEL, BLOCK, dtype)
                        flat = everyone[comm.rank].clone()
                        comm.reduce_scatter_(flat, partition)
                        summed = ordered_sum(everyone, 1 / comm.size)
                        for owned in as_pieces(partition):
                            if owned.owner == comm.rank:
                                own = slice(owned.start, owned.stop)
                                what = (mode, comm.size, name, pattern, dtype, owned)
                                checks(same_bits(flat[own], summed[own]), *what)


def allgathers(world, checks, sizes):
    for ranks in sizes:
        group, _, _ = world.groups_of(ranks)
        with sparse_comm(world, group, mode="ordered", block=BLOCK) as comm:
            for (name, partition), dtype in itertools.product(
                partitions(comm.size).items(), (torch.float32, torch.float16, torch.int32)
            ):
                everyone = buckets("half", comm.size, NUMEL, BLOCK, dtype)
                flat = everyone[comm.rank].clone()
                expected = flat.clone()
                ranges = as_pieces(partition)
                for owned in ranges:
                    own = slice(owned.start, owned.stop)
                    expected[own] = everyone[owned.owner][own]
                handle = comm.allgather_(flat, partition)
                down = sum(p.stop - p.start for p in ranges if p.owner != comm.rank)
                found = handle.stats.bytes_down - HEADER_BYTES * (comm.size - 1)
                checks(found == down * flat.element_size(), comm.size, name, dtype, "bytes")
                checks(same_bits(flat, expected), comm.size, name, dtype)


def changes(world, checks, sizes):
    """Gathers of what has changed have the bits of gathers of everything, and send less."""
    for ranks in sizes:
        group, _, _ = world.groups_of(ranks)
        with sparse_comm(world, group, mode="ordered", block=BLOCK) as comm:
            for (name, borders), dtype, (case, share) in itertools.product(
                partitions(comm.size).items(),
                (torch.float32, torch.bfloat16, torch.float64, torch.int32),
                (("none", 0.0), ("some", 0.02), ("odd", 0.02), ("all", 1.0)),
            ):
                if not all(isinstance(border, int) for border in borders) or not borders:
                    continue
                common = buckets("half", 1, NUMEL, BLOCK, dtype)[0]
                if case == "odd":
                    common[::3] = odd(torch.arange(NUMEL), dtype)[::3]
                flat, everyone = common.clone(), common.clone()
                for owner, (start, stop) in enumerate(itertools.pairwise(borders)):
                    generator = torch.Generator().manual_seed(owner)
                    places = start + torch.randperm(stop - start, generator=generator)
                    places = places[: int(share * (stop - start))]
                    # What differs may be the sign of a zero, or the payload of a NaN.
                    words = everyone.view(WORDS[dtype.itemsize])
                    words[places] ^= SIGN[dtype.itemsize] if owner % 2 else 1
                    if case == "odd":  # whatever was there before
                        everyone[places] = odd(places // 2, dtype)
                own = slice(borders[comm.rank], borders[comm.rank + 1])
                flat[own] = everyone[own]
                handle = comm.allgather_(flat, borders, before=common[own].clone())
                what = comm.size, name, dtype, case
                words, expected = (each.view(WORDS[dtype.itemsize]) for each in (flat, everyone))
                checks(torch.equal(words, expected), *what)
                stats = handle.stats
                checks(stats.executor == ("dense" if case == "all" else "changes"), *what)
                everything = (borders[-1] - borders[0]) * dtype.itemsize * (comm.size - 1)
                if case == "none":
                    checks(stats.bytes_up < everything / 4 + 200 * comm.size, *what)


def odd(places, dtype):
    """Return NaN, infinities and zeros of both signs by turns; of integers the largest ones."""
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max - places.to(dtype) % 5
    values = torch.tensor([torch.nan, torch.inf, -0.0, -torch.inf, 0.0], dtype=dtype)
    return values[places % len(values)]


WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SIGN = {size: -(1 << (8 * size - 1)) for size in WORDS}
