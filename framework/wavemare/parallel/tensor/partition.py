# SPDX-License-Identifier: Apache-2.0
"""How weights are cut into the ranks' parts; a split model's weights put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn
from torch import distributed as dist

from wavemare.engine.experts import is_divided
from wavemare.engine.launch.group import gather, group_for
from wavemare.errors import ModelError
from wavemare.models import quantized
from wavemare.models.deferred import deferred, hooks_of, part_of, when_read
from wavemare.parallel.tensor.layers import VocabParallelEmbedding, VocabularyShare, all_parts


@dataclass(frozen=True)
class Partition:
    """How a tensor is cut.

    Args:
        dim: The dimension.
        blocks: Number of equal blocks along it. Every rank gets a part of each: 3 where queries,
            keys and values are one tensor.
        tokens: Size of the vocabulary, if it is that which the dimension counts; the last ranks
            may then hold fewer, and padding.
        copies: How many consecutive ranks hold the same part. More than one where there are fewer
            heads of keys and values than ranks.
    """

    dim: int
    blocks: int = 1
    tokens: int | None = None
    copies: int = 1

    def pieces(self, size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
        """Return the first and the last element of each piece of a rank's part.

        Args:
            size: Of the dimension.
            rank: Of ``range(ranks)``.
            ranks: That share it.

        Raises:
            ValueError: The dimension cannot be divided by the number of ranks.
        """
        if self.tokens is not None:
            share = VocabularyShare(self.tokens, rank, ranks)
            first = min(share.first, share.tokens)
            return [(first, first + share.held)]
        rank, ranks = rank // self.copies, ranks // self.copies
        if size % (self.blocks * ranks):
            raise ValueError(f"{size} cannot be divided by {self.blocks * ranks}")
        block, width = size // self.blocks, size // (self.blocks * ranks)
        starts = [block * number + width * rank for number in range(self.blocks)]
        return [(start, start + width) for start in starts]

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """Return a copy of a rank's part; see `pieces`."""
        pieces = self.pieces(whole.shape[self.dim], rank, ranks)
        parts = [whole.narrow(self.dim, first, last - first) for first, last in pieces]
        if self.tokens is not None:
            return VocabularyShare(self.tokens, rank, ranks).padded(parts[0])
        return torch.cat(parts, self.dim)

    def deferred_part(self, whole: nn.Parameter, rank: int, ranks: int) -> nn.Parameter:
        """Return what will be a rank's part of a parameter that has not been read yet."""
        pieces = self.pieces(whole.shape[self.dim], rank, ranks)
        rows = None if self.tokens is None else VocabularyShare(self.tokens, rank, ranks).rows
        return part_of(whole, self.dim, pieces, rows)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the tensor of which these are the ranks' parts."""
        parts = parts[:: self.copies]
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        whole = torch.cat([torch.cat(block, self.dim) for block in blocks], self.dim)
        return whole if self.tokens is None else whole[: self.tokens].clone()


def check_equal_weights(model: nn.Module, group: Any = None) -> None:
    """Raise on all ranks unless the sums of each weight that they all hold are equal on them.

    Weights that have not been read yet are left out, and experts that are divided over ranks.
    """
    named = [
        (name, parameter.detach())
        for name, parameter in model.named_parameters()
        if partition_of(parameter) is None
        and deferred(parameter) is None
        and not is_divided(parameter)
    ]
    own = {name: str(weight.sum(dtype=torch.float64).item()) for name, weight in named}
    first, *others = gather(own, group)
    for other in others:
        if other != first:
            name = min(n for n, _ in other.items() ^ first.items())
            reason = f"the ranks hold different weights, for example {name}"
            remedy = "Load the same weights on all ranks, or seed them alike before building it"
            raise ModelError("model", type(model).__name__, reason, remedy)


def split_parameter(
    whole: nn.Parameter, partition: Partition, group: Any, name: str = ""
) -> nn.Parameter:
    """Return this rank's part of a parameter, which knows its partition.

    It has the marks that Megatron-LM and DeepSpeed look for; without them DeepSpeed would count it
    in the gradient's norm on the first rank alone.

    Args:
        whole: It stays as it is.
        partition: How it is cut.
        group: The ranks.
        name: Of its layer, for errors.

    Raises:
        ValueError: The dimension cannot be divided by the number of ranks.
        ModelError: Its blocks of 4 bits cannot, or a hook wants the whole of it.
    """
    part = _part(whole, partition, group, name)
    _keep_hooks(whole, part, group, name)
    return part


