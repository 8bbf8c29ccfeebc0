# SPDX-License-Identifier: Apache-2.0
"""Part ``kernels``: the sparse collective's kernels, beside the device's copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.request import COPY
from benchmarks.gpu.timing import Scene, make_rows
from wavemare.comm.kernels import kernels_for, num_blocks

_BLOCK, _RANKS = 256, 4
_NUM_BYTES, _TINY_BYTES = 400 * 10**6, 10**6
_CACHE_BYTES = 2**28
"""More than a GPU's cache: writing so many empties it."""

Moves = dict[str, tuple[float, Callable[[], Any]]]


def measure(scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the rows; ``gb_s`` counts the bytes that are read and written."""
    size = _TINY_BYTES if scene.job.tiny else _NUM_BYTES
    flush = torch.empty(_CACHE_BYTES if scene.on_gpu else 1, dtype=torch.uint8, device=scene.device)
    for dtype in (torch.float32, torch.bfloat16):
        moves = _moves(scene.device, dtype, size)
        samples = scene.rounds({name: run for name, (_, run) in moves.items()}, before=flush.zero_)
        moved = {name: int(count) for name, (count, _) in moves.items()}
        for row in make_rows("kernels", str(dtype).removeprefix("torch."), samples, bytes=moved):
            row["gb_s"] = row["bytes"] / row["median_s"] / 1e9
            yield row


def _moves(device: torch.device, dtype: torch.dtype, size: int) -> Moves:
    """Return for each kernel how many bytes it moves, and its call.

    Half of all blocks move, in the order of their numbers, as executors move them.
    """
    kernels = kernels_for(device.type)
    count = size // dtype.itemsize // _BLOCK // _RANKS * _RANKS
    wide = torch.randn(2 * count * _BLOCK, device=device).to(dtype)
    packed, target = (torch.empty(count * _BLOCK, dtype=dtype, device=device) for _ in range(2))
    index = torch.randperm(2 * count, device=device)[:count].sort().values
    sources = torch.arange(count, device=device).view(_RANKS, -1)
    summed = wide[: count // _RANKS * _BLOCK]
    bits = torch.zeros(num_blocks(count, 8), dtype=torch.uint8, device=device)

    def mask_of(density: float, length: int) -> Callable[[], Any]:
        flat = torch.zeros(length, dtype=dtype, device=device)
        chosen = (torch.rand(count - 1, device=device) < density).nonzero().flatten()
        # Only the last element of a block is set, so that nothing can stop early.
        flat[chosen * _BLOCK + _BLOCK - 1] = 1
        return lambda: kernels.mask(flat, _BLOCK, bits)

    whole = count * _BLOCK
    num_bytes = packed.nbytes
    return {
        COPY: (2.0 * num_bytes, lambda: target.copy_(packed)),
        "mask": (1.0 * num_bytes, mask_of(1.0, whole)),
        "mask-sparse": (1.0 * num_bytes, mask_of(0.1, whole)),
        "mask-ragged": (1.0 * num_bytes, mask_of(0.1, whole - _BLOCK + 3)),
        "gather": (2.0 * num_bytes, lambda: kernels.gather(wide, _BLOCK, index, packed)),
        "scatter": (2.0 * num_bytes, lambda: kernels.scatter(packed, _BLOCK, index, wide)),
        "reduce": (
            (1 + 1 / _RANKS) * num_bytes,
            lambda: kernels.reduce(packed, sources, _BLOCK, 0.5, summed),
        ),
    }
