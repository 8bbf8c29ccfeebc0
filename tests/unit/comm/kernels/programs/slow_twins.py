# SPDX-License-Identifier: Apache-2.0
"""Buckets of special values, and slow twins of the block kernels."""

import random
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

HALVES = (torch.float16, torch.bfloat16)
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
GUARD = 77


@dataclass(frozen=True)
class Subject:
    """The kernels under test.

    Attributes:
        small: Kernels with small tiles, if they have tiles.
        usual: Kernels as they are used.
        device: Of the buckets.
        long: Whether to test many cases.
    """

    small: Any
    usual: Any
    device: str = "cpu"
    long: bool = False

    def guarded(self, values, offset=64):
        """Return a device tensor with these values, amid others that no kernel may touch."""
        numel = values.numel()
        around = torch.full((offset + numel + 64,), GUARD, dtype=values.dtype, device=self.device)
        around[offset : offset + numel] = values.to(self.device)
        return around[offset : offset + numel]


def intact(view):
    around = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    begin = view.storage_offset()
    return bool((around[:begin] == GUARD).all() and (around[begin + view.numel() :] == GUARD).all())


def odd_blocks(dtype):
    """Yield functions that fill a block of zeros."""

    first, middle, last = 0, 0.5, 1

    def put(value, where):
        def fill(part):
            part[int(where * (part.numel() - 1))] = value

        return fill

    yield lambda part: None
    yield from (put(1, where) for where in (first, middle, last))
    if not dtype.is_floating_point:
        # A sign bit alone is a number here.
        yield from (put(value, middle) for value in (-1, -(2**31), 2**31 - 1))
        return
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    special = (-0.0, float("nan"), float("inf"), -float("inf"), tiny, -tiny)
    yield from (put(value, where) for value, where in product(special, (first, last)))
    yield lambda part: part.fill_(-0.0)
    yield lambda part: part[::2].fill_(-0.0)
    yield lambda part: part.copy_(torch.tensor([1.0, -1.0]).repeat(part.numel())[: part.numel()])
    # All zeros are negative but for the last element.
    yield lambda part: (part.fill_(-0.0), put(-tiny, last)(part))


def bucket(dtype, numel, block, seed, dense=0.2):
    """Return a bucket: a share of its blocks is random, the others have special values."""
    generator = torch.Generator().manual_seed(seed)
    flat = torch.zeros(numel, dtype=dtype)
    kinds = list(odd_blocks(dtype))
    random.Random(seed).shuffle(kinds)
    for i, part in enumerate(flat.split(block) if numel else ()):
        if torch.rand((), generator=generator) < dense:
            part.copy_(10 * torch.randn(part.numel(), generator=generator))
        else:
            kinds[i % len(kinds)](part)
    return flat


def slow_mask(flat, block):
    """Return the mask's bytes and the bucket as it must be afterwards."""
    flat = flat.clone()
    alive = []
    for part in flat.split(block) if flat.numel() else ():
        # As numbers, not as bits: NaN differs from 0, -0.0 does not.
        alive.append(bool((part.double() != 0).any()))
        if not alive[-1]:
            part.fill_(0)
    return np.packbits(np.array(alive, dtype=bool), bitorder="little").tolist(), flat


def slow_gather(flat, block, index):
    parts = []
    for number in index.tolist():
        part = flat[number * block : (number + 1) * block]
        parts += [part, torch.zeros(block - part.numel(), dtype=flat.dtype)]
    return torch.cat(parts) if parts else flat[:0]


def slow_scatter(packed, block, index, flat):
    flat = flat.clone()
    for i, number in enumerate(index.tolist()):
        part = flat[number * block : (number + 1) * block]
        part.copy_(packed[i * block : i * block + part.numel()])
    return flat


def slow_reduce(packed, sources, block, scale):
    # numpy's scalars round after each operation; bfloat16 is rounded by torch.
    kind = {torch.float64: np.float64, torch.int32: np.int32}.get(packed.dtype, np.float32)
    rows = packed.to(torch.float32) if packed.dtype in HALVES else packed
    rows = rows.numpy().reshape(-1, block)
    sums = []
    for j in range(sources.shape[1]):
        total = np.zeros(block, kind)
        for source in sources[:, j].tolist():
            if source >= 0:
                total = total + rows[source]
        sums.append(total if scale == 1 else total * kind(scale))
    return torch.from_numpy(np.concatenate(sums)).to(packed.dtype) if sums else packed[:0]


def same(found, expected):
    """Equal bits, or both not a number."""
    found = found.cpu()
    integers = INTEGERS[expected.itemsize]
    equal = found.view(integers) == expected.view(integers)
    if expected.is_floating_point():
        equal |= found.isnan() & expected.isnan()
    return found.dtype == expected.dtype and found.shape == expected.shape and bool(equal.all())
