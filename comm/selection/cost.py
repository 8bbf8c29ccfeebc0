# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of a collective: bytes over measured rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wavemare.comm.blocks.masks import BlockCounts, Masks, mask_bytes

EXECUTORS = ("dense", "ordered", "packed", "pushpull", "allgather")
"""Executors for the selector; ``dense`` and ``ordered`` send all blocks."""

IN_ORDER = ("ordered", "pushpull", "allgather")
"""Executors for the selector with deterministic sums."""


@dataclass(frozen=True)
class Constants:
    """Measured at start, by all ranks at once, and the same on all of them.

    Args:
        message_s: Seconds of an exchange of empty messages among all ranks.
        exchange_s: Seconds per byte that a rank sends (and receives, at the same time).
        dense_latency_s: Seconds of the library's reduction of next to nothing.
        dense_s: Its seconds per byte of the tensor.
        mask_s: Seconds per byte of a bucket whose mask is taken.
        pack_s: Seconds per byte that is packed.
        reduce_s: Seconds per byte that the ordered reduction reads.
        unpack_s: Seconds per byte that is unpacked.
        plan_s: Seconds per block and rank that the layout takes.
    """

    message_s: float = 1e-4
    exchange_s: float = 8e-9
    dense_latency_s: float = 1e-4
    dense_s: float = 1.2e-8
    mask_s: float = 1.5e-10
    pack_s: float = 3e-10
    reduce_s: float = 3e-10
    unpack_s: float = 3e-10
    plan_s: float = 2e-8


@dataclass(frozen=True)
class Traffic:
    """Bytes that the busiest rank moves.

    Args:
        up: Bytes sent.
        down: Bytes received.
        packed: Bytes copied out of the bucket.
        reduced: Bytes that the ordered reduction reads and writes.
        unpacked: Bytes copied into the bucket.
    """

    up: float
    down: float
    packed: float = 0.0
    reduced: float = 0.0
    unpacked: float = 0.0


def traffic(
    masks: Masks | BlockCounts, block_bytes: int, *, halves: bool = False
) -> Mapping[str, Traffic]:
    """Return the bytes of each executor, by the formulas of the papers.

    With S the bytes of the bucket, N ranks, d the density of a rank's blocks and u that of their
    union: dense 2 (N-1)/N S; packed 2 (N-1)/N u S; push/pull (N-1)/N (d + u) S; block allgather
    (N-1) d S. The rank with the densest mask is the slowest to push.

    Args:
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        halves: Whether only sums at their owners are wanted; then of `HALVES`.
    """
    ranks = masks.num_ranks
    others = (ranks - 1) / ranks
    whole = float(masks.num_blocks * block_bytes)
    union = float(masks.union_size * block_bytes)
    total = float(masks.counts.sum()) * block_bytes
    most = float(masks.counts.max(initial=0)) * block_bytes
    least = float(masks.counts.min(initial=masks.num_blocks)) * block_bytes
    owned = union / ranks
    pushed = max(most, total / ranks) * others
    pulled = owned * (ranks - 1)
    if halves:
        reduced = total / ranks + owned
        return {
            "ordered": Traffic(others * whole, others * whole, reduced=whole + whole / ranks),
            "pushpull": Traffic(pushed, total / ranks * others, most, reduced, owned),
        }
    return {
        "dense": Traffic(2 * others * whole, 2 * others * whole),
        "ordered": Traffic(2 * others * whole, 2 * others * whole, reduced=whole + whole / ranks),
        "packed": Traffic(2 * others * union, 2 * others * union, packed=union, unpacked=union),
        "pushpull": Traffic(
            up=pushed + pulled,
            down=total / ranks * others + pulled,
            packed=most,
            reduced=total / ranks + owned,
            unpacked=union,
        ),
        "allgather": Traffic(
            up=(ranks - 1) * most,
            down=total - least,
            packed=most,
            reduced=total + union,
            unpacked=union,
        ),
    }


def predict(
    masks: Masks | BlockCounts,
    block_bytes: int,
    constants: Constants,
    *,
    halves: bool = False,
    searched: bool = True,
) -> Mapping[str, float]:
    """Return the seconds that each executor will take, the exchange of masks included.

    Args:
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        constants: Of this machine.
        halves: As for `traffic`.
        searched: Whether the bucket is read to find its non-zero blocks.
    """
    ranks, c = masks.num_ranks, constants
    whole = masks.num_blocks * block_bytes
    bits = (ranks - 1) * mask_bytes(masks.num_blocks)
    metadata = c.message_s + bits * c.exchange_s + (whole * c.mask_s if searched else 0.0)
    planning = ranks * masks.num_blocks * c.plan_s
    seconds = {}
    for name, moved in traffic(masks, block_bytes, halves=halves).items():
        kernels = moved.packed * c.pack_s + moved.reduced * c.reduce_s + moved.unpacked * c.unpack_s
        wire = max(moved.up, moved.down) * c.exchange_s
        if name == "dense":
            seconds[name] = c.dense_latency_s + whole * c.dense_s
        elif name == "packed":
            union = masks.union_size * block_bytes
            seconds[name] = metadata + c.dense_latency_s + union * c.dense_s + kernels
        else:
            exchanges = 1 if name == "allgather" or halves else 2
            seconds[name] = exchanges * c.message_s + wire + kernels
            if name != "ordered":
                seconds[name] += metadata + planning
    return seconds
