# SPDX-License-Identifier: Apache-2.0
"""Parts of a split block between two sums: what segments of whole models and of stages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from wavemare.engine.waves.segments import Activations, Segment
from wavemare.models.activations import SideInputs, StageContext
from wavemare.parallel.tensor.collectives import deferred_sums
from wavemare.parallel.tensor.layers import RowParallelLinear

__all__ = [
    "Part",
    "Run",
    "add_then_norm",
    "bert_attention",
    "bert_mlp",
    "gpt2_attention",
    "gpt2_mlp",
    "named",
    "norm_of_sum",
    "other",
    "summing",
]

Run = Callable[[Activations], Activations]
Part = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""From (x, side inputs) to this rank's part of a sum."""


def summing(name: str, part: Part) -> Segment:
    """Return the segment that ends with this rank's part of a sum."""

    def run(activations: Activations) -> Activations:
        value, residual, *sides = activations
        with deferred_sums():
            return (part(value, sides), residual, *sides)

    return Segment(name, run, sums_output=True, sums_gradient=True)


def gpt2_attention(block: Any, names: Sequence[str], context: StageContext) -> Part:
    """Return the attention of a GPT-2 block, from its norm to its projection."""

    def part(value: Tensor, sides: Sequence[Tensor]) -> Tensor:
        by_name = named(names, sides)
        result: Tensor = block.attn(
            value,
            attention_mask=context.mask("full_attention", value, by_name),
            use_cache=False,
            position_ids=context.position_ids(value, by_name),
        )[0]
        return result

    return part


def gpt2_mlp(block: Any) -> Part:
    """Return the feed-forward layers of a GPT-2 block."""
    return lambda value, sides: block.mlp(value)


def add_then_norm(
    row: RowParallelLinear, dropout: nn.Module, norm: nn.Module, *, ends: bool = False
) -> Run:
    """Return what GPT-2 does between sums: the residual stream goes around the norm."""

    def run(activations: Activations) -> Activations:
        total, residual, *sides = activations
        residual = dropout(row.add_bias(total)) + residual
        return (norm(residual),) if ends else (norm(residual), residual, *sides)

    return run


def bert_attention(layer: Any, names: Sequence[str], context: StageContext) -> Part:
    """Return the attention of a BERT layer with its projection."""

    def part(value: Tensor, sides: Sequence[Tensor]) -> Tensor:
        mask = context.mask("full_attention", value, named(names, sides))
        own: Tensor = layer.attention.self(value, mask)[0]
        return layer.attention.output.dense(own)

    return part


def bert_mlp(layer: Any) -> Part:
    """Return the feed-forward layers of a BERT layer."""
    return lambda value, sides: layer.output.dense(layer.intermediate(value))


def norm_of_sum(output: Any, ending: Callable[[Tensor], Tensor] | None = None) -> Run:
    """Return what BERT does between sums: the residual stream goes through the norm.

    Args:
        output: A ``BertSelfOutput`` or ``BertOutput``.
        ending: After the last layer, from the hidden states to the head's input.
    """

    def run(activations: Activations) -> Activations:
        total, residual, *sides = activations
        hidden = output.LayerNorm(output.dropout(output.dense.add_bias(total)) + residual)
        return (ending(hidden),) if ending is not None else (hidden, other(hidden), *sides)

    return run


def named(names: Sequence[str], sides: Sequence[Tensor]) -> SideInputs:
    """Return side inputs by the names of the tensors that enter the first layer."""
    return dict(zip(names[1:], sides, strict=True))


def other(value: Tensor) -> Tensor:
    """Return the same values as a second tensor: its gradient is no part of a sum."""
    return value.view_as(value)
