# SPDX-License-Identifier: Apache-2.0
"""A vocabulary spread over the ranks: embedding, output projection and cross-entropy.

All ranks hold the same number of rows, a multiple of 8, so that products stay aligned. The last
ones are padding: zero, never read, without probability, and so with a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable

from wavemare.engine.launch.group import group_for
from wavemare.engine.waves.passes import wait
from wavemare.errors import ModelError
from wavemare.parallel.tensor.layers import (
    ColumnParallelLinear,
    gather_from_group,
    reduce_from_group,
)

_ROW_MULTIPLE = 8
_IGNORED = -100  # the label of a position that does not count


@dataclass(frozen=True)
class VocabularyShare:
    """Which tokens a rank holds.

    Args:
        tokens: Size of the whole vocabulary.
        rank: The rank in its group.
        ranks: Size of the group.
    """

    tokens: int
    rank: int
    ranks: int

    @property
    def rows(self) -> int:
        """How many rows each rank holds, with padding."""
        return -(-self.tokens // (self.ranks * _ROW_MULTIPLE)) * _ROW_MULTIPLE

    @property
    def first(self) -> int:
        """The token of this rank's first row."""
        return self.rank * self.rows

    @property
    def held(self) -> int:
        """How many of this rank's rows are tokens; the others, at its end, are padding."""
        return min(max(self.tokens - self.first, 0), self.rows)

    def part(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's rows of a tensor (tokens, ...), without padding."""
        return whole.narrow(0, min(self.first, self.tokens), self.held)

    def padded(self, part: Tensor) -> Tensor:
        """Return a copy of the rank's rows (held, ...) with rows of zeros at the end."""
        result = part.new_zeros((self.rows, *part.shape[1:]))
        result[: self.held] = part
        return result

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's row here, and whether it is here; where it is not, the row is 0.

        A token that no rank holds fails as an index would: with RuntimeError on a CPU, with the
        device's assertion elsewhere.
        """
        known = (tokens >= 0) & (tokens < self.tokens)
        torch._assert_async(known.all(), f"a token is not one of the {self.tokens} known")
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.held)
        return rows.masked_fill(~here, 0), here


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are spread over the ranks.

    Args:
        weight: The rank's rows, (rows, hidden).
        share: Which tokens these are.
        group: The ranks.
        padding_idx: A token whose row gets no gradient here, as in ``nn.Embedding``.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        share: VocabularyShare,
        group: Any,
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.share = share
        self.group = group
        row = -1 if padding_idx is None else padding_idx - share.first
        self._padding_row = row if 0 <= row < share.held else None

    @classmethod
    def standing_for(
        cls, whole: Any, weight: nn.Parameter, share: VocabularyShare, group: Any
    ) -> VocabParallelEmbedding:
        """Return the split form of an embedding, also of a subclass, such as one that scales.

        Args:
            whole: The embedding, whose forward pass is ``nn.Embedding``'s or calls it.
            weight: See the class.
            share: See the class.
            group: See the class.
        """
        split = cls(weight, share, group, whole.padding_idx)
        if type(whole) is not nn.Embedding:
            # By the order of the bases, its call of nn.Embedding's forward pass is one of ours.
            lookup = type("Lookup", (nn.Embedding,), {"forward": cls.forward})
            split.__class__ = type(f"Split{type(whole).__name__}", (type(whole), lookup, cls), {})
            own = {"weight", "_parameters", "share", "group", "_padding_row"}
            kept = {name: value for name, value in split.__dict__.items() if name in own}
            split.__dict__ = {**whole.__dict__, **kept}
        return split

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed tokens, (batch, sequence), into (batch, sequence, hidden)."""
        rows, here = self.share.locate(tokens)
        embedded = F.embedding(rows, self.weight, self._padding_row)
        return reduce_from_group(embedded.masked_fill(~here[..., None], 0), self.group)

    def __deepcopy__(self, memo: object) -> NoReturn:
        reason = "its layers hold a process group, and its copy would call the model itself"
        raise ModelError("model", "a split model", reason, "Copy the model before it is split")


class VocabParallelHead(ColumnParallelLinear):
    """An output projection of which each rank computes the logits of its tokens.

    Args:
        weight: The rank's rows, (rows, hidden); may be that of the embedding.
        bias: The rank's part, (rows,).
        share: Which tokens these are.
        group: The ranks.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, share: VocabularyShare, group: Any
    ) -> None:
        super().__init__(weight, bias, group)
        self.share = share

    def gather(self, logits: Tensor) -> Tensor:
        """Return the logits of all tokens, (..., tokens), from each rank's (..., rows)."""
        return gather_from_group(logits, self.group)[..., : self.share.tokens]

    def loss(self, logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None) -> Tensor:
        """Return `vocab_parallel_cross_entropy` of this rank's logits."""
        return vocab_parallel_cross_entropy(logits, labels, self.share, self.group, num_items)


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
    counts = labels != _IGNORED
    rows, here = share.locate(labels.masked_fill(~counts, 0))
    losses = _CrossEntropy.apply(logits, rows, here, share.held, group)
    total = losses.masked_fill(~counts, 0.0).sum()
    return total / (counts.sum() if num_items is None else num_items)


def next_tokens(labels: Tensor) -> Tensor:
    """Return for each position, (batch, sequence), the label of the next one; -100 for the last."""
    return F.pad(labels, (0, 1), value=_IGNORED)[..., 1:]


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
        group = group_for(largest, group)
        wait(dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group, async_op=True))
        scores = scores - largest[..., None]
        label_score = scores.gather(-1, rows[..., None]).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = scores.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), label_score])
        wait(dist.all_reduce(sums, group=group, async_op=True))
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
