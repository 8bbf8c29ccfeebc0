# SPDX-License-Identifier: Apache-2.0
"""A stage of a split model as segments that meet where the ranks' parts have to be summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from wavemare.engine.waves.segments import Activations, Segment, Segments
from wavemare.models.bert import BertLayerLayer
from wavemare.models.gpt2 import GPT2BlockLayer
from wavemare.models.layers import Head, PipelineLayer, TokenEmbedding
from wavemare.models.losses import Loss
from wavemare.models.split import SplitTiedHead
from wavemare.parallel.tensor.blocks import (
    Run,
    add_then_norm,
    bert_attention,
    bert_mlp,
    gpt2_attention,
    gpt2_mlp,
    norm_of_sum,
    other,
    summing,
)
from wavemare.parallel.tensor.collectives import deferred_sums

__all__ = ["stage_segments"]

_PASSES = 2


def stage_segments(
    layers: Sequence[PipelineLayer], group: Any, *, first: bool, loss: Loss | None
) -> Segments:
    """Return the layers of a stage as segments; carries at its ends are the stage's messages.

    Args:
        layers: Of the stage, in their order.
        group: The ranks over which they are split.
        first: Whether the stage is the pipeline's first, which gets token ids.
        loss: Of (logits, labels) on the last stage, else None.
    """
    for layer in layers:
        context = getattr(layer, "context", None)
        if context is not None:
            context.kept_batches = _PASSES
    projects = loss is not None and isinstance(layers[-1], SplitTiedHead | Head)
    body = layers if loss is None else layers[:-1]
    return Segments(
        split=lambda batch: batch,
        body=tuple(segment for place, layer in enumerate(body) for segment in _of(layer, place)),
        head=None if loss is None else _head(layers[-1], loss),
        head_sums_gradient=projects,
        continues=not first,
        group=group,
    )


def _of(layer: PipelineLayer, place: int) -> Iterator[Segment]:
    """Yield the segments of a layer, which is at a place of its stage."""
    if isinstance(layer, GPT2BlockLayer):
        yield from _of_gpt2(layer, f"{place}")
    elif isinstance(layer, BertLayerLayer):
        yield from _of_bert(layer, f"{place}")
    elif isinstance(layer, TokenEmbedding):
        yield Segment("embedding", _deferred(layer), sums_output=True)
    else:
        yield Segment(f"{place}", _whole(layer))


def _of_gpt2(layer: GPT2BlockLayer, name: str) -> Iterator[Segment]:
    block: Any = layer.block

    def start(activations: Activations) -> Activations:
        hidden, *sides = activations
        return (block.ln_1(hidden), other(hidden), *sides)

    def end(activations: Activations) -> Activations:
        total, residual, *sides = activations
        return (block.mlp.dropout(block.mlp.c_proj.add_bias(total)) + residual, *sides)

    attended = add_then_norm(block.attn.c_proj, block.attn.resid_dropout, block.ln_2)
    yield Segment(f"{name}.start", start)
    yield summing(f"{name}.attention", gpt2_attention(block, layer.inputs, layer.context))
    yield Segment(f"{name}.attention.norm", attended)
    yield summing(f"{name}.mlp", gpt2_mlp(block))
    yield Segment(f"{name}.end", end)


def _of_bert(layer: BertLayerLayer, name: str) -> Iterator[Segment]:
    block: Any = layer.block
    normed = norm_of_sum(block.output)

    def start(activations: Activations) -> Activations:
        hidden, *sides = activations
        return (other(hidden), other(hidden), *sides)

    def end(activations: Activations) -> Activations:
        hidden, _, *sides = normed(activations)
        return (hidden, *sides)

    yield Segment(f"{name}.start", start)
    yield summing(f"{name}.attention", bert_attention(block, layer.inputs, layer.context))
    yield Segment(f"{name}.attention.norm", norm_of_sum(block.attention.output))
    yield summing(f"{name}.mlp", bert_mlp(block))
    yield Segment(f"{name}.end", end)


def _head(layer: PipelineLayer, loss: Loss) -> Callable[[Activations, Any], Tensor]:
    run = _deferred(layer)
    return lambda activations, labels: loss(run(activations)[0], labels)


def _whole(layer: PipelineLayer) -> Run:
    def run(activations: Activations) -> Activations:
        result = layer(activations[0] if len(activations) == 1 else activations)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    return run


def _deferred(layer: PipelineLayer) -> Run:
    whole = _whole(layer)

    def run(activations: Activations) -> Activations:
        with deferred_sums():
            return whole(activations)

    return run
