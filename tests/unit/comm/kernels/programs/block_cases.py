# SPDX-License-Identifier: Apache-2.0
"""Masks and copies against slow twins: ``check_...`` yields (case, whether it is right)."""

import os
import random
from itertools import product

import numpy as np
import torch
from slow_twins import INTEGERS, bucket, intact, same, slow_gather, slow_mask, slow_scatter

from wavemare.comm.kernels import DTYPES, num_blocks

SINGLE, BF16 = torch.float32, torch.bfloat16


def sizes(block, long):
    """Yield element counts around the edges of blocks, bytes of the mask and programs."""
    if not long and block != 64:
        yield 9 * block + 1
        return
    for count in (9, 33) if long else (33,):
        yield from (count * block, count * block + 1, (count + 1) * block - 1)
    yield from (1, block - 1, block, 8 * block, 8 * block + block // 2)


def mask_case(subject, kernels, flat, block, offset=64):
    expected_bits, expected_flat = slow_mask(flat, block)
    device_flat = subject.guarded(flat, offset)
    bits = subject.guarded(torch.full((len(expected_bits),), 255, dtype=torch.uint8), offset)
    kernels.mask(device_flat, block, bits)
    return (
        bits.tolist() == expected_bits
        and same(device_flat, expected_flat)
        and intact(bits)
        and intact(device_flat)
    )


def check_mask(subject):
    for dtype, block in product(DTYPES, (64, 256, 100)):
        for numel in sizes(block, subject.long):
            flat = bucket(dtype, numel, block, seed=numel)
            yield f"{dtype} {block} {numel}", mask_case(subject, subject.small, flat, block)


def check_mask_with_the_usual_tile(subject):
    for dtype in DTYPES if subject.long else (SINGLE, BF16):
        flat = bucket(dtype, 256 * 17 + 7, 256, seed=1)
        yield f"{dtype}", mask_case(subject, subject.usual, flat, 256)


def check_mask_of_unaligned_bucket(subject):
    dtypes = DTYPES if subject.long else (SINGLE, BF16)
    for dtype, block, offset in product(dtypes, (64, 75), (1, 2, 3) if subject.long else (1, 2)):
        flat = bucket(dtype, block * 17 + 5, block, seed=offset)
        case = f"{dtype} {block} {offset}"
        yield case, mask_case(subject, subject.small, flat, block, offset)


def check_mask_of_large_and_tiny_blocks(subject):
    for dtype, block in product((SINGLE, BF16), (1, 2, 3, 7, 15, 16, 17, 768, 2048, 4096)):
        flat = bucket(dtype, (3 if block > 8 else 300) * block + block // 3, block, seed=block)
        yield f"{dtype} {block}", mask_case(subject, subject.small, flat, block)


def check_mask_of_each_single_bit(subject):
    for dtype in DTYPES:
        # Each block holds another single bit, in another source.
        width = dtype.itemsize * 8
        block = 65
        words = torch.zeros(width * block, dtype=INTEGERS[dtype.itemsize])
        for bit in range(width):
            sign = bit == width - 1
            words[bit * block + (37 * bit) % block] = -(2**bit) if sign else 2**bit
        yield f"{dtype}", mask_case(subject, subject.small, words.view(dtype), block)
        even = words.view(width, block)[:, :64].contiguous().flatten().view(dtype)
        yield f"{dtype} in pairs", mask_case(subject, subject.small, even, 64)


def check_mask_of_empty_bucket(subject):
    bits = torch.empty(0, dtype=torch.uint8, device=subject.device)
    subject.usual.mask(torch.empty(0, device=subject.device), 256, bits)
    yield "nothing done", True


def copy_case(subject, kernels, flat, block, index, offset=64):
    packed = subject.guarded(torch.full((len(index) * block,), 3, dtype=flat.dtype), offset)
    device_flat, device_index = subject.guarded(flat, offset), index.to(subject.device)
    kernels.gather(device_flat, block, device_index, packed)
    expected = slow_gather(flat, block, index)
    gathered = same(packed, expected) and intact(packed) and same(device_flat, flat)
    other = subject.guarded(torch.full_like(flat, 5), offset)
    kernels.scatter(packed, block, device_index, other)
    expected = slow_scatter(expected, block, index, torch.full_like(flat, 5))
    return gathered and same(other, expected) and intact(other)


def check_gather_and_scatter(subject):
    # Rows are copied by their bytes: one type of each width.
    dtypes = DTYPES if subject.long else (SINGLE, BF16)
    for dtype, block in product(dtypes, (64, 256, 100)):
        for numel in sizes(block, subject.long):
            flat = bucket(dtype, numel, block, seed=numel, dense=0.5)
            order = torch.randperm(num_blocks(numel, block))
            for index in (order, order[: len(order) // 2].sort().values, order[:0]):
                case = f"{dtype} {block} {numel} {index.tolist()}"
                yield case, copy_case(subject, subject.small, flat, block, index)


def check_gather_and_scatter_of_odd_rows(subject):
    dtypes = DTYPES if subject.long else (SINGLE, BF16)
    for dtype, block in product(dtypes, (1, 7, 75, 300, 768, 4096)):
        numel = block * (3 if block > 512 else 40) + block // 3
        flat = bucket(dtype, numel, block, seed=block, dense=0.5)
        index = torch.arange(num_blocks(numel, block)).flip(0)
        tiles = [("small", 64), ("small", 1), ("usual", 64)]
        for name, offset in tiles if subject.long else tiles[:2]:
            kernels = getattr(subject, name)
            case = f"{dtype} {block} {name} {offset}"
            yield case, copy_case(subject, kernels, flat, block, index, offset)


def check_gather_of_one_block_twice(subject):
    flat = bucket(SINGLE, 64 * 5 + 3, 64, seed=1, dense=1.0)
    index = torch.tensor([5, 2, 5, 2, 5])
    packed = torch.empty(5 * 64, device=subject.device)
    if subject.small is subject.usual:  # the kernels of CPUs take no short block twice
        index[2:] = torch.tensor([2, 2, 1])
    subject.small.gather(flat.to(subject.device), 64, index.to(subject.device), packed)
    yield "twice", same(packed, slow_gather(flat, 64, index))


def check_random_buckets(subject):
    draw = random.Random(5)
    for case in range(300 if subject.long else 8):
        dtype = draw.choice(DTYPES)
        block = draw.choice([2 ** draw.randint(6, 12), draw.randint(1, 800)])
        numel = draw.randint(1, 12 * block)
        offset = draw.choice([1, 3, 64])
        flat = bucket(dtype, numel, block, seed=case, dense=draw.random())
        index = torch.randperm(num_blocks(numel, block))[: draw.randint(0, 12)]
        name = f"{case}: {dtype} {block} {numel} {offset}"
        yield f"mask {name}", mask_case(subject, subject.small, flat, block, offset)
        yield f"copy {name}", copy_case(subject, subject.small, flat, block, index, offset)


def check_more_than_two_to_the_31_elements(subject):
    if subject.device == "cpu" and not subject.long:
        return
    block = 4096
    numel = 2**31 + 2 * block + 5
    # Memory of the host that was never written takes no room.
    flat = torch.from_numpy(np.zeros(numel, np.int16)).view(torch.float16).to(subject.device)
    far = numel // block
    index = torch.tensor([0, far - 1, far], device=subject.device)
    packed = torch.arange(3 * block, device=subject.device).remainder(1000).to(torch.float16)
    subject.small.scatter(packed, block, index, flat)
    yield (
        "scatter",
        bool((flat[-5:] == packed[2 * block : 2 * block + 5]).all())
        and bool((flat[(far - 1) * block : far * block] == packed[block : 2 * block]).all()),
    )
    found = torch.empty_like(packed)
    subject.small.gather(flat, block, index, found)
    packed[2 * block + 5 :] = 0
    yield "gather", same(found, packed.cpu())
    out = torch.empty(block, dtype=torch.float16, device=subject.device)
    sources = torch.tensor([[0], [far - 1]], device=subject.device)
    subject.small.reduce(flat[: far * block], sources, block, 1, out)
    yield "reduce", same(out, (packed[:block].float() + packed[block : 2 * block]).half().cpu())
    if not os.environ.get("TRITON_INTERPRET"):  # the interpreter takes too long
        bits = torch.zeros(num_blocks(num_blocks(numel, block), 8), dtype=torch.uint8)
        bits = bits.to(subject.device)
        subject.usual.mask(flat, block, bits)
        found = np.unpackbits(bits.cpu().numpy(), bitorder="little")
        yield "mask", np.flatnonzero(found).tolist() == [0, far - 1, far]
