# SPDX-License-Identifier: Apache-2.0
"""Compressors choose the blocks of a bucket that are sent in a step.

The names are OmniReduce's (SIGCOMM'21). All compressors also send the blocks whose norm is not
finite, even beyond k. `wavemare.comm.compress.error_feedback` keeps the other blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.compress.error_feedback import Compressor, block_norms
from wavemare.comm.config import CompressorConfig
from wavemare.errors import ConfigError

__all__ = [
    "BlockRandomK",
    "BlockThreshold",
    "BlockTopK",
    "BlockTopKRatio",
    "Compressor",
    "make_compressor",
]


class _CountedCompressor(Compressor):
    """Chooses a fixed number or share of blocks."""

    def __init__(
        self,
        block: int,
        *,
        ratio: float | None = None,
        k: int | None = None,
        error_feedback: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(block, error_feedback=error_feedback, warmup_steps=warmup_steps)
        if (ratio is None) == (k is None):
            reason = "the number of blocks to send is given either as such or as a share"
            raise ConfigError("ratio", ratio, reason, "Give one of ratio and k")
        if ratio is not None and not 0 < ratio <= 1:
            raise ConfigError("ratio", ratio, "it is no share", "Give more than 0 and at most 1")
        if k is not None and k < 1:
            raise ConfigError("k", k, "nothing would ever be sent", "Give 1 or more")
        self.ratio, self.k = ratio, k

    def count(self, blocks: int) -> int:
        """Return the number of chosen blocks, from 1 to ``blocks``."""
        k = round(self.ratio * blocks) if self.ratio is not None else (self.k or 0)
        return min(blocks, max(1, k))

    def settings(self) -> dict[str, Any]:
        """Return the settings; see `Compressor.settings`."""
        return {**super().settings(), "ratio": self.ratio, "k": self.k}


class BlockTopK(_CountedCompressor):
    """Chooses the k blocks of largest L2 norm; the first of equal ones.

    It is a contraction: ``||C(a) - a||^2 <= (1 - k / nb) * ||a||^2`` for nb blocks.

    Args:
        block: Elements per block.
        ratio: k as a share of a bucket's blocks.
        k: Number of blocks; exactly one of the two is given.
        error_feedback: See `Compressor`.
        warmup_steps: See `Compressor`.

    Raises:
        ConfigError: A number is missing or out of range.
    """

    kind = "block_topk"

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose the k largest blocks."""
        norms = block_norms(accumulated, self.block)
        return _largest(norms, ~norms.isfinite(), self.count(len(norms)))


