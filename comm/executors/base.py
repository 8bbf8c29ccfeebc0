# SPDX-License-Identifier: Apache-2.0
"""One call of a collective, its memory, and the pipelining of its messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavemare.comm.blocks.layout import OwnedRange
from wavemare.comm.blocks.masks import mask_bytes
from wavemare.comm.kernels import BlockKernels, kernels_for, num_blocks
from wavemare.comm.statistics import Statistics, Timer
from wavemare.comm.transport.base import Transport

Begin = Callable[[], Callable[[], None]]
"""Starts messages; returns a function that waits for them and uses them."""

_CHUNK_BYTES = 4 << 20
_MOST_CHUNKS = 8


class Scratch:
    """Memory that is reused from call to call and only grows: fresh pages are slow."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def __call__(self, name: str, numel: int, like: Tensor) -> Tensor:
        """Return a flat tensor of undefined content.

        Args:
            name: One name is one memory.
            numel: Elements.
            like: A tensor of the wanted type and device.
        """
        key = (name, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < numel:
            held = torch.empty(numel, dtype=like.dtype, device=like.device)
            self._held[key] = held
        return held[:numel]


@dataclass
class CollectiveCall:
    """One collective on one bucket.

    Args:
        flat: (E,), the bucket; the executor leaves the result in it.
        block: Elements per block.
        scale: Factor of the sum: 1/N for a mean.
        transport: To the other ranks.
        scratch: Memory to use.
        stats: Its phases are filled in.
        key: Name of the bucket.
        ranges: A partition of the bucket with its owners, if that is what is summed or sent.
    """

    flat: Tensor
    block: int
    scale: float
    transport: Transport
    scratch: Scratch
    stats: Statistics = field(default_factory=Statistics)
    key: str = ""
    ranges: Sequence[OwnedRange] | None = None

    @property
    def kernels(self) -> BlockKernels:
        """The kernels for the bucket's device."""
        return kernels_for(self.flat.device.type)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """N."""
        return self.transport.size

    @property
    def num_blocks(self) -> int:
        """Blocks of the bucket."""
        return num_blocks(self.flat.numel(), self.block)

    @property
    def on_device(self) -> bool:
        """Whether the bucket lies on an accelerator, which takes few large pieces of work."""
        return not self.flat.is_cpu

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the body to a phase."""
        timer = Timer(self.flat.device)
        yield
        self.stats.note(name, timer)

    def mask(self) -> Tensor:
        """Return the bucket's bit-packed mask; see `BlockKernels.mask`."""
        with self.phase("mask"):
            # Not in scratch: sums of buckets before may still use that.
            size = mask_bytes(self.num_blocks)
            bits = torch.empty(size, dtype=torch.uint8, device=self.flat.device)
            self.kernels.mask(self.flat, self.block, bits)
        return bits

    def packed(self, name: str, num_blocks: int) -> Tensor:
        """Return scratch for ``num_blocks`` packed blocks."""
        return self.scratch(name, num_blocks * self.block, self.flat)

    def index(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Return block numbers as a tensor on the bucket's device; no thread waits for the copy."""
        host = torch.from_numpy(numbers)
        # Torch keeps pinned memory until the copy has read it.
        return host.pin_memory().to(self.flat.device, non_blocking=True) if self.on_device else host


def num_chunks(num_bytes: float) -> int:
    """Return the number of chunks of an owner's sums; the same on all ranks.

    Args:
        num_bytes: Bytes of one owner's sums.
    """
    return int(min(max(num_bytes // _CHUNK_BYTES, 1), _MOST_CHUNKS))


def pipelined(first: Sequence[Begin], second: Sequence[Begin]) -> None:
    """Push and pull in chunks: while one chunk is summed, others travel.

    All first rounds start at once, and each chunk's second round when its first ends.

    Args:
        first: For each chunk.
        second: For each chunk.
    """
    pushes = [begin() for begin in first]
    pulls = []
    for finish, begin in zip(pushes, second, strict=True):
        finish()
        pulls.append(begin())
    for finish in pulls:
        finish()
