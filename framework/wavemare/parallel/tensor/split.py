# SPDX-License-Identifier: Apache-2.0
"""A transformers model split over a group of ranks, in place."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from wavemare.errors import ModelError
from wavemare.parallel.tensor.layers import (
    ColumnParallelLinear,
    DropoutAfterSum,
    RowParallelLinear,
    SplitRandom,
    align_generators,
    copy_to_group,
    split_parameter,
)
from wavemare.parallel.tensor.partition import partition_of
from wavemare.parallel.tensor.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    VocabularyShare,
    next_tokens,
)

SPLITTABLE = (GPT2LMHeadModel, BertForMaskedLM, BertForSequenceClassification)
"""Classes of models that can be split."""


def split_model(model: Any, group: Any) -> Any:
    """Split attention, feed-forward layers, embedding and language-modelling head over a group.

    The model computes the same loss on all ranks as before. Norms, position embeddings, BERT's
    pooler and its heads' other layers stay whole on all ranks. A language model called with labels
    returns no logits: called without, it returns those of the whole vocabulary. Attention
    probabilities, if asked for, are those of the rank's heads.

    The ranks' default generators are put into the first rank's state, so that they drop the same
    elements outside attention; seed all ranks of a group alike from then on.

    Args:
        model: A `GPT2LMHeadModel`, `BertForMaskedLM` or `BertForSequenceClassification` with equal
            weights on all ranks, not yet given to an engine.
        group: The ranks, all of which call this.

    Returns:
        The model.

    Raises:
        ModelError: It cannot be split so, or the ranks' weights differ. It is left as it was.
    """
    ranks = dist.get_world_size(group)
    _check_kind(model)
    _check_layers(model)
    _check_widths(model.config, ranks)
    _check_equal(model, group)
    splitter = _Splitter(model.config.vocab_size, group)
    for name, module in list(model.named_modules()):
        replacement = splitter.replacement(name, module)
        if replacement is not None:
            model.set_submodule(name, replacement.train(module.training))
    if isinstance(model, GPT2LMHeadModel):
        _finish_gpt2(model, SplitRandom(splitter.rank), ranks)
        _compute_loss_over_group(model, model.lm_head, shifts_labels=True)
    else:
        _finish_bert(model, SplitRandom(splitter.rank), group)
    if isinstance(model, BertForMaskedLM):
        head: Any = model.cls.predictions
        head.bias = splitter.parameter("predictions.bias", head.bias)
        _compute_loss_over_group(model, head.decoder, shifts_labels=False)
    align_generators(next(model.parameters()).device, group)
    return model


class _Splitter:
    """Makes a rank's modules and parameters.

    Args:
        tokens: Size of the vocabulary.
        group: The ranks.
    """

    def __init__(self, tokens: int, group: Any) -> None:
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self._share = VocabularyShare(tokens, self.rank, self.ranks)
        self._group = group
        # By identity, so that what was tied stays so. They hold the wholes, so that no identity is
        # used again.
        self._parts: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def parameter(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        """Return the rank's part of a parameter, or the whole one if it is not split."""
        partition = partition_of(name)
        if partition is None:
            return whole
        if id(whole) not in self._parts:
            part = partition.part(whole.detach(), self.rank, self.ranks)
            if partition.vocabulary:
                part = self._share.padded(part)
            split = split_parameter(
                part, partition.dim, whole.requires_grad, whole_numel=whole.numel()
            )
            self._parts[id(whole)] = split, whole
        return self._parts[id(whole)][0]

    def replacement(self, name: str, module: Any) -> nn.Module | None:
        """Return what stands for a module of the model; None if it stays."""
        partition = partition_of(f"{name}.weight")
        if partition is None:
            return None
        weight = self.parameter(f"{name}.weight", module.weight)
        if isinstance(module, nn.Embedding):
            return VocabParallelEmbedding(weight, self._share, self._group, module.padding_idx)
        bias = module.bias
        if bias is not None:
            bias = self.parameter(f"{name}.bias", bias)
        if partition.vocabulary:
            return VocabParallelHead(weight, bias, self._share, self._group)
        transposed = isinstance(module, Conv1D)
        if partition.dim == int(transposed):
            # BERT's queries, keys and values read one input, which is copied once for all.
            shares_input = ".attention.self." in name
            return ColumnParallelLinear(
                weight, bias, self._group, transposed=transposed, copies_input=not shares_input
            )
        return RowParallelLinear(weight, bias, self._group, transposed=transposed)


def _finish_gpt2(model: Any, random: SplitRandom, ranks: int) -> None:
    for block in model.transformer.h:
        attention = block.attn
        attention.num_heads //= ranks
        attention.split_size //= ranks
        random.surround(attention, attention.attn_dropout)
        # Their place is inside the attention's and the feed-forward layers' forward pass, but
        # after the sum.
        attention.resid_dropout = _after_sum(attention.resid_dropout, random)
        block.mlp.dropout = _after_sum(block.mlp.dropout, random)


