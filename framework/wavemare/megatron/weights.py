# SPDX-License-Identifier: Apache-2.0
"""Weights by three names: transformers', Megatron's, and a Megatron rank's share of them.

A whole model is a flat dictionary by Megatron's names of today (``encoder.layers.0...``), its fused
query, key and value ordered as in checkpoint version 2 and later: for each head its query rows, key
rows, value rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ModelError

__all__ = [
    "EMBEDDING",
    "HEAD",
    "Cut",
    "Shape",
    "from_transformers",
    "merge",
    "needed",
    "pad_vocabulary",
    "reorder_qkv",
    "split",
    "to_transformers",
]

State = dict[str, Tensor]

EMBEDDING = "embedding.word_embeddings.weight"
HEAD = "output_layer.weight"
_NEWEST = 2  # from this version on the order of query, key and value is one


class Cut(Enum):
    """How tensor parallelism shares a weight: not, by rows, by columns, by heads, by tokens."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    HEADS = "heads"
    TOKENS = "tokens"


@dataclass(frozen=True)
class Shape:
    """What decides the form of the weights.

    Attributes:
        family: ``gpt2`` or ``megatron-bert``.
        layers: Transformer layers.
        heads: Attention heads.
        vocab_size: Tokens, without padding.
    """

    family: str
    layers: int
    heads: int
    vocab_size: int


_SHARED = (
    ("input_layernorm", Cut.WHOLE, Cut.WHOLE),
    ("self_attention.query_key_value", Cut.HEADS, Cut.HEADS),
    ("self_attention.dense", Cut.COLUMNS, Cut.WHOLE),
    ("post_attention_layernorm", Cut.WHOLE, Cut.WHOLE),
    ("mlp.dense_h_to_4h", Cut.ROWS, Cut.ROWS),
    ("mlp.dense_4h_to_h", Cut.COLUMNS, Cut.WHOLE),
)
_IN_LAYERS = {
    "gpt2": ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"),
    "megatron-bert": (
        "attention.ln",
        "attention.self.{}",
        "attention.output.dense",
        "ln",
        "intermediate.dense",
        "output.dense",
    ),
}
_LAYER = {"gpt2": "transformer.h.{}.", "megatron-bert": "bert.encoder.layer.{}."}
_OUTSIDE: dict[str, tuple[tuple[str, str, Cut], ...]] = {
    "gpt2": (
        ("transformer.wte.weight", EMBEDDING, Cut.TOKENS),
        ("transformer.wpe.weight", "embedding.position_embeddings.weight", Cut.WHOLE),
        ("transformer.ln_f.weight", "encoder.final_layernorm.weight", Cut.WHOLE),
        ("transformer.ln_f.bias", "encoder.final_layernorm.bias", Cut.WHOLE),
        ("lm_head.weight", HEAD, Cut.TOKENS),
    ),
    "megatron-bert": (
        ("bert.embeddings.word_embeddings.weight", EMBEDDING, Cut.TOKENS),
        (
            "bert.embeddings.position_embeddings.weight",
            "embedding.position_embeddings.weight",
            Cut.WHOLE,
        ),
        (
            "bert.embeddings.token_type_embeddings.weight",
            "embedding.tokentype_embeddings.weight",
            Cut.WHOLE,
        ),
        ("bert.encoder.ln.weight", "encoder.final_layernorm.weight", Cut.WHOLE),
        ("bert.encoder.ln.bias", "encoder.final_layernorm.bias", Cut.WHOLE),
        ("bert.pooler.dense.weight", "pooler.dense.weight", Cut.WHOLE),
        ("bert.pooler.dense.bias", "pooler.dense.bias", Cut.WHOLE),
        ("cls.predictions.transform.dense.weight", "lm_head.dense.weight", Cut.WHOLE),
        ("cls.predictions.transform.dense.bias", "lm_head.dense.bias", Cut.WHOLE),
        ("cls.predictions.transform.LayerNorm.weight", "lm_head.layernorm.weight", Cut.WHOLE),
        ("cls.predictions.transform.LayerNorm.bias", "lm_head.layernorm.bias", Cut.WHOLE),
        ("cls.predictions.bias", "lm_head.bias", Cut.TOKENS),
        ("cls.seq_relationship.weight", "binary_head.weight", Cut.WHOLE),
        ("cls.seq_relationship.bias", "binary_head.bias", Cut.WHOLE),
    ),
}


