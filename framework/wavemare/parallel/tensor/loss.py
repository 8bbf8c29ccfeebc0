# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of logits that are spread over the ranks by tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from wavemare.parallel.tensor.share import VocabularyShare

__all__ = ["IGNORED", "next_tokens", "vocab_parallel_cross_entropy"]

IGNORED = -100
"""The label of a position that does not count."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    share: VocabularyShare,
    group: Any,
    num_items: Tensor | int | None = None,
) -> Tensor:
    """Return the mean cross-entropy over the labels other than -100, equal on all ranks.

    It is computed in fp32. What the ranks exchange is three numbers for each position: the largest
    logit, the sum of exponentials and the label's logit.

    Args:
        logits: This rank's, (..., rows).
        labels: Tokens of the whole vocabulary, (...), equal on all ranks.
        share: Which tokens the rows are.
        group: The ranks.
        num_items: Divides the sum in place of the number of labels that count.
    """
    counts = labels != IGNORED
    rows, here = share.locate(labels.masked_fill(~counts, 0))
    losses = _CrossEntropy.apply(logits, rows, here, share.held, group)
    total = losses.masked_fill(~counts, 0.0).sum()
    return total / (counts.sum() if num_items is None else num_items)


def next_tokens(labels: Tensor) -> Tensor:
    """Return for each position, (batch, sequence), the label of the next one; -100 for the last."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]


class _CrossEntropy(torch.autograd.Function):
    """Loss of each position: log of the sum of exponentials, less the label's logit."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, rows: Tensor, here: Tensor, held: int, group: Any
    ) -> Tensor:
        scores = logits.float()
        if held < logits.shape[-1]:
            padding = torch.arange(logits.shape[-1], device=logits.device) >= held
            scores = scores.masked_fill(padding, float("-inf"))
        largest = scores.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scores = scores - largest[..., None]
        label_score = scores.gather(-1, rows[..., None]).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = scores.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), label_score])
        dist.all_reduce(sums, group=group)
        total, label_score = sums
        ctx.save_for_backward(exponentials.div_(total[..., None]), rows, here)
        ctx.dtype = logits.dtype
        return total.log() - label_score

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, rows, here = ctx.saved_tensors
        result = probabilities * gradient[..., None]
        result.scatter_add_(-1, rows[..., None], -(gradient * here)[..., None])
        return result.to(ctx.dtype), None, None, None, None
