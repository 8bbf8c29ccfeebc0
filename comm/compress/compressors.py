# SPDX-License-Identifier: Apache-2.0
"""Compressors choose the blocks of a bucket that are sent in a step.

The names are OmniReduce's (SIGCOMM'21). All compressors also send the blocks whose norm is not
finite, even beyond k. `wavemare.comm.compress.error_feedback` keeps the other blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from wavemare.comm.compress.error_feedback import Compressor, block_norms
from wavemare.comm.config import CompressorConfig
from wavemare.errors import ConfigError

__all__ = ["Compressor", "make_compressor"]


def make_compressor(config: CompressorConfig, block: int) -> Compressor:
    """Return the compressor that a configuration asks for.

    Args:
        config: Its settings.
        block: Elements per block.

    Raises:
        ConfigError: The block is out of range.
    """
    kinds = (_BlockTopK, _BlockTopKRatio, _BlockRandomK, _BlockThreshold)
    return {kind.kind: kind for kind in kinds}[config.type](block, config)


class _BlockTopK(Compressor):
    """Chooses the k blocks of largest L2 norm; the first of equal ones.

    It is a contraction: ``||C(a) - a||^2 <= (1 - k / nb) * ||a||^2`` for nb blocks.
    """

    kind = "block_topk"
    options = ("ratio",)

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose the k largest blocks."""
        norms = block_norms(accumulated, self.block)
        return _largest(norms, ~norms.isfinite(), self.count(len(norms)))


class _BlockTopKRatio(Compressor):
    """Chooses the k blocks of largest ``||a_j|| / ||w_j||``; the first of equal ones.

    For a block of zero weights, the smallest norm of the bucket's other blocks counts (1 if all are
    zero): the block can grow without crowding out the others. A block whose weights have no finite
    norm is chosen.
    """

    kind = "block_topk_ratio"
    options = ("ratio",)

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


class _BlockRandomK(Compressor):
    """Chooses k blocks at random: the same on all ranks, different ones in each step.

    In expectation it contracts as `_BlockTopK` does. Blocks are not divided by their probability,
    as error feedback sends the others later.

    Ranks agree without a message, except for blocks that are not finite. All ranks must run the
    same release of numpy.
    """

    kind = "block_randomk"
    options = ("ratio", "seed")

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose k blocks that seed and draw determine."""
        norms = block_norms(accumulated, self.block)
        random = np.random.Generator(np.random.PCG64([self.config.seed, draw]))
        # Without an order the cost grows with k, not with the number of blocks.
        drawn = random.choice(len(norms), self.count(len(norms)), replace=False, shuffle=False)
        chosen = ~norms.isfinite()
        chosen[torch.from_numpy(drawn).to(norms.device)] = True
        return chosen


class _BlockThreshold(Compressor):
    """Chooses the blocks whose L2 norm is at least a threshold.

    What waits is bounded: ``||C(a) - a||^2 <= nb * threshold^2`` for nb blocks.
    """

    kind = "block_threshold"
    options = ("threshold",)

    def select(self, accumulated: Tensor, weights: Tensor | None = None, draw: int = 0) -> Tensor:
        """Choose the blocks that reach the threshold."""
        norms = block_norms(accumulated, self.block)
        assert self.config.threshold is not None, "the validator has checked it"
        return (norms >= self.config.threshold) | ~norms.isfinite()


def _largest(scores: Tensor, urgent: Tensor, k: int) -> Tensor:
    """Return the mask of the k largest scores, of equal ones the first, and of all urgent ones."""
    if k == len(scores):
        return torch.ones_like(urgent)
    scores = scores.masked_fill(urgent, torch.inf)
    least = scores.topk(k, sorted=False).values.min()
    above, equal = scores > least, scores == least
    return above | (equal & (equal.cumsum(0) <= k - above.sum())) | urgent
