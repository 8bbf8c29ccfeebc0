# SPDX-License-Identifier: Apache-2.0
"""A large output head split over the data-parallel ranks, which all train the whole body.

Whale's colocated replica and split: the ranks' features are gathered, each rank computes the
logits of its classes for all samples, and the gradients of the features are scattered back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.utils import groups
from torch import Tensor, nn
from torch import distributed as dist
from torch.autograd.function import once_differentiable
from transformers import (
    BertForSequenceClassification,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
)

from wavemare.errors import ModelError
from wavemare.parallel.tensor.forward import compute_loss_in_head
from wavemare.parallel.tensor.loss import IGNORED, next_tokens
from wavemare.parallel.tensor.share import VocabularyShare

__all__ = ["ColocatedHead", "split_head", "whole_heads"]

_HEADS = {
    BertForSequenceClassification: "classifier",
    GPT2ForSequenceClassification: "score",
    GPT2LMHeadModel: "lm_head",
}


class ColocatedHead(nn.Module):
    """This rank's rows of an output projection.

    Called with features it returns them: the logits of a rank's own samples are nowhere together
    during training.

    Args:
        head: The whole projection, equal on all ranks.
        group: The data-parallel ranks.
    """

    def __init__(self, head: nn.Linear, group: Any) -> None:
        super().__init__()
        self.group = group
        self.share = VocabularyShare(
            head.out_features, dist.get_rank(group), dist.get_world_size(group)
        )
        self.weight = self._part(head.weight)
        self.bias = self._part(head.bias) if head.bias is not None else None

    def _part(self, whole: Tensor) -> nn.Parameter:
        part: Any = nn.Parameter(self.share.padded(self.share.part(whole.detach())))
        part.requires_grad_(whole.requires_grad)
        part.whole_numel = whole.numel()
        # DeepSpeed's marks of an expert's weights: no other rank has them, none averages them.
        part.allreduce = False
        part.group_name = self.group_name
        return part

    @property
    def group_name(self) -> str:
        """DeepSpeed's name of groups in which every rank has other experts."""
        return f"ep_size_{self.share.ranks}"

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Make DeepSpeed's groups; it calls this while it builds an engine."""
        if self.group_name not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(
                self.share.ranks,
                use_data_before_expert_parallel_=use_data_before_expert_parallel_,
            )

    def forward(self, features: Tensor) -> Tensor:
        """Return the features."""
        return features

    def losses(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each of this rank's samples; 0 for the label -100.

        Args:
            features: (samples, width); the ranks may have unequal numbers of samples.
            labels: (samples,).
        """
        return _Losses.apply(features, labels, self.weight, self.bias, self.share, self.group)

    @torch.no_grad()
    def logits(self, features: Tensor) -> Tensor:
        """Return the logits of this rank's samples, (..., classes), without a gradient."""
        flat = features.reshape(-1, features.shape[-1])
        gathered, longest = _gather(flat, self.group, 0.0)
        own = F.linear(gathered, self.weight, self.bias)
        parts = [torch.empty_like(own) for _ in range(self.share.ranks)]
        dist.all_gather(parts, own, group=self.group)
        first = self.share.rank * longest
        rows = torch.cat(parts, dim=-1)[first : first + len(flat), : self.share.tokens]
        return rows.reshape(*features.shape[:-1], self.share.tokens)

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """Return the weights of all ranks, by their names here; all ranks call this."""
        result = {}
        for name, part in self.named_parameters():
            parts = [torch.empty_like(part) for _ in range(self.share.ranks)]
            dist.all_gather(parts, part.detach(), group=self.group)
            result[name] = torch.cat(parts)[: self.share.tokens]
        return result


def split_head(model: Any, name: str, group: Any) -> None:
    """Split the output head of a model over the data-parallel ranks, in place.

    Called with labels, the model then returns the loss of its own samples and no logits.

    Args:
        model: BERT or GPT-2 for sequence classification, or GPT-2 with an untied head.
        name: The head's name in it.
        group: The data-parallel ranks, all of which call this.

    Raises:
        ModelError: It is not the head of a supported model, is tied, or is for another task.
    """
    known = next((head for kind, head in _HEADS.items() if isinstance(model, kind)), None)
    if name != known:
        named = ", ".join(f"{head} of {kind.__name__}" for kind, head in _HEADS.items())
        reason = f"it is not a head of {type(model).__name__} that can be split over data ranks"
        raise ModelError("colocated", name, reason, f"Use {named}")
    head = model.get_submodule(name)
    if any(head.weight is value for n, value in model.named_parameters() if n != f"{name}.weight"):
        reason = "the embedding, of which every rank has the whole, has the same weight"
        raise ModelError("colocated", name, reason, 'Set "tie_word_embeddings" to false')
    language = isinstance(model, GPT2LMHeadModel)
    task = model.config.problem_type
    if not language and (
        task not in (None, "single_label_classification") or head.out_features == 1
    ):
        reason = "only classes that exclude each other are split"
        raise ModelError("config.problem_type", task, reason, "Leave the head whole")
    for value in head.parameters():
        dist.broadcast(value.data, src=dist.get_global_rank(group, 0), group=group)
    split = ColocatedHead(head, group).train(head.training)
    model.set_submodule(name, split)
    _compute_loss_from_features(model, split, shifts_labels=language)


def whole_heads(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights of a model's split heads by their names; all ranks call this."""
    return {
        f"{prefix}.{name}": value
        for prefix, module in model.named_modules()
        if isinstance(module, ColocatedHead)
        for name, value in module.whole().items()
    }


def _compute_loss_from_features(model: Any, head: ColocatedHead, *, shifts_labels: bool) -> None:
    def loss(features: Tensor, labels: Any, shifted: Any, num_items: Any) -> Tensor:
        if shifted is None:
            shifted = next_tokens(labels) if shifts_labels else labels
        shifted = shifted.reshape(-1)
        losses = head.losses(features.reshape(-1, features.shape[-1]), shifted)
        count = (shifted != IGNORED).sum() if num_items is None else num_items
        return losses.sum() / count

    compute_loss_in_head(model, gather=head.logits, loss=loss)


def _gather(value: Tensor, group: Any, filling: float) -> tuple[Tensor, int]:
    """Return the ranks' tensors one below the other, filled up to the longest, and its length."""
    longest = torch.tensor(len(value), device=value.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    length = int(longest)
    padded = value.new_full((length, *value.shape[1:]), filling)
    padded[: len(value)] = value
    parts = [torch.empty_like(padded) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts), length


class _Losses(torch.autograd.Function):
    """Loss of each sample: log of the sum of exponentials, less the label's logit."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        labels: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        share: VocabularyShare,
        group: Any,
    ) -> Tensor:
        everything, length = _gather(features, group, 0.0)
        targets, _ = _gather(labels, group, IGNORED)
        counts = targets != IGNORED
        rows, here = share.locate(targets.masked_fill(~counts, 0))
        scores = F.linear(everything, weight, bias).float()
        scores[:, share.held :] = float("-inf")
        largest = scores.amax(dim=-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        scores = scores - largest[:, None]
        of_label = scores.gather(-1, rows[:, None]).squeeze(-1).masked_fill(~here, 0.0)
        exponentials = scores.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), of_label])
        dist.all_reduce(sums, group=group)
        total, of_label = sums
        probabilities = exponentials.div_(total[:, None])
        ctx.save_for_backward(everything, probabilities, rows, here, counts, weight)
        ctx.group, ctx.samples, ctx.has_bias = group, len(features), bias is not None
        losses = (total.log() - of_label).masked_fill(~counts, 0.0)
        first = share.rank * length
        return losses[first : first + len(features)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        everything, probabilities, rows, here, counts, weight = ctx.saved_tensors
        of_all, length = _gather(gradient, ctx.group, 0.0)
        of_all = of_all.masked_fill(~counts, 0.0)
        result = probabilities * of_all[:, None]
        result.scatter_add_(-1, rows[:, None], -(of_all * here)[:, None])
        result = result.to(weight.dtype)
        partial = result @ weight
        own = partial.new_empty((length, partial.shape[-1]))
        dist.reduce_scatter_tensor(own, partial, group=ctx.group)
        of_bias = result.sum(dim=0) if ctx.has_bias else None
        return own[: ctx.samples], None, result.t() @ everything, of_bias, None, None
