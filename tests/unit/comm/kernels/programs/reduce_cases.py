# SPDX-License-Identifier: Apache-2.0
"""What `triton_cases` checks of sums."""

from itertools import product

import torch
import triton
import triton.language as tl
from slow_twins import DEVICE, HALVES, bucket, guarded, intact, same, slow_reduce

from wavemare.comm.kernels import DTYPES
from wavemare.comm.kernels.triton_kernels import TritonKernels
from wavemare.comm.kernels.triton_programs import brain_of_float

SMALL, USUAL = TritonKernels(tile=4096), TritonKernels()


def reduce_case(kernels, packed, places, block, scale, offset=64):
    out = guarded(torch.full((places.shape[1] * block,), 3, dtype=packed.dtype), offset)
    kernels.reduce(guarded(packed, offset), places.to(DEVICE), block, scale, out)
    return same(out, slow_reduce(packed, places, block, scale)) and intact(out)


def places_of(ranks, count, seed):
    """Deal the numbers of blocks at random; about a third are missing."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(ranks, count, generator=generator) < 0.67
    places = torch.full((ranks, count), -1)
    places[there] = torch.randperm(int(there.sum()), generator=generator)
    return places, int(there.sum())


def check_reduce():
    for dtype, block, ranks in product(DTYPES, (64, 256, 100), (1, 2, 5)):
        scales = (1,) if dtype == torch.int32 else (1, 1 / 3, 0.5)
        for count, scale in product((1, 9), scales):
            places, rows = places_of(ranks, count, seed=ranks + block)
            packed = bucket(dtype, rows * block, block, seed=ranks, dense=0.7)
            case = f"{dtype} {block} {ranks} {count} {scale}"
            yield case, reduce_case(SMALL, packed, places, block, scale)


def check_reduce_of_odd_rows():
    for dtype, block in product(DTYPES, (1, 3, 75, 768, 4096)):
        places, rows = places_of(3, 5, seed=block)
        packed = bucket(dtype, rows * block, block, seed=block, dense=0.8)
        for kernels, offset in ((SMALL, 64), (SMALL, 1), (USUAL, 64)):
            case = f"{dtype} {block} {kernels.tile} {offset}"
            yield case, reduce_case(kernels, packed, places, block, 1, offset)


def check_reduce_of_nothing():
    for places in (torch.full((3, 2), -1), torch.empty((0, 2), dtype=torch.int64)):
        packed = torch.zeros(0)
        out = torch.full((128,), 3.0, device=DEVICE)
        SMALL.reduce(packed.to(DEVICE), places.to(DEVICE), 64, 0.5, out)
        yield f"{tuple(places.shape)}", same(out, torch.zeros(128))
    SMALL.reduce(out[:0], torch.empty((3, 0), dtype=torch.int64, device=DEVICE), 64, 1, out[:0])


def row_sums(dtype, rows, scale=1.0):
    """Return what the kernel makes of one block on each rank."""
    packed = torch.tensor(rows, dtype=dtype)
    out = torch.empty(packed.shape[1], dtype=dtype, device=DEVICE)
    places = torch.arange(len(rows), device=DEVICE)[:, None]
    SMALL.reduce(packed.flatten().to(DEVICE), places, packed.shape[1], scale, out)
    return out.tolist()


def check_reduce_known_sums():
    inf = float("inf")
    single, double = torch.float32, torch.float64
    half, brain = HALVES
    # In the order of the ranks, and not in another.
    yield "order", row_sums(single, [[2.0**24], [1.0], [1.0], [-(2.0**24)]]) == [0.0]
    yield "other order", row_sums(single, [[2.0**24], [-(2.0**24)], [1.0], [1.0]]) == [2.0]
    # Each sum of 16-bit numbers would stay 256, or 2048, if it were rounded before the end.
    yield "bfloat16 in float32", row_sums(brain, [[256.0], [1.0], [1.0]]) == [258.0]
    yield "float16 in float32", row_sums(half, [[2048.0], [1.0], [1.0]]) == [2050.0]
    yield "float16 scaled before rounding", row_sums(half, [[6e4], [6e4]], 0.5) == [60000.0]
    yield "float16 overflow", row_sums(half, [[6e4], [6e4]]) == [inf]
    # Half-way cases go to the even neighbour: below, then above.
    yield "bfloat16 ties", row_sums(brain, [[256.0, 258.0], [1.0, 1.0]]) == [256.0, 260.0]
    yield "float16 ties", row_sums(half, [[2048.0, 2050.0], [1.0, 1.0]]) == [2048.0, 2052.0]
    yield "int32 wraps", row_sums(torch.int32, [[2**31 - 1], [1]], 1) == [-(2**31)]
    yield "float64 scale", row_sums(double, [[1.0], [0.0]], 1 / 3) == [1 / 3]
    zero = row_sums(single, [[-0.0, -0.0, 1.0], [-0.0, -0.0, -1.0]])
    yield "sums of zeros are positive", str(zero) == "[0.0, 0.0, 0.0]"
    special = row_sums(single, [[inf, float("nan"), inf], [-inf, 1.0, 1.0]])
    yield "specials", str(special) == "[nan, nan, inf]"
    tiny = 2.0**-149
    yield "subnormals are kept", row_sums(single, [[tiny], [2 * tiny]]) == [3 * tiny]


def check_reduce_rounds_16_bits_to_nearest_even():
    patterns = torch.arange(2**16).to(torch.int32)
    words = torch.where(patterns < 2**15, patterns, patterns - 2**16).to(torch.int16)
    for dtype in HALVES:
        block = 2**12
        values = words.view(dtype)
        places = torch.arange(16)[None]
        yield f"{dtype} as they are", reduce_case(USUAL, values, places, block, 1)
        yield f"{dtype} scaled", reduce_case(USUAL, values, places, block, 0.7)
        shuffled = values[torch.randperm(2**16, generator=torch.Generator().manual_seed(0))]
        pairs = torch.cat([values, shuffled])
        yield f"{dtype} sums", reduce_case(USUAL, pairs, torch.arange(32).view(2, 16), block, 1)
        near = torch.cat([values, values.roll(1)])
        yield f"{dtype} near sums", reduce_case(USUAL, near, torch.arange(32).view(2, 16), block, 1)


@triton.jit
def round_to_bfloat16(floats, words, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(words + place, brain_of_float(tl.load(floats + place)))


def check_bfloat16_of_any_float32():
    generator = torch.Generator().manual_seed(0)
    size = 2**14
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator, dtype=torch.int64)
    for low in (0, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        floats = (words >> 16 << 16 | low).to(torch.int32)
        # Not a number, with the payload of GPUs; infinity; the largest number.
        floats[:3] = torch.tensor([0x7FFFFFFF, 0x7F800000, 0x7F7FFFFF])
        floats = floats.view(torch.float32)
        found = torch.empty(size, dtype=torch.int16, device=DEVICE)
        round_to_bfloat16[(1,)](floats.to(DEVICE), found, SIZE=size)
        yield f"{low:x}", same(found.view(torch.bfloat16), floats.to(torch.bfloat16))
