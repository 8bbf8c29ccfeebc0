# SPDX-License-Identifier: Apache-2.0
"""Compare Triton's kernels with slow twins; leaves a JSON file of what differed in which case.

Usage: triton_cases.py RESULT.json [--long]. On a GPU, or with TRITON_INTERPRET=1 on the CPU.
Each function ``check_...``, here and in `reduce_cases`, yields (case, whether it is well).
"""

import json
import random
import sys
import warnings
from itertools import product
from pathlib import Path

import numpy as np
import quick_interpreter
import reduce_cases
import torch
from slow_twins import (
    DEVICE,
    INTEGERS,
    LONG,
    bucket,
    guarded,
    intact,
    same,
    sizes,
    slow_gather,
    slow_mask,
    slow_scatter,
)

from wavemare.comm.kernels import DTYPES, num_blocks
from wavemare.comm.kernels.triton_kernels import TritonKernels

SMALL, USUAL = TritonKernels(tile=4096), TritonKernels()


def mask_case(kernels, flat, block, offset=64):
    expected_bits, expected_flat = slow_mask(flat, block)
    device_flat = guarded(flat, offset)
    bits = guarded(torch.full((len(expected_bits),), 255, dtype=torch.uint8), offset)
    kernels.mask(device_flat, block, bits)
    return (
        bits.tolist() == expected_bits
        and same(device_flat, expected_flat)
        and intact(bits)
        and intact(device_flat)
    )


def check_mask():
    for dtype, block in product(DTYPES, (64, 256, 100)):
        for numel in sizes(block):
            flat = bucket(dtype, numel, block, seed=numel)
            yield f"{dtype} {block} {numel}", mask_case(SMALL, flat, block)


def check_mask_with_the_usual_tile():
    for dtype in DTYPES if LONG else (torch.float32, torch.bfloat16):
        flat = bucket(dtype, 256 * 17 + 7, 256, seed=1)
        yield f"{dtype}", mask_case(USUAL, flat, 256)


def check_mask_of_unaligned_bucket():
    for dtype, block, offset in product(DTYPES, (64, 75), (1, 2, 3) if LONG else (1, 2)):
        flat = bucket(dtype, block * 17 + 5, block, seed=offset)
        yield f"{dtype} {block} {offset}", mask_case(SMALL, flat, block, offset)


