# SPDX-License-Identifier: Apache-2.0
"""Lists of the blocks that may be non-zero, which callers give so that nobody searches for them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wavemare.comm.blocks.masks import bits_of, first_bit, mask_bytes
from wavemare.comm.executors.base import CollectiveCall

SAMPLE = 128
"""Blocks that are looked at to find a bucket dense, or a list of blocks wrong."""
_CHECK_INTERVAL = 251
"""Calls between two checks of all of a caller's list of blocks; a prime, as steps repeat in
patterns. The calls 0, 1, 2, 4, 8, ... are checked too, and a sample in each call."""
_TRIALS = 8
"""Calls of a bucket in which a wrong list is not an error: lists are not used from then on. Nor is
it in any call in which most of the sample is not zero: a term of all rows has just begun."""


class Listed(NamedTuple):
    """What a caller's list says of a bucket.

    Args:
        bits: The bit-packed mask of this rank; None if there is no list, or lists are not used.
        stray: A block that is not zero and not in the list; -1 if none was found.
    """

    bits: Tensor | None = None
    stray: int = -1


class BlockLists:
    """Makes masks of lists, and checks some of the lists."""

    def __init__(self) -> None:
        self._num_lists: Counter[str] = Counter()
        self._searched: set[str] = set()

    def take(self, call: CollectiveCall, blocks: Tensor | None) -> Listed:
        """Take the list of a bucket.

        Args:
            call: Has the bucket.
            blocks: (k,), int64, in any order; None if the caller has no list.
        """
        if blocks is None or call.key in self._searched:
            return Listed()
        number, self._num_lists[call.key] = self._num_lists[call.key], self._num_lists[call.key] + 1
        with call.phase("list"):
            listed = bits_of(blocks, call.num_blocks)
            strays, unlisted = _strays(call, listed, number)
        begins = strays and 2 * strays >= unlisted  # a term of all rows; earlier sums were right
        checks = not number & (number - 1) or not number % _CHECK_INTERVAL or strays
        if not checks:
            return Listed(listed)
        bits = call.mask()
        stray = first_bit(bits & ~listed)
        trial = number < _TRIALS or begins
        if stray >= 0 and trial:
            logging.getLogger("wavemare").warning(
                "%s: block %d is not in the list; lists are not used", call.key, stray
            )
            self._searched.add(call.key)
            stray = -1
        return Listed(bits, stray)


def sample_of(num_blocks: int, shift: int) -> NDArray[np.int64]:
    """Return the numbers of at most `SAMPLE` blocks, spread evenly over a bucket.

    Args:
        num_blocks: Of the bucket, at least 1.
        shift: By how many blocks the sample is moved: shifts that follow one another reach all.
    """
    count = min(num_blocks, SAMPLE)
    return (np.arange(count, dtype=np.int64) * num_blocks // count + shift) % num_blocks


def mask_of_sample(call: CollectiveCall, places: NDArray[np.int64]) -> Tensor:
    """Return the bit-packed mask of some blocks of a bucket."""
    packed = call.flat.new_empty(len(places) * call.block)
    call.kernels.gather(call.flat, call.block, call.index(places), packed)
    bits = packed.new_empty(mask_bytes(len(places)), dtype=torch.uint8)
    call.kernels.mask(packed, call.block, bits)
    return bits


def _strays(call: CollectiveCall, listed: Tensor, number: int) -> tuple[int, int]:
    """Return of a sample of blocks how many are listed wrongly, and how many are not listed."""
    places = sample_of(call.num_blocks, number)
    index = call.index(places)
    bits = (listed[index // 8] >> (index % 8).to(torch.uint8)) & 1
    # One copy to the host, which waits for the device.
    both = torch.cat([bits, mask_of_sample(call, places)]).cpu().numpy()
    known, sampled = both[: len(places)], both[len(places) :]
    found = np.unpackbits(sampled, count=len(places), bitorder="little")
    return int((found > known).sum()), int((known == 0).sum())
