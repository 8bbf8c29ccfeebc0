# SPDX-License-Identifier: Apache-2.0
"""Sums of blocks against slow twins: ``check_...`` yields (case, whether it is right)."""

from itertools import product

import torch
from slow_twins import HALVES, bucket, intact, same, slow_reduce

from wavemare.comm.kernels import DTYPES

SINGLE, DOUBLE = torch.float32, torch.float64
HALF, BF16 = HALVES
INF = float("inf")


def reduce_case(subject, kernels, packed, sources, block, scale, offset=64):
    out = subject.guarded(torch.full((sources.shape[1] * block,), 3, dtype=packed.dtype), offset)
    source = subject.guarded(packed, offset)
    kernels.reduce(source, sources.to(subject.device), block, scale, out)
    expected = slow_reduce(packed, sources, block, scale)
    return same(out, expected) and intact(out) and same(source, packed)


def places_of(ranks, count, seed, ordered=False):
    """Deal the numbers of blocks; about a third are missing."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(ranks, count, generator=generator) < 0.67
    sources = torch.full((ranks, count), -1)
    rows = int(there.sum())
    sources[there] = torch.arange(rows) if ordered else torch.randperm(rows, generator=generator)
    return sources, rows


def check_reduce(subject):
    for dtype, block, ranks in product(DTYPES, (64, 256, 100), (1, 2, 5)):
        scales = (1,) if dtype == torch.int32 else (1, 1 / 3, 0.5)
        for count, scale in product((1, 9), scales):
            sources, rows = places_of(ranks, count, seed=ranks + block)
            packed = bucket(dtype, rows * block, block, seed=ranks, dense=0.7)
            case = f"{dtype} {block} {ranks} {count} {scale}"
            yield case, reduce_case(subject, subject.small, packed, sources, block, scale)


def check_reduce_of_odd_rows(subject):
    dtypes = DTYPES if subject.long else (SINGLE, BF16, HALF)
    for dtype, block in product(dtypes, (1, 3, 75, 768, 2049, 4096)):
        sources, rows = places_of(3, 5, seed=block)
        packed = bucket(dtype, rows * block, block, seed=block, dense=0.8)
        tiles = [("small", 64), ("small", 1), ("usual", 64)]
        for name, offset in tiles if subject.long else tiles[:2]:
            kernels = getattr(subject, name)
            case = f"{dtype} {block} {name} {offset}"
            yield case, reduce_case(subject, kernels, packed, sources, block, 1, offset)


def check_reduce_of_many_blocks(subject):
    for dtype, ordered in product((SINGLE, BF16, DOUBLE), (False, True)):
        sources, rows = places_of(3, 1100, seed=1, ordered=ordered)
        packed = torch.randn(rows * 64, generator=torch.Generator().manual_seed(2)).to(dtype)
        case = f"{dtype} {ordered}"
        yield case, reduce_case(subject, subject.usual, packed, sources, 64, 0.3)


def check_reduce_of_nothing(subject):
    device = subject.device
    for sources in (torch.full((3, 2), -1), torch.empty((0, 2), dtype=torch.int64)):
        packed = torch.zeros(0)
        out = torch.full((128,), 3.0, device=device)
        subject.small.reduce(packed.to(device), sources.to(device), 64, 0.5, out)
        yield f"{tuple(sources.shape)}", same(out, torch.zeros(128))
    no_places = torch.empty((3, 0), dtype=torch.int64, device=device)
    subject.small.reduce(out[:0], no_places, 64, 1, out[:0])


def check_reduce_known_sums(subject):
    def sums(dtype, rows, scale=1.0):
        """Return what the kernel makes of one block on each rank."""
        packed = torch.tensor(rows, dtype=dtype)
        out = torch.empty(packed.shape[1], dtype=dtype, device=subject.device)
        sources = torch.arange(len(rows), device=subject.device)[:, None]
        packed_blocks = packed.flatten().to(subject.device)
        subject.small.reduce(packed_blocks, sources, packed.shape[1], scale, out)
        return out.tolist()

    # In the order of the ranks, and not in another.
    yield "order", sums(SINGLE, [[2.0**24], [1.0], [1.0], [-(2.0**24)]]) == [0.0]
    yield "other order", sums(SINGLE, [[2.0**24], [-(2.0**24)], [1.0], [1.0]]) == [2.0]
    # Each sum of 16-bit numbers would stay 256, or 2048, if it were rounded before the end.
    yield "bfloat16 in float32", sums(BF16, [[256.0], [1.0], [1.0]]) == [258.0]
    yield "float16 in float32", sums(HALF, [[2048.0], [1.0], [1.0]]) == [2050.0]
    yield "float16 scaled before rounding", sums(HALF, [[6e4], [6e4]], 0.5) == [60000.0]
    yield "float16 overflow", sums(HALF, [[6e4], [6e4]]) == [INF]
    # Half-way cases go to the even neighbour: below, then above.
    yield "bfloat16 ties", sums(BF16, [[256.0, 258.0], [1.0, 1.0]]) == [256.0, 260.0]
    yield "float16 ties", sums(HALF, [[2048.0, 2050.0], [1.0, 1.0]]) == [2048.0, 2052.0]
    yield "int32 wraps", sums(torch.int32, [[2**31 - 1], [1]], 1) == [-(2**31)]
    yield "float64 scale", sums(DOUBLE, [[1.0], [0.0]], 1 / 3) == [1 / 3]
    for dtype in (SINGLE, *HALVES):
        zero = sums(dtype, [[-0.0, -0.0, 1.0], [-0.0, -0.0, -1.0]])
        yield f"sums of zeros are positive in {dtype}", str(zero) == "[0.0, 0.0, 0.0]"
        special = sums(dtype, [[INF, float("nan"), INF], [-INF, 1.0, 1.0]])
        yield f"specials of {dtype}", str(special) == "[nan, nan, inf]"
    tiny = 2.0**-149
    yield "subnormals are kept", sums(SINGLE, [[tiny], [2 * tiny]]) == [3 * tiny]


def check_reduce_rounds_16_bits_to_nearest_even(subject):
    patterns = torch.arange(2**16).to(torch.int32)
    words = torch.where(patterns < 2**15, patterns, patterns - 2**16).to(torch.int16)
    one, two = torch.arange(16)[None], torch.arange(32).view(2, 16)
    block, kernels = 2**12, subject.usual
    for dtype in HALVES:
        values = words.view(dtype)
        # Half-way cases, subnormals and overflows among others.
        for scale in (1, 0.7, 1 + 2.0**-8, 1 + 2.0**-11, 2.0**-9, 1000.1):
            case = f"{dtype} times {scale}"
            yield case, reduce_case(subject, kernels, values, one, block, scale)
        shuffled = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
        for name, others in (("sums", shuffled), ("near sums", values.roll(1))):
            pairs = torch.cat([values, others])
            yield f"{dtype} {name}", reduce_case(subject, kernels, pairs, two, block, 1)