def _after_sum(dropout: nn.Dropout, random: SplitRandom) -> DropoutAfterSum:
    return DropoutAfterSum(dropout.p, random).train(dropout.training)


def _finish_bert(model: Any, random: SplitRandom, group: Any) -> None:
    def copy_input(attention: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (copy_to_group(inputs[0], group), *inputs[1:])

    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        attention.num_attention_heads //= dist.get_world_size(group)
        attention.all_head_size //= dist.get_world_size(group)
        random.surround(attention, attention.dropout)
        attention.register_forward_pre_hook(copy_input)


def _compute_loss_over_group(model: Any, head: VocabParallelHead, *, shifts_labels: bool) -> None:
    """Let a model compute its loss from logits that are spread over the ranks.

    With labels it returns the loss and no logits; without, it gathers the logits.

    Args:
        model: A transformers language model, whose ``forward`` is replaced by one with the same
            parameters.
        head: Its output projection.
        shifts_labels: Whether a position predicts the next one's label.
    """
    whole = model.forward
    signature = inspect.signature(whole)

    @functools.wraps(whole)
    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        labels = bound.arguments.pop("labels", None)
        others = bound.arguments.setdefault("kwargs", {})
        num_items = others.pop("num_items_in_batch", None)
        shifted = others.pop("shift_labels", None)
        by_name = others.pop("return_dict", None)
        others["return_dict"] = True
        output = whole(*bound.args, **bound.kwargs)
        entries = dict(output)
        logits = entries.pop("logits")
        if labels is None and shifted is None:
            entries["logits"] = head.gather(logits)
        else:
            if shifted is None:
                shifted = next_tokens(labels) if shifts_labels else labels
            entries["loss"] = head.loss(logits, shifted, num_items)
        output = type(output)(**entries)
        by_name = model.config.return_dict if by_name is None else by_name
        return output if by_name else output.to_tuple()

    model.forward = forward


def _check_kind(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, SPLITTABLE):
        names = ", ".join(kind.__name__ for kind in SPLITTABLE)
        reason = "the layers of this class are not known well enough to split them"
        raise ModelError("model", name, reason, f"Use one of {names}; or do not split it")
    if any(isinstance(module, VocabParallelEmbedding) for module in model.modules()):
        raise ModelError("model", name, "it has been split already", "Split it once")
    if model.config.add_cross_attention or getattr(model.config, "is_decoder", False):
        raise ModelError(
            "model",
            name,
            "it is a decoder with an encoder, or BERT as a decoder, which are not split",
            "Set add_cross_attention and is_decoder to false",
        )
    parameters = list(model.parameters())
    if any(value.is_meta or hasattr(value, "ds_id") for value in parameters):
        raise ModelError(
            "model",
            name,
            "its weights are not all here: they are on the meta device, or ZeRO-3 has cut them",
            "Load the weights, outside deepspeed.zero.Init, and split it before initialize",
        )


def _check_layers(model: Any) -> None:
    """Refuse what stands in or for a layer that is cut, such as adapters, by name."""
    encoder = model.transformer.h if isinstance(model, GPT2LMHeadModel) else model.bert.encoder
    inside = {m for m in encoder.modules() if any(True for _ in m.parameters(recurse=False))}
    for name, module in model.named_modules():
        is_cut = partition_of(f"{name}.weight") is not None
        known = (nn.Linear, Conv1D, nn.Embedding) if is_cut else (nn.LayerNorm,)
        if (is_cut or module in inside) and type(module) not in known:
            raise ModelError(
                name,
                f"{type(module).__module__}.{type(module).__qualname__}",
                "how wavemare.tensor_parallel would cut a module of this class is not known",
                "Merge adapters into the weights first, or leave tensor_parallel out",
            )


def _check_widths(config: Any, ranks: int) -> None:
    for key, width in _widths(config):
        if width % ranks:
            raise ModelError(
                f"config.{key}",
                width,
                f"it cannot be divided by the {ranks} ranks that share a model",
                "Use a number of ranks that divides it",
            )


def _widths(config: Any) -> Iterator[tuple[str, int]]:
    yield "num_attention_heads", config.num_attention_heads
    if config.model_type == "gpt2":
        inner = config.n_inner
        yield "n_inner", 4 * config.hidden_size if inner is None else inner
    else:
        yield "intermediate_size", config.intermediate_size


def _check_equal(model: nn.Module, group: Any) -> None:
    """Raise unless the sums of all weights are equal on all ranks."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else "cuda"  # NCCL alone
    with torch.no_grad():
        sums = torch.stack([value.sum(dtype=torch.float64) for value in model.parameters()])
    sums = sums.to(device)
    least, largest = sums.clone(), sums
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    different = (least != largest) & ~(least.isnan() & largest.isnan())
    if bool(different.any()):
        names = [name for name, _ in model.named_parameters()]
        first = names[int(different.nonzero()[0])]
        raise ModelError(
            "model",
            type(model).__name__,
            f"the ranks hold different weights, for example {first}",
            "Load the same weights on all ranks, or seed them alike before building the model",
        )