def check_mask_of_large_and_tiny_blocks():
    for dtype, block in product((torch.float32, torch.bfloat16), (1, 2, 3, 7, 768, 2048, 4096)):
        flat = bucket(dtype, (3 if block > 8 else 300) * block + block // 3, block, seed=block)
        yield f"{dtype} {block}", mask_case(SMALL, flat, block)


def check_mask_of_each_single_bit():
    for dtype in DTYPES:
        # Each block holds another single bit, in another place.
        width = dtype.itemsize * 8
        block = 65
        words = torch.zeros(width * block, dtype=INTEGERS[dtype.itemsize])
        for bit in range(width):
            sign = bit == width - 1
            words[bit * block + (37 * bit) % block] = -(2**bit) if sign else 2**bit
        yield f"{dtype}", mask_case(SMALL, words.view(dtype), block)
        even = words.view(width, block)[:, :64].contiguous().flatten().view(dtype)
        yield f"{dtype} in pairs", mask_case(SMALL, even, 64)


def check_mask_of_empty_bucket():
    bits = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    USUAL.mask(torch.empty(0, device=DEVICE), 256, bits)
    yield "nothing done", True


def copy_case(kernels, flat, block, index, offset=64):
    packed = guarded(torch.full((len(index) * block,), 3, dtype=flat.dtype), offset)
    device_flat, device_index = guarded(flat, offset), index.to(DEVICE)
    kernels.gather(device_flat, block, device_index, packed)
    expected = slow_gather(flat, block, index)
    well = same(packed, expected) and intact(packed) and same(device_flat, flat)
    other = guarded(torch.full_like(flat, 5), offset)
    kernels.scatter(packed, block, device_index, other)
    expected = slow_scatter(expected, block, index, torch.full_like(flat, 5))
    return well and same(other, expected) and intact(other)


def check_gather_and_scatter():
    for dtype, block in product(DTYPES, (64, 256, 100)):
        for numel in sizes(block):
            flat = bucket(dtype, numel, block, seed=numel, dense=0.5)
            order = torch.randperm(num_blocks(numel, block))
            for index in (order, order[: len(order) // 2].sort().values, order[:0]):
                case = f"{dtype} {block} {numel} {index.tolist()}"
                yield case, copy_case(SMALL, flat, block, index)


def check_gather_and_scatter_of_odd_rows():
    for dtype, block in product(DTYPES, (1, 7, 75, 300, 768, 4096)):
        numel = block * (3 if block > 512 else 40) + block // 3
        flat = bucket(dtype, numel, block, seed=block, dense=0.5)
        index = torch.arange(num_blocks(numel, block)).flip(0)
        for kernels, offset in ((SMALL, 64), (SMALL, 1), (USUAL, 64)):
            case = f"{dtype} {block} {kernels.tile} {offset}"
            yield case, copy_case(kernels, flat, block, index, offset)


def check_gather_of_one_block_twice():
    flat = bucket(torch.float32, 64 * 5 + 3, 64, seed=1, dense=1.0)
    index = torch.tensor([5, 2, 5, 2, 5])
    packed = torch.empty(5 * 64, device=DEVICE)
    SMALL.gather(flat.to(DEVICE), 64, index.to(DEVICE), packed)
    yield "twice", same(packed, slow_gather(flat, 64, index))


def check_more_than_two_to_the_31_elements():
    if DEVICE == "cpu" and not LONG:
        return
    block = 4096
    numel = 2**31 + 2 * block + 5
    flat = torch.zeros(numel, dtype=torch.float16, device=DEVICE)
    far = numel // block
    index = torch.tensor([0, far - 1, far], device=DEVICE)
    packed = torch.arange(3 * block, device=DEVICE).remainder(1000).to(torch.float16)
    SMALL.scatter(packed, block, index, flat)
    yield (
        "scatter",
        bool((flat[-5:] == packed[2 * block : 2 * block + 5]).all())
        and bool((flat[(far - 1) * block : far * block] == packed[block : 2 * block]).all()),
    )
    found = torch.empty_like(packed)
    SMALL.gather(flat, block, index, found)
    packed[2 * block + 5 :] = 0
    yield "gather", same(found, packed.cpu())
    out = torch.empty(block, dtype=torch.float16, device=DEVICE)
    places = torch.tensor([[0], [far - 1]], device=DEVICE)
    SMALL.reduce(flat, places, block, 1, out)
    yield "reduce", same(out, (packed[:block].float() + packed[block : 2 * block]).half().cpu())
    if DEVICE == "cuda":
        bits = torch.zeros(num_blocks(num_blocks(numel, block), 8), dtype=torch.uint8).to(DEVICE)
        USUAL.mask(flat, block, bits)
        alive = np.unpackbits(bits.cpu().numpy(), bitorder="little")
        yield "mask", np.flatnonzero(alive).tolist() == [0, far - 1, far]


def check_random_buckets():
    draw = random.Random(5)
    for case in range(300 if LONG else 20):
        dtype = draw.choice(DTYPES)
        block = draw.choice([2 ** draw.randint(6, 12), draw.randint(1, 800)])
        numel = draw.randint(1, 12 * block)
        offset = draw.choice([1, 3, 64])
        flat = bucket(dtype, numel, block, seed=case, dense=draw.random())
        index = torch.randperm(num_blocks(numel, block))[: draw.randint(0, 12)]
        name = f"{case}: {dtype} {block} {numel} {offset}"
        yield f"mask {name}", mask_case(SMALL, flat, block, offset)
        yield f"copy {name}", copy_case(SMALL, flat, block, index, offset)


def main():
    if DEVICE == "cpu":
        quick_interpreter.use()
    # Sums that overflow, and infinities that cancel, are meant.
    warnings.simplefilter("ignore", RuntimeWarning)
    checks = {
        name[6:]: check
        for name, check in {**globals(), **vars(reduce_cases)}.items()
        if name.startswith("check_")
    }
    results = {}
    for name, check in checks.items():
        cases = list(check())
        failures = [case for case, well in cases if not well]
        results[name] = {"cases": len(cases), "failures": failures}
    Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
