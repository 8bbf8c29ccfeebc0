# SPDX-License-Identifier: Apache-2.0
"""Chooses executors; the same on all ranks, as all its inputs are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wavemare.comm.blocks.masks import BlockCounts, Masks
from wavemare.comm.config import HALVES
from wavemare.comm.selection.cost import Constants, predict, traffic

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
        allowed: Names of `wavemare.comm.selection.cost.EXECUTORS`.
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
        self._histories: dict[str, _History] = {}

    def prefers_dense(
        self,
        key: str,
        counts: BlockCounts,
        block_bytes: int,
        *,
        halves: bool = False,
        searched: bool = True,
    ) -> bool:
        """Whether `choose` would send all blocks; nothing is remembered."""
        choice = self._choice(key, counts, block_bytes, self.allowed, halves, searched)
        return choice.executor in DENSE

    def choose(
        self,
        key: str,
        masks: Masks | BlockCounts,
        block_bytes: int,
        *,
        halves: bool = False,
        searched: bool = True,
    ) -> ExecutorChoice:
        """Choose an executor for a call.

        Args:
            key: Name of the bucket.
            masks: Of all ranks; without masks all blocks are sent.
            block_bytes: Bytes of a block.
            halves: Whether only sums at their owners are wanted.
            searched: Whether the bucket is read to find its non-zero blocks.
        """
        allowed = self.allowed
        if isinstance(masks, BlockCounts):
            allowed = tuple(name for name in allowed if name in DENSE)
        choice = self._choice(key, masks, block_bytes, allowed, halves, searched)
        self._history(key).last = choice.executor
        return choice

    def _choice(
        self,
        key: str,
        masks: Masks | BlockCounts,
        block_bytes: int,
        allowed: Sequence[str],
        halves: bool,
        searched: bool,
    ) -> ExecutorChoice:
        history = self._history(key)
        return choose_executor(
            masks,
            block_bytes,
            self.constants,
            [name for name in HALVES if name in allowed] if halves else allowed,
            last=history.last,
            corrections=history.corrections,
            halves=halves,
            searched=searched,
        )

    def learn(self, key: str, executor: str, ratio: float) -> None:
        """Correct the predictions by a measured call.

        Args:
            key: Name of the bucket.
            executor: Which was used.
            ratio: Seconds taken over seconds predicted; the same on all ranks.
        """
        history = self._history(key)
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

    def _history(self, key: str) -> _History:
        return self._histories.setdefault(key, _History())
