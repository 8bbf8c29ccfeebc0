# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of each executor, as bytes over measured rates, and chooses the fastest.

Alike on all ranks, as all its inputs are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wavemare.comm.config import HALVES, LOOSE_MODES
from wavemare.comm.masks import BlockCounts, Masks, mask_bytes

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


HYSTERESIS = 0.1
"""Keep the last executor unless another is predicted to be faster by this share."""
DENSE = ("dense", "ordered")
_LEARNING_RATE = 0.3
_MOST_CORRECTION = 4.0
_FORGETTING = 0.02


@dataclass(frozen=True)
class ExecutorChoice:
    """The executor for a bucket, and the predicted costs of all executors.

    Args:
        executor: The chosen one.
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        predicted_s: Seconds of each executor that may be chosen.
        halves: Whether it is a reduce-scatter.
    """

    executor: str
    masks: Masks | BlockCounts
    block_bytes: int
    predicted_s: Mapping[str, float]
    halves: bool = False

    def __str__(self) -> str:
        masks = self.masks
        blocks = max(masks.num_blocks, 1)
        lines = [
            f"{masks.num_blocks} blocks of {self.block_bytes} bytes on {masks.num_ranks} ranks: "
            f"density {masks.counts.mean() / blocks:.4f}, union {masks.union_size / blocks:.4f}, "
            f"densest rank {masks.counts.max()} blocks"
        ]
        table = traffic(masks, self.block_bytes, halves=self.halves)
        for name, seconds in sorted(self.predicted_s.items(), key=lambda item: item[1]):
            moved = table[name]
            mark = ">" if name == self.executor else " "
            lines.append(
                f"{mark} {name:<10} {1000 * seconds:10.2f} ms   up {moved.up / 2**20:9.2f} MiB   "
                f"down {moved.down / 2**20:9.2f} MiB"
            )
        return "\n".join(lines)


def choose_executor(
    masks: Masks | BlockCounts,
    block_bytes: int,
    constants: Constants,
    allowed: Sequence[str],
    *,
    last: str | None = None,
    corrections: Mapping[str, float] | None = None,
    halves: bool = False,
    searched: bool = True,
) -> ExecutorChoice:
    """Choose an executor; a pure function of what all ranks know.

    Args:
        masks: Of all ranks.
        block_bytes: Bytes of a block.
        constants: Of this machine, the same on all ranks.
        allowed: Names of `wavemare.comm.cost.EXECUTORS`.
        last: The previous choice; kept unless another is faster by `HYSTERESIS`.
        corrections: Measured over predicted time, by executor.
        halves: Whether to choose a reduce-scatter.
        searched: Whether the bucket is read to find its non-zero blocks.
    """
    factors = corrections or {}
    predictions = predict(masks, block_bytes, constants, halves=halves, searched=searched)
    predicted = {name: predictions[name] * factors.get(name, 1.0) for name in allowed}
    best = min(predicted, key=lambda name: (predicted[name], name))
    if last in predicted and predicted[last] <= predicted[best] * (1 + HYSTERESIS):
        best = last
    return ExecutorChoice(best, masks, block_bytes, predicted, halves)


@dataclass
class _History:
    last: str | None = None
    corrections: dict[str, float] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)


class Selector:
    """Chooses for each bucket by its own history.

    Args:
        constants: Of this machine, the same on all ranks.
        allowed: Names of executors.
    """

    def __init__(self, constants: Constants, allowed: Sequence[str]) -> None:
        self.constants = constants
        self.allowed = tuple(allowed)
        self._histories: defaultdict[str, _History] = defaultdict(_History)

    def choose(
        self,
        key: str,
        masks: Masks | BlockCounts,
        block_bytes: int,
        *,
        halves: bool = False,
        searched: bool = True,
        reduces: bool = True,
        tentative: bool = False,
    ) -> ExecutorChoice:
        """Choose an executor for a call.

        Args:
            key: Name of the bucket.
            masks: Of all ranks; without masks all blocks are sent, unless it is tentative.
            block_bytes: Bytes of a block.
            halves: Whether only sums at their owners are wanted.
            searched: Whether the bucket is read to find its non-zero blocks.
            reduces: Whether the library reduces this type; else `LOOSE_MODES` sum in rank order,
                and do not cost what the library's reduction does.
            tentative: Whether nothing is remembered.
        """
        allowed = tuple(name for name in self.allowed if reduces or name not in LOOSE_MODES)
        if isinstance(masks, BlockCounts) and not tentative:
            allowed = tuple(name for name in allowed if name in DENSE)
        history = self._histories[key]
        choice = choose_executor(
            masks,
            block_bytes,
            self.constants,
            [name for name in HALVES if name in allowed] if halves else allowed,
            last=history.last,
            corrections=history.corrections,
            halves=halves,
            searched=searched,
        )
        if not tentative:
            history.last = choice.executor
        return choice

    def learn(self, key: str, executor: str, ratio: float) -> None:
        """Correct the predictions by a measured call.

        Args:
            key: Name of the bucket.
            executor: Which was used.
            ratio: Seconds taken over seconds predicted; the same on all ranks.
        """
        history = self._histories[key]
        if executor not in history.used:
            # The first call touches fresh pages and may compile kernels.
            history.used.add(executor)
            return
        corrections = history.corrections
        for other in corrections.keys() - {executor}:
            # Unused executors are not measured: let their corrections fade.
            corrections[other] += _FORGETTING * (1 - corrections[other])
        before = corrections.get(executor, 1.0)
        # The prediction was corrected already.
        target = min(max(before * ratio, 1 / _MOST_CORRECTION), _MOST_CORRECTION)
        corrections[executor] = before + _LEARNING_RATE * (target - before)