def _pairs(shape: Shape) -> Iterator[tuple[str, str, Cut]]:
    """Yield transformers' name, Megatron's and the cut of each weight."""
    yield from _OUTSIDE[shape.family]
    for layer in range(shape.layers):
        prefix = _LAYER[shape.family].format(layer)
        for theirs, (ours, weight, bias) in zip(_IN_LAYERS[shape.family], _SHARED, strict=True):
            yield f"{prefix}{theirs}.weight", f"encoder.layers.{layer}.{ours}.weight", weight
            yield f"{prefix}{theirs}.bias", f"encoder.layers.{layer}.{ours}.bias", bias


def from_transformers(state: Mapping[str, Tensor], shape: Shape, *, tied: bool = True) -> State:
    """Return a whole model of transformers by Megatron's names.

    Args:
        state: Its state dict.
        shape: Of the model.
        tied: Whether the head is the embedding; then it is left out.

    Raises:
        ModelError: It has a weight that Megatron has no place for.
    """
    left = dict(state)
    found: State = {}
    for theirs, ours, cut in _pairs(shape):
        if cut is Cut.HEADS:
            fused = _take_fused(left, theirs, shape)
            if fused is not None:
                found[ours] = reorder_qkv(fused, shape.heads, 0, _NEWEST)
        elif theirs in left:
            found[ours] = _turned(left.pop(theirs), ours, shape)
    if tied:
        found.pop(HEAD, None)
        for copy in ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"):
            left.pop(copy, None)  # tied to the embedding, and to cls.predictions.bias
    _check_none_left(left, "a Megatron checkpoint")
    return found


def to_transformers(whole: Mapping[str, Tensor], shape: Shape) -> State:
    """Return a whole model by transformers' names, tied copies included.

    Raises:
        ModelError: It has a weight that the family lacks.
    """
    left = dict(whole)
    state: State = {}
    for theirs, ours, cut in _pairs(shape):
        if ours not in left:
            continue
        weight = left.pop(ours)
        if cut is not Cut.HEADS:
            state[theirs] = _turned(weight, ours, shape)
            continue
        fused = reorder_qkv(weight, shape.heads, _NEWEST, 0)
        if shape.family == "gpt2":
            state[theirs] = _turned(fused, ours, shape)
        else:
            names = (theirs.format(name) for name in ("query", "key", "value"))
            state |= zip(names, (part.contiguous() for part in fused.chunk(3)), strict=True)
    _check_none_left(left, f"transformers' {shape.family}")
    if shape.family == "gpt2":
        state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    elif "cls.predictions.bias" in state:
        state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
        state["cls.predictions.decoder.bias"] = state["cls.predictions.bias"]
    return state


def _take_fused(left: State, theirs: str, shape: Shape) -> Tensor | None:
    """Take query, key and value, one over the other."""
    if shape.family == "gpt2":
        return _turned(left.pop(theirs), "layers", shape) if theirs in left else None
    names = [theirs.format(name) for name in ("query", "key", "value")]
    return torch.cat([left.pop(name) for name in names]) if names[0] in left else None


def _turned(weight: Tensor, name: str, shape: Shape) -> Tensor:
    # GPT-2's layers in transformers multiply from the other side.
    if shape.family == "gpt2" and "layers" in name and weight.dim() == 2:  # noqa: PLR2004
        return weight.T.contiguous()
    return weight


def _check_none_left(left: Mapping[str, Tensor], where: str) -> None:
    if left:
        names = ", ".join(sorted(left)[:5]) + (", ..." if len(left) > 5 else "")  # noqa: PLR2004
        reason = f"{where} has no place for these {len(left)} weights"
        raise ModelError("weights", names, reason, "Convert GPT-2 or Megatron's BERT")


def reorder_qkv(fused: Tensor, heads: int, source: int, target: int) -> Tensor:
    """Reorder the rows of a fused query, key and value from one checkpoint version to another.

    Version 0 has all queries, all keys, all values; version 1 for each head and each of its
    dimensions the three side by side; from version 2 on each head has its queries, keys, values.

    Args:
        fused: [3 * hidden] or [3 * hidden, ...], of one tensor-parallel rank.
        heads: Attention heads in it.
        source: Checkpoint version that the order is of.
        target: The one to return.
    """
    rest = fused.shape[1:]
    rows = fused.shape[0] // (3 * heads)
    # To [heads, 3, rows] and back; -1 stands for what follows the three.
    forms = {0: (3, heads, rows), 1: (heads, rows, 3), 2: (heads, 3, rows)}
    turns = {0: (1, 0, 2), 1: (0, 2, 1), 2: (0, 1, 2)}
    source, target = min(source, _NEWEST), min(target, _NEWEST)
    after = tuple(range(3, 3 + len(rest)))
    newest = fused.reshape(*forms[source], *rest).permute(*turns[source], *after)
    # Each of these turns is its own inverse.
    return newest.permute(*turns[target], *after).reshape(fused.shape).contiguous()


