# SPDX-License-Identifier: Apache-2.0
"""GPT's weights by three names: transformers', Megatron's, and a Megatron rank's share of them.

A whole model is a flat dictionary by Megatron's current names (``encoder.layers.0...``). Its fused
query, key and value are ordered as in checkpoint version 2 and later: for each head its query rows,
key rows, value rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum

import torch
from torch import Tensor

from wavemare.errors import ModelError

State = dict[str, Tensor]

EMBEDDING = "embedding.word_embeddings.weight"
POSITIONS = "embedding.position_embeddings.weight"
HEAD = "output_layer.weight"
_NEWEST = 2  # from this version on the order of query, key and value is one


class Cut(Enum):
    """How tensor parallelism shares a weight: not, by rows, by columns, by heads."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    HEADS = "heads"


_OUTSIDE = (
    ("transformer.wte.weight", EMBEDDING, Cut.ROWS),
    ("transformer.wpe.weight", POSITIONS, Cut.WHOLE),
    ("transformer.ln_f.weight", "encoder.final_layernorm.weight", Cut.WHOLE),
    ("transformer.ln_f.bias", "encoder.final_layernorm.bias", Cut.WHOLE),
    ("lm_head.weight", HEAD, Cut.ROWS),
)
_IN_LAYERS = (
    ("ln_1", "input_layernorm", Cut.WHOLE, Cut.WHOLE),
    ("attn.c_attn", "self_attention.query_key_value", Cut.HEADS, Cut.HEADS),
    ("attn.c_proj", "self_attention.dense", Cut.COLUMNS, Cut.WHOLE),
    ("ln_2", "post_attention_layernorm", Cut.WHOLE, Cut.WHOLE),
    ("mlp.c_fc", "mlp.dense_h_to_4h", Cut.ROWS, Cut.ROWS),
    ("mlp.c_proj", "mlp.dense_4h_to_h", Cut.COLUMNS, Cut.WHOLE),
)
"""Names of a part for transformers and for Megatron, and the cuts of its weight and its bias."""


def _pairs(layers: int) -> Iterator[tuple[str, str, Cut]]:
    """Yield transformers' name, Megatron's and the cut of each weight."""
    yield from _OUTSIDE
    for layer in range(layers):
        for theirs, ours, weight, bias in _IN_LAYERS:
            names = f"transformer.h.{layer}.{theirs}", f"encoder.layers.{layer}.{ours}"
            yield f"{names[0]}.weight", f"{names[1]}.weight", weight
            yield f"{names[0]}.bias", f"{names[1]}.bias", bias


def from_transformers(
    state: Mapping[str, Tensor], layers: int, heads: int, *, tied: bool = True
) -> State:
    """Return a whole model of transformers by Megatron's names.

    Args:
        state: Its state dict.
        layers: Transformer layers.
        heads: Attention heads.
        tied: Whether the head is the embedding; then it is left out.

    Raises:
        ModelError: It has a weight that Megatron has no place for.
    """
    left = dict(state)
    found: State = {}
    for theirs, ours, cut in _pairs(layers):
        if theirs in left:
            weight = _turned(left.pop(theirs), ours)
            found[ours] = reorder_qkv(weight, heads, 0, _NEWEST) if cut is Cut.HEADS else weight
    if tied:
        found.pop(HEAD, None)
    _check_none_left(left, "a Megatron checkpoint")
    return found


def to_transformers(whole: Mapping[str, Tensor], heads: int) -> State:
    """Return a whole model by transformers' names, a tied head included."""
    state: State = {}
    for theirs, ours, cut in _pairs(num_layers(whole)):
        if ours in whole:
            weight = whole[ours]
            weight = reorder_qkv(weight, heads, _NEWEST, 0) if cut is Cut.HEADS else weight
            state[theirs] = _turned(weight, ours)
    state.setdefault("lm_head.weight", state["transformer.wte.weight"])
    return state