def _part(whole: nn.Parameter, partition: Partition, group: Any, name: str) -> nn.Parameter:
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    counts = rank % partition.copies == 0
    if deferred(whole) is not None:
        part = partition.deferred_part(whole, rank, ranks)
        return marked(part, partition, whole.numel(), counts=counts)
    if quantized.is_quantized(whole):
        shape = quantized.whole_shape(whole)
        pieces = partition.pieces(shape[partition.dim], rank, ranks)
        own = quantized.part_of(whole, partition.dim, pieces, name)
        return marked(own, partition, shape.numel(), counts=counts)
    part = nn.Parameter(partition.part(whole.detach(), rank, ranks), whole.requires_grad)
    return marked(part, partition, whole.numel(), counts=counts)


def _keep_hooks(whole: nn.Parameter, part: nn.Parameter, group: Any, name: str) -> None:
    """Let hooks of a parameter's gradient, such as a mask, go on with the whole of it.

    Raises:
        ModelError: A hook gets the parameter itself, after its gradient has accumulated.
    """
    hooks, after = hooks_of(whole)
    if after:
        raise hook_refusal(name or "vocabulary", "register_post_accumulate_grad_hook")
    if not hooks:
        return
    partition, rank, ranks = partition_of(part), dist.get_rank(group), dist.get_world_size(group)
    assert partition is not None

    def of_whole(gradient: Tensor) -> Tensor:
        found = partition.whole(all_parts(gradient, group))
        for hook in hooks:
            changed = hook(found)
            found = found if changed is None else changed
        return partition.part(found, rank, ranks)

    when_read(part, lambda parameter: parameter.register_hook(of_whole))


def hook_refusal(name: str, method: str) -> ModelError:
    """Return the error of a hook that would get the rank's part of a weight's gradient.

    Args:
        name: Of the weight or its layer.
        method: That registers the hook.
    """
    remedy = "Call weight.register_hook before wavemare.initialize: it gets the whole gradient"
    if method != "register_hook":
        remedy += "; or use ZeRO or pipeline stages"
    return ModelError(name, method, "it would get this rank's part of the weight", remedy)


def marked(
    parameter: nn.Parameter, partition: Partition, whole_numel: int, *, counts: bool = True
) -> nn.Parameter:
    """Mark a parameter as a part of one with so many elements.

    Args:
        parameter: The part.
        partition: How the whole is cut.
        whole_numel: Elements of the whole.
        counts: Whether the part counts in norms on this rank. Of copies the first one does.
    """
    part: Any = parameter
    part.tensor_partition = partition
    part.whole_numel = whole_numel
    part.tensor_model_parallel = part.model_parallel = counts
    part.partition_dim = partition.dim
    return parameter


def partition_of(part: Tensor) -> Partition | None:
    """Return how the whole of which a tensor is a part was cut; None: all ranks hold it."""
    return getattr(part, "tensor_partition", None)


def is_copied(part: Tensor) -> bool:
    """Whether several ranks hold the same part."""
    partition = partition_of(part)
    return partition is not None and partition.copies > 1


def is_split(model: Any) -> bool:
    """Whether a model is one that `split_model` has returned."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, VocabParallelEmbedding) for module in model.modules()
    )


def split_embedding(model: nn.Module) -> VocabParallelEmbedding:
    """Return the embedding of a split model, which knows its group and its vocabulary.

    Raises:
        ModelError: The model has not been split.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding):
            return module
    raise ModelError(
        "model", type(model).__name__, "it is not split over ranks", "Call split_model first"
    )


def without_zero3(part: Tensor) -> Tensor:
    """Return a tensor as it is without ZeRO-3, which spreads it over the data ranks."""
    if not hasattr(part, "ds_id"):
        return part.detach()
    with deepspeed.zero.GatheredParameters([part]):
        return part.detach().clone()


def gather_parts(part: Tensor, group: Any) -> list[Tensor]:
    """Return the ranks' tensors, of one shape, on the group's first rank; elsewhere nothing."""
    first = dist.get_rank(group) == 0
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))] if first else []
    dist.gather(part.contiguous(), parts or None, group_dst=0, group=group_for(part, group))
    return parts
