# SPDX-License-Identifier: Apache-2.0
"""Measures the speed of network and kernels, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from wavemare.comm.cost import Constants
from wavemare.comm.executors import CollectiveCall, Scratch
from wavemare.comm.masks import Masks, assign_owners
from wavemare.comm.transport.base import Transport

_SIZES = (1 << 16, 1 << 20, 1 << 23, 1 << 25)
"""Bytes that each rank moves; larger sizes are skipped after a slow one."""
_ENOUGH_S = 0.15
_KERNEL_BYTES = 16 << 20
_REPEATS = 5


def calibrate(
    transport: Transport, block: int, device: torch.device, *, everyone: Transport | None = None
) -> Constants:
    """Measure the constants of the cost model; all ranks must call it together.

    Args:
        transport: To the other ranks.
        block: Elements per block.
        device: Where the buckets will be.
        everyone: To more ranks, which measure in groups of their own and must agree with this one.

    Returns:
        Rank 0's view of the slowest rank's figures, the same on all ranks.
    """
    exchange = _fit(_measure(transport, device, _exchange))
    dense = _fit(_measure(transport, device, _dense))
    kernels = _kernels(transport, block, device)
    figures = torch.tensor([*exchange, *dense, *kernels], dtype=torch.float64)
    (everyone or transport).broadcast(figures)
    return Constants(*figures.tolist())


def _exchange(transport: Transport, buffer: Tensor, out: Tensor) -> None:
    parts, arriving = buffer.chunk(transport.size), out.chunk(transport.size)
    transport.begin_messages(lambda peer: [arriving[peer]], lambda peer: [parts[peer]]).wait()


def _dense(transport: Transport, buffer: Tensor, out: Tensor) -> None:
    transport.all_reduce(buffer)


def _measure(
    transport: Transport,
    device: torch.device,
    function: Callable[[Transport, Tensor, Tensor], None],
) -> list[tuple[float, float]]:
    """Return pairs of bytes and seconds; for an exchange the bytes are those that a rank sends."""
    samples = []
    for size in _SIZES:
        numel = size // 4 // transport.size * transport.size
        buffer, out = (torch.zeros(numel, device=device) for _ in range(2))
        # The median: the shortest time has none of the waiting that calls have.
        seconds = median(_timed(transport, device, function, buffer, out) for _ in range(_REPEATS))
        others = (transport.size - 1) / transport.size if function is _exchange else 1.0
        samples.append((4.0 * numel * others, seconds))
        if seconds > _ENOUGH_S:
            break
    return samples


def _timed(
    transport: Transport,
    device: torch.device,
    function: Callable[[Transport, Tensor, Tensor], None],
    *arguments: Tensor,
) -> float:
    """Return the slowest rank's seconds, the same on all ranks."""
    transport.all_gather(*_flags(transport, 0.0, device))
    _finish(device)  # over NCCL the stream alone has waited for the other ranks
    started = time.perf_counter()
    function(transport, *arguments)
    _finish(device)
    mine, table = _flags(transport, time.perf_counter() - started, device)
    transport.all_gather(mine, table)
    return float(table.max())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _flags(transport: Transport, value: float, device: torch.device) -> tuple[Tensor, Tensor]:
    mine = torch.tensor([value], dtype=torch.float64, device=device)
    return mine, torch.empty(transport.size, 1, dtype=torch.float64, device=device)


def _fit(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency and seconds per byte: from the quickest and the largest measured.

    The smallest is not always the quickest: what is new to a network is slow at first. A largest
    one that is the quickest tells bytes from latency no more: then all its time is by bytes.
    """
    large, last = samples[-1]
    small, first = min(samples, key=lambda sample: sample[1])
    if large > small:
        per_byte = (last - first) / (large - small)
    else:
        per_byte = last / large if large else 0.0
    return max(first - small * per_byte, 1e-6), max(per_byte, 1e-12)


def _kernels(transport: Transport, block: int, device: torch.device) -> list[float]:
    """Return seconds per byte of mask, pack, reduce and unpack, and per block of planning."""
    blocks = max(_KERNEL_BYTES // 4 // block // 2, 1) * 2
    numel = blocks * block
    flat = torch.ones(numel, device=device)
    call = CollectiveCall(flat, block, 0.5, transport, Scratch())
    bits = torch.empty(-(-blocks // 8), dtype=torch.uint8, device=device)
    every = torch.arange(blocks, device=device)
    packed, out = call.packed("packed", blocks), call.packed("out", blocks // 2)
    sources = torch.arange(blocks, device=device).view(2, -1)[:, : blocks // 2].contiguous()
    kernels = call.kernels
    # Worst case of the mask: it must read all of a block to find it zero.
    zeros = torch.zeros_like(flat)
    generator = torch.Generator().manual_seed(0)
    masks = Masks.of(torch.randint(2, (2, blocks), generator=generator).numpy())

    def planned() -> None:
        layout = assign_owners(masks)
        layout.push_counts(slice(1))
        layout.arriving_counts(0)
        layout.pushed(0)
        layout.sources(0)

    measured = [
        (lambda: kernels.mask(zeros, block, bits), 4 * numel),
        (lambda: kernels.gather(flat, block, every, packed), 4 * numel),
        (lambda: kernels.reduce(packed, sources, block, 0.5, out), 6 * numel),
        (lambda: kernels.scatter(packed, block, every, flat), 4 * numel),
        (planned, 2 * blocks),
    ]
    rates = []
    for function, amount in measured:
        times = [
            _timed(transport, device, lambda *_: function(), flat)  # noqa: B023
            for _ in range(_REPEATS)
        ]
        rates.append(min(times) / amount)
    return rates