def _turned(weight: Tensor, name: str) -> Tensor:
    # GPT-2's layers in transformers multiply from the other side.
    is_matrix = name.startswith("encoder.layers.") and weight.dim() > 1
    return weight.T.contiguous() if is_matrix else weight


def _check_none_left(left: Mapping[str, Tensor], where: str) -> None:
    if left:
        names = ", ".join(sorted(left)[:5])
        reason = f"{where} has no place for these {len(left)} weights"
        raise ModelError("weights", names, reason, "Convert GPT-2")


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
    """Repeat the last token's weights until there are ``rows``, as Megatron's tools do."""
    padded = dict(whole)
    for name in (EMBEDDING, HEAD):
        if name in padded:
            weight = padded[name]
            padded[name] = torch.cat([weight, weight[-1:].expand(rows - len(weight), -1)])
    return padded


def split(whole: Mapping[str, Tensor], heads: int, parts: int, version: int) -> list[State]:
    """Share a padded model out over tensor-parallel ranks, in the order of a checkpoint version.

    Args:
        whole: Weights by Megatron's names, queries, keys and values in the newest order.
        heads: Attention heads.
        parts: Number of ranks.
        version: Of the checkpoint, which decides that order (see `reorder_qkv`).

    Returns:
        Each rank's weights, which share no memory with ``whole``.

    Raises:
        ModelError: Heads, layers or tokens cannot be divided by the number of ranks.
    """
    cuts = {ours: cut for _, ours, cut in _pairs(num_layers(whole))}
    shares: list[State] = [{} for _ in range(parts)]
    if heads % parts:
        reason = f"{heads} heads cannot be shared by {parts} ranks"
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
            reorders = cut is Cut.HEADS
            own = reorder_qkv(piece, heads // parts, _NEWEST, version) if reorders else piece
            # A view would be saved with all that it shows a part of.
            share[name] = own.clone()
    return shares


def merge(shares: Sequence[Mapping[str, Tensor]], heads: int, version: int) -> State:
    """Put the shares of tensor-parallel ranks together; the inverse of `split`.

    Args:
        shares: Each rank's weights by Megatron's names.
        heads: Attention heads.
        version: Of the checkpoint.

    Raises:
        ModelError: GPT-2 lacks a weight, ranks have different weights, or they differ in one that
            all hold alike.
    """
    cuts = {ours: cut for _, ours, cut in _pairs(num_layers(shares[0]))}
    names = {name: weight for share in shares for name, weight in share.items()}
    _check_none_left({n: w for n, w in names.items() if n not in cuts}, "GPT-2 of transformers")
    whole: State = {}
    for name in sorted(names):
        if len({share[name].shape if name in share else None for share in shares}) > 1:
            reason = "tensor-parallel ranks do not all hold it, or not in one shape"
            raise ModelError("weights", name, reason, "Use an undamaged checkpoint")
        pieces = [share[name] for share in shares]
        cut = cuts[name]
        if cut is Cut.WHOLE:
            if any(not torch.equal(piece, pieces[0]) for piece in pieces[1:]):
                reason = "tensor-parallel ranks hold different values where all hold the same"
                raise ModelError("weights", name, reason, "Use an undamaged checkpoint")
            whole[name] = pieces[0]
            continue
        if cut is Cut.HEADS:
            pieces = [reorder_qkv(p, heads // len(shares), version, _NEWEST) for p in pieces]
        whole[name] = torch.cat(pieces, dim=1 if cut is Cut.COLUMNS else 0)
    return whole


def needed(whole: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a weight that every GPT has.

    Raises:
        ModelError: This one does not.
    """
    if name not in whole:
        reason = "the checkpoint lacks it"
        raise ModelError("weights", name, reason, "Give GPT with learned positions")
    return whole[name]


def num_layers(whole: Mapping[str, Tensor]) -> int:
    """Return the number of transformer layers."""
    return len({name.split(".")[2] for name in whole if name.startswith("encoder.layers.")})