def pad_vocabulary(whole: Mapping[str, Tensor], rows: int) -> State:
    """Repeat the last row of the weights by token until there are ``rows``, as Megatron's tools do.

    A bias of the head gets zeros, as in a new model.
    """
    padded = dict(whole)
    for name in (EMBEDDING, HEAD, "lm_head.bias"):
        if name in padded:
            weight = padded[name]
            fill = weight[-1:] if weight.dim() > 1 else weight.new_zeros(1)
            more = fill.expand(rows - weight.shape[0], *weight.shape[1:])
            padded[name] = torch.cat([weight, more])
    return padded


def _cuts(shape: Shape) -> dict[str, Cut]:
    return {ours: cut for _, ours, cut in _pairs(shape)}


def split(whole: Mapping[str, Tensor], shape: Shape, parts: int, version: int) -> list[State]:
    """Share a padded model out over tensor-parallel ranks, in the order of a checkpoint version.

    Args:
        whole: Weights by Megatron's names, queries, keys and values in the newest order.
        shape: Of the model.
        parts: Number of ranks.
        version: Of the checkpoint, which decides that order (see `reorder_qkv`).

    Returns:
        Each rank's weights, which share no memory with ``whole``.

    Raises:
        ModelError: Heads, layers or tokens cannot be divided by the number of ranks.
    """
    cuts = _cuts(shape)
    shares: list[State] = [{} for _ in range(parts)]
    if shape.heads % parts:
        reason = f"{shape.heads} heads cannot be shared by {parts} ranks"
        raise ModelError("--tensor-parallel", parts, reason, "Give a divisor")
    for name, weight in whole.items():
        cut = cuts[name]
        axis = 1 if cut is Cut.COLUMNS else 0
        if cut is not Cut.WHOLE and weight.shape[axis] % parts:
            reason = f"{name} has {weight.shape[axis]} rows, which {parts} ranks cannot share"
            raise ModelError("--tensor-parallel", parts, reason, "Give a divisor")
        pieces: Sequence[Tensor] = [weight] * parts
        if cut is not Cut.WHOLE:
            pieces = weight.chunk(parts, dim=axis)
        for share, piece in zip(shares, pieces, strict=True):
            heads = shape.heads // parts
            own = reorder_qkv(piece, heads, _NEWEST, version) if cut is Cut.HEADS else piece
            # A view would be saved with all that it shows a part of.
            share[name] = own.clone()
    return shares


def merge(shares: Sequence[Mapping[str, Tensor]], shape: Shape, version: int) -> State:
    """Put the shares of tensor-parallel ranks together; the inverse of `split`.

    Args:
        shares: Each rank's weights by Megatron's names.
        shape: Of the model.
        version: Of the checkpoint.

    Raises:
        ModelError: Ranks have different weights, or differ in one that all hold alike.
    """
    cuts = _cuts(shape)
    whole: State = {}
    for name in sorted({name for share in shares for name in share}):
        if len({share[name].shape if name in share else None for share in shares}) > 1:
            reason = "tensor-parallel ranks do not all hold it, or not in one shape"
            raise ModelError("weights", name, reason, "Use an undamaged checkpoint")
        pieces = [share[name] for share in shares]
        cut = cuts.get(name, Cut.WHOLE)
        if cut is Cut.WHOLE:
            if any(not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                reason = "tensor-parallel ranks hold different values where all hold the same"
                raise ModelError("weights", name, reason, "Use an undamaged checkpoint")
            whole[name] = pieces[0]
            continue
        if cut is Cut.HEADS:
            each = shape.heads // len(shares)
            pieces = [reorder_qkv(piece, each, version, _NEWEST) for piece in pieces]
        whole[name] = torch.cat(pieces, dim=1 if cut is Cut.COLUMNS else 0)
    return whole


def needed(whole: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a weight that every model of its family has.

    Raises:
        ModelError: This one does not.
    """
    if name not in whole:
        reason = "the checkpoint lacks it"
        raise ModelError("weights", name, reason, "Give GPT or BERT with learned positions")
    return whole[name]


def size_of(whole: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return what weights alone say of a model's size, by the names of Megatron's arguments.

    Raises:
        ModelError: An embedding is missing.
    """
    positions = needed(whole, "embedding.position_embeddings.weight")
    layers = {int(name.split(".")[2]) for name in whole if name.startswith("encoder.layers.")}
    return {
        "num_layers": len(layers),
        "hidden_size": needed(whole, EMBEDDING).shape[1],
        "padded_vocab_size": whole[EMBEDDING].shape[0],
        "max_position_embeddings": positions.shape[0],
    }
