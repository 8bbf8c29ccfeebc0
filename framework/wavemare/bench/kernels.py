# SPDX-License-Identifier: Apache-2.0
"""How fast the sparse collective's kernels are on this machine's CPU, measured against memcpy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wavemare.bench.rounds import rotated
from wavemare.comm.kernels import BlockKernels, kernels_for, num_blocks

__all__ = ["measure_kernels"]

_MASK_DENSITIES = (1.0, 0.1, 0.01, 0.0)
_COPY_DENSITIES = (1.0, 0.1)
_RANKS = 4
_SHARE = 8
"""The reduced blocks are this fraction of a bucket: of all ranks, they are half of one."""


class _Case(NamedTuple):
    kernel: str
    density: float
    moved: int
    call: Callable[[], object]


def measure_kernels(numel: int, block: int, rounds: int) -> list[dict[str, Any]]:
    """Measure the kernels on a bucket of float32, taking turns with memcpy.

    Where a bucket is not dense, only the last element of its non-zero blocks is not zero: this is
    the hardest for the mask. The sums are of 4 ranks' blocks, of which a part is there.

    Args:
        numel: Elements of the bucket; it should be larger than the caches, and about six times its
            memory is taken.
        block: Elements per block.
        rounds: Rounds that are measured; one before them warms up and compiles.

    Returns:
        For each kernel and density: ``kernel``, ``density``, ``gb_s`` (median of 1e9 bytes read and
        written per second; a mask only reads) and ``of_memcpy`` (median over the rounds of the
        quotient to memcpy of the same bucket, of which bytes read and written count too).
    """
    # With several threads, memcpy would be faster, but not the kernels.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        cases = _cases(kernels_for("cpu"), numel, block)
        rates: list[list[float]] = [[] for _ in cases]
        for turn in range(rounds + 1):
            for number in rotated(range(len(cases)), turn):
                started = time.perf_counter()
                cases[number].call()
                seconds = time.perf_counter() - started
                if turn > 0:
                    rates[number].append(cases[number].moved / seconds / 1e9)
    finally:
        torch.set_num_threads(threads)
    return [
        {
            "kernel": case.kernel,
            "density": case.density,
            "gb_s": statistics.median(rate),
            "of_memcpy": statistics.median(a / b for a, b in zip(rate, rates[0], strict=True)),
        }
        for case, rate in zip(cases, rates, strict=True)
    ]


def _cases(kernels: BlockKernels, numel: int, block: int) -> list[_Case]:
    """Return what is measured, memcpy first."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(numel, generator=generator)
    target = torch.zeros(numel)
    size = numel * dense.element_size()
    # torch's own copy is a loop; numpy's is memcpy.
    array, copy = dense.numpy(), target.numpy()
    cases = [_Case("memcpy", 1.0, 2 * size, lambda: copy.__setitem__(slice(None), array))]
    for density in _MASK_DENSITIES:
        bucket = dense if density == 1 else _sparse(numel, block, density, generator)
        cases.append(_Case("mask", density, size, _mask(kernels, bucket, block)))
    for density in _COPY_DENSITIES:
        index = _some_blocks(num_blocks(numel, block), density, generator)
        packed = torch.zeros(index.numel() * block)
        moved = 2 * packed.numel() * packed.element_size()
        gather = _bound(kernels.gather, dense, block, index, packed)
        scatter = _bound(kernels.scatter, packed, block, index, target)
        cases += [
            _Case("gather", density, moved, gather),
            _Case("scatter", density, moved, scatter),
        ]
    columns = max(1, num_blocks(numel, block) // _SHARE)
    for dtype, density in (
        (torch.float32, 1.0),
        (torch.float32, 0.4),
        (torch.bfloat16, 1.0),
        (torch.float16, 1.0),
    ):
        cases.append(_reduce(kernels, dtype, density, columns, block, generator))
    return cases


def _bound(function: Callable[..., None], *arguments: object) -> Callable[[], None]:
    return lambda: function(*arguments)


def _mask(kernels: BlockKernels, bucket: Tensor, block: int) -> Callable[[], None]:
    bits = torch.zeros(-(-num_blocks(bucket.numel(), block) // 8), dtype=torch.uint8)
    return _bound(kernels.mask, bucket, block, bits)


def _reduce(
    kernels: BlockKernels,
    dtype: torch.dtype,
    density: float,
    columns: int,
    block: int,
    generator: torch.Generator,
) -> _Case:
    present = torch.rand(_RANKS, columns, generator=generator) < density
    places = torch.where(present, present.flatten().cumsum(0).view_as(present) - 1, -1)
    packed = torch.randn(int(present.sum()) * block, generator=generator).to(dtype)
    out = torch.zeros(columns * block, dtype=dtype)
    moved = (packed.numel() + out.numel()) * dtype.itemsize
    name = f"reduce {str(dtype).removeprefix('torch.')}"
    call = _bound(kernels.reduce, packed, places, block, 1 / _RANKS, out)
    return _Case(name, density, moved, call)


def _sparse(numel: int, block: int, density: float, generator: torch.Generator) -> Tensor:
    """Return zeros, but for the last element of some blocks."""
    bucket = torch.zeros(numel)
    index = _some_blocks(num_blocks(numel, block), density, generator)
    bucket[((index + 1) * block - 1).clamp(max=numel - 1)] = 1
    return bucket


def _some_blocks(blocks: int, density: float, generator: torch.Generator) -> Tensor:
    count = round(blocks * density)
    return torch.randperm(blocks, generator=generator)[:count].sort().values