class BlockTopKRatio(_CountedCompressor):
    """Chooses the k blocks of largest ``||a_j|| / ||w_j||``; the first of equal ones.

    For a block of zero weights, the smallest norm of the bucket's other blocks counts (1 if all are
    zero): the block can grow without crowding out the others. A block whose weights have no finite
    norm is chosen.

    For arguments and errors see `BlockTopK`.
    """

    kind = "block_topk_ratio"

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose the k blocks that are largest relative to their weights."""
        assert weights is not None, "step() has checked it"
        norms = block_norms(accumulated, self.block)
        k = self.count(len(norms))
        if k == len(norms):
            return torch.ones_like(norms, dtype=torch.bool)
        sizes = block_norms(weights, self.block)
        urgent = ~(norms.isfinite() & sizes.isfinite())
        smallest = sizes.where(sizes > 0, torch.inf).min()
        smallest = smallest.where(smallest.isfinite(), 1.0)
        return _largest(norms / sizes.where(sizes != 0, smallest), urgent, k)

    def check(self, key: str, gradient: Tensor, weights: Tensor | None = None) -> None:
        """Check what `step` would be given; see `Compressor.check`."""
        super().check(key, gradient, weights)
        if weights is None:
            remedy = "Pass the weights that the gradients belong to"
            raise ConfigError(f"weights of bucket {key}", None, f"{self.kind} needs them", remedy)
        if weights.shape != gradient.shape or not weights.is_contiguous():
            reason = f"they are no contiguous tensor of {len(gradient)} elements like the gradient"
            remedy = "Pass the weights in the layout of the bucket"
            raise ConfigError(f"weights of bucket {key}", tuple(weights.shape), reason, remedy)


class BlockRandomK(_CountedCompressor):
    """Chooses k blocks at random: the same on all ranks, different ones in each step.

    In expectation it contracts as `BlockTopK` does. Blocks are not divided by their probability, as
    error feedback sends the others later.

    Ranks agree without a message, except for blocks that are not finite. All ranks must run the
    same release of numpy.

    For arguments and errors see `BlockTopK`.

    Args:
        seed: The same on all ranks; not negative.
    """

    kind = "block_randomk"

    def __init__(
        self,
        block: int,
        *,
        ratio: float | None = None,
        k: int | None = None,
        seed: int = 0,
        error_feedback: bool = True,
        warmup_steps: int = 0,
    ) -> None:
        super().__init__(
            block, ratio=ratio, k=k, error_feedback=error_feedback, warmup_steps=warmup_steps
        )
        if seed < 0:
            raise ConfigError("seed", seed, "it is negative", "Give 0 or more")
        self.seed = seed

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose k blocks that seed and draw determine."""
        norms = block_norms(accumulated, self.block)
        random = np.random.Generator(np.random.PCG64([self.seed, draw]))
        # Without an order the cost grows with k, not with the number of blocks.
        drawn = random.choice(len(norms), self.count(len(norms)), replace=False, shuffle=False)
        chosen = ~norms.isfinite()
        chosen[torch.from_numpy(drawn).to(norms.device)] = True
        return chosen

    def settings(self) -> dict[str, Any]:
        """Return the settings; see `Compressor.settings`."""
        return {**super().settings(), "seed": self.seed}


class BlockThreshold(Compressor):
    """Chooses the blocks whose L2 norm is at least a threshold.

    What waits is bounded: ``||C(a) - a||^2 <= nb * threshold^2`` for nb blocks.

    Args:
        block: Elements per block.
        threshold: In units of the gradient; more than 0.
        error_feedback: See `Compressor`.
        warmup_steps: See `Compressor`.

    Raises:
        ConfigError: A number is out of range.
    """

    kind = "block_threshold"

    def __init__(
        self, block: int, threshold: float, *, error_feedback: bool = True, warmup_steps: int = 0
    ) -> None:
        super().__init__(block, error_feedback=error_feedback, warmup_steps=warmup_steps)
        if not 0 < threshold < float("inf"):
            reason = "norms are compared with a positive, finite number"
            raise ConfigError("threshold", threshold, reason, "Give a number above 0")
        self.threshold = threshold

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose the blocks that reach the threshold."""
        norms = block_norms(accumulated, self.block)
        return (norms >= self.threshold) | ~norms.isfinite()

    def settings(self) -> dict[str, Any]:
        """Return the settings; see `Compressor.settings`."""
        return {**super().settings(), "threshold": self.threshold}


def make_compressor(config: CompressorConfig, block: int) -> Compressor:
    """Return the compressor that a configuration asks for.

    Args:
        config: Its settings.
        block: Elements per block.

    Raises:
        ConfigError: The block is out of range.
    """
    common: dict[str, Any] = {
        "error_feedback": config.error_feedback,
        "warmup_steps": config.warmup_steps,
    }
    match config.type:
        case "block_topk":
            return BlockTopK(block, ratio=config.ratio, **common)
        case "block_topk_ratio":
            return BlockTopKRatio(block, ratio=config.ratio, **common)
        case "block_randomk":
            return BlockRandomK(block, ratio=config.ratio, seed=config.seed, **common)
        case "block_threshold":
            assert config.threshold is not None, "the validator has checked it"
            return BlockThreshold(block, config.threshold, **common)


def _largest(scores: Tensor, urgent: Tensor, k: int) -> Tensor:
    """Return the mask of the k largest scores, of equal ones the first, and of all urgent ones."""
    if k == len(scores):
        return torch.ones_like(urgent)
    scores = scores.masked_fill(urgent, torch.inf)
    least = scores.topk(k, sorted=False).values.min()
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum())) | urgent
