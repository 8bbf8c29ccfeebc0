# SPDX-License-Identifier: Apache-2.0
"""A slow twin of the messages of local steps: numpy, one group of numbers at a time.

It knows the numbers that a message stands for, not its bytes. ``top_k`` is how many of each chunk
are in it; 0 stands for all.
"""

from itertools import pairwise

import numpy as np

GROUP, CHUNK = 128, 4096
ONE = np.float32(1)


def unlike_numbers(numel, seed=0):
    """Return numbers of very unlike sizes, some of them zero."""
    values = np.random.default_rng(seed).standard_normal(numel).astype(np.float32)
    values[: numel // 2] *= np.float32(1e-3)
    values[numel // 3 : numel // 2] = 0
    return values


def size_of(numel, bits, top_k=0):
    """Return the bytes of a message of so many numbers."""
    scales = 8 if bits == 2 else 4
    if top_k:
        return -(-numel // CHUNK) * (scales + top_k * 12 // 8 + top_k * bits // 8)
    return -(-numel // GROUP) * (scales + GROUP * bits // 8)


def ranges_of(numel, count):
    """Return the bounds of each owner's range: whole groups, of about the same number."""
    groups = -(-numel // GROUP)
    cuts = [min(groups * place // count * GROUP, numel) for place in range(count + 1)]
    return list(pairwise(cuts))


def bytes_sent(numel, ranks, rank, bits):
    """Return what a rank sends: the others' ranges once, and its own mean to each of them."""
    sizes = [size_of(stop - start, bits) for start, stop in ranges_of(numel, ranks)]
    return sum(sizes) - sizes[rank] + (ranks - 1) * sizes[rank]


def arrived(values, bits, top_k=0):
    """Return what the others make of a message of these numbers."""
    found = np.zeros_like(values)
    width = CHUNK if top_k else GROUP
    for start in range(0, len(values), width):
        part = np.zeros(width, np.float32)
        own = values[start : start + width]
        part[: len(own)] = own
        places = np.arange(width)
        if top_k:
            places = np.argsort(-np.abs(part), kind="stable")[:top_k]
            # The largest one stands in the place of each zero.
            places = np.where(part[places] == 0, places[0], places)
        back = np.zeros(width, np.float32)
        back[places] = _rounded(part[places], bits)
        found[start : start + width] = back[: len(own)]
    return found


def _rounded(numbers, bits):
    sizes = np.abs(numbers)
    if bits == 2:
        wide = sizes.astype(np.float64)
        large = wide >= wide.mean()
        high = np.float32(wide[large].sum() / max(large.sum(), 1))
        low = np.float32(wide[~large].sum() / max((~large).sum(), 1))
        return np.where(large, high, low) * np.where(numbers < 0, -ONE, ONE)
    top = 2 ** (bits - 1) - 1
    scale = sizes.max() / np.float32(top)
    if not scale:
        return np.zeros_like(numbers)
    return np.clip(np.rint(numbers / scale), -top, top).astype(np.float32) * scale


class Messages:
    """The exchanges of some ranks.

    Attributes:
        waiting: Of each rank, what its messages have left out.
        owed: What the means of all owners have left out.
    """

    def __init__(self, ranks, numel, bits):
        self.bits = bits
        self.ranges = ranges_of(numel, ranks)
        self.waiting = [np.zeros(numel, np.float32) for _ in range(ranks)]
        self.owed = np.zeros(numel, np.float32)

    def mean(self, values):
        """Return the mean of all ranks' numbers, as it arrives."""
        result = np.zeros_like(self.owed)
        for start, stop in self.ranges:
            total = np.zeros(stop - start, np.float32)
            for numbers, waiting in zip(values, self.waiting, strict=True):
                own = slice(start, stop)
                sent = self._send(numbers[own], waiting[own])
                total = total + sent
            total = total * np.float32(1 / len(values))
            result[start:stop] = self._send(total, self.owed[start:stop])
        return result

    def _send(self, numbers, waiting):
        """Return what arrives of numbers and of what waits; leave the rest there."""
        waiting += numbers
        sent = arrived(waiting, self.bits)
        waiting -= sent
        return sent
