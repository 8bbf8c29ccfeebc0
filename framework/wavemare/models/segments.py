# SPDX-License-Identifier: Apache-2.0
"""A transformers model as segments: what Wavelet interleaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from wavemare.engine.waves.segments import Activations, Segment, Segments
from wavemare.errors import ModelError
from wavemare.models.activations import SideInputs, StageContext, split_batch
from wavemare.models.chains import BertLayerLayer, GPT2BlockLayer
from wavemare.models.families import Loss, SplitTiedHead, family_of, split_chain, split_loss
from wavemare.models.layers import Head, PipelineLayer, TiedHead, TokenEmbedding
from wavemare.models.proof import prove
from wavemare.parallel.tensor.layers import deferred_sums
from wavemare.parallel.tensor.partition import is_split, split_embedding

_WAVES = 2
_Run = Callable[[Activations], Activations]


def segments_of(model: Any, *, inputs: Sequence[str] | None = None) -> Segments:
    """Return a model's segments: embedding, blocks, and head with loss; they run its own modules.

    Args:
        model: A transformers model of a kind that `to_pipeline` takes, or a module with a method
            ``wave_segments()`` that returns `Segments`.
        inputs: Batch entries that travel with the hidden states, as for `to_pipeline`.

    Raises:
        ModelError: The model cannot be taken apart, or its parts do not compute what it computes.
        ConfigError: The inputs do not fit the model.
    """
    own = getattr(model, "wave_segments", None)
    if own is not None:
        segments: Segments = own()
        return segments
    if is_split(model):
        return tensor_segments(model, inputs)
    family = family_of(model)
    declared = family.declared(inputs)
    chain = family.chain(model, declared)
    chain[-1] = _with_own_module(model, chain[-1])
    loss = family.loss(model)
    prove(model, chain, declared, loss)
    first, last = _blocks(model, chain)
    for layer in chain:
        context = getattr(layer, "context", None)
        if isinstance(context, StageContext):
            context.kept_batches = _WAVES

    def split(batch: Any) -> tuple[Activations, Any]:
        activations, labels = split_batch(batch, declared)
        return _tuple(activations), labels

    after = chain[last:]
    return Segments(
        split=split,
        body=(
            Segment("embedding", _run(chain[:first])),
            *(
                Segment(f"block {number}", _run([layer]))
                for number, layer in enumerate(chain[first:last])
            ),
        ),
        head=lambda activations, labels: loss(_run(after)(activations)[0], labels),
    )


def _with_own_module(model: Any, layer: PipelineLayer) -> PipelineLayer:
    """Return a layer that calls the model's head: ZeRO-3 gathers the weights of modules it sees."""
    head = model.get_output_embeddings() if isinstance(layer, TiedHead) else None
    return Head(layer.inputs, head) if head is not None else layer


def _blocks(model: Any, chain: Sequence[PipelineLayer]) -> tuple[int, int]:
    """Return the first block's place in a chain and that behind the last one."""
    places = [place for place, layer in enumerate(chain) if layer.is_block]
    if not places:
        reason = "it has no blocks that could be interleaved"
        raise ModelError("model", type(model).__name__, reason, "Train it without wavelet")
    return places[0], places[-1] + 1


def _run(layers: Sequence[PipelineLayer]) -> Callable[[Activations], Activations]:
    def run(activations: Activations) -> Activations:
        result: Tensor | Activations = activations
        for layer in layers:
            result = layer(result)
        return _tuple(result)

    return run


def _tuple(activations: Tensor | Activations) -> Activations:
    return (activations,) if isinstance(activations, Tensor) else tuple(activations)


def tensor_segments(model: Any, inputs: Sequence[str] | None = None) -> Segments:
    """Return a split model as segments between which the executor sums over the ranks.

    Segments that sum go from the input of a column-parallel layer to the output of a row-parallel
    one. They alternate with those in between: bias, dropout, residual, norm. Activations are first
    (token ids, side inputs), then (this rank's part of the embedded tokens, side inputs), then
    (x, residual, side inputs), where x is a partial sum after a segment with ``sums_output``.

    The head of a language model exchanges what its loss needs by itself: three numbers for each
    position.

    Args:
        model: What `split_model` has returned.
        inputs: Names of the batch entries that are carried, ``input_ids`` first; by default the
            model's usual ones.

    Raises:
        ModelError: The model has not been split.
        ConfigError: The model does not take such an input.
    """
    group = split_embedding(model).group
    family = family_of(model)
    names = family.declared(inputs)
    chain = split_chain(family.chain(model, names))
    loss = split_loss(model, family.loss(model))

    def split(batch: Any) -> tuple[Activations, Any]:
        first, labels = split_batch(batch, names)
        return (first,) if isinstance(first, Tensor) else first, labels

    return replace(stage_segments(chain, group, first=True, loss=loss), split=split)


def stage_segments(
    layers: Sequence[PipelineLayer], group: Any, *, first: bool, loss: Loss | None
) -> Segments:
    """Return the layers of a stage as segments; the activations at its ends are its messages.

    Args:
        layers: Of the stage, in their order.
        group: The ranks over which they are split.
        first: Whether the stage is the pipeline's first, which gets token ids.
        loss: Of (logits, labels) on the last stage, else None.
    """
    for layer in layers:
        context = getattr(layer, "context", None)
        if context is not None:
            context.kept_batches = _WAVES
    projects = loss is not None and isinstance(layers[-1], SplitTiedHead | Head)
    body = layers if loss is None else layers[:-1]
    return Segments(
        split=lambda batch: batch,
        body=_joined(segment for place, layer in enumerate(body) for segment in _of(layer, place)),
        head=None if loss is None else _head(layers[-1], loss),
        head_sums_gradient=projects,
        continues=not first,
        group=group,
    )


def _joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Make one segment of two between which nothing is summed."""
    joined: list[Segment] = []
    for segment in segments:
        before = joined[-1] if joined else None
        if before is None or before.sums_output or segment.sums_gradient:
            joined.append(segment)
        else:
            run, sums_output = _then(before.run, segment.run), segment.sums_output
            joined[-1] = replace(before, run=run, sums_output=sums_output)
    return tuple(joined)


def _then(first: _Run, second: _Run) -> _Run:
    return lambda activations: second(first(activations))


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
    """Yield a block's segments: the residual stream goes around the norms."""
    block: Any = layer.block
    attention, mlp = block.attn, block.mlp

    def start(activations: Activations) -> Activations:
        hidden, *sides = activations
        return (block.ln_1(hidden), _other(hidden), *sides)

    def attend(value: Tensor, sides: SideInputs) -> Tensor:
        result: Tensor = attention(
            value,
            attention_mask=layer.context.mask("full_attention", value, sides),
            use_cache=False,
            position_ids=layer.context.position_ids(value, sides),
        )[0]
        return result

    def middle(activations: Activations) -> Activations:
        total, residual, *sides = activations
        residual = attention.resid_dropout(attention.c_proj.add_bias(total)) + residual
        return (block.ln_2(residual), residual, *sides)

    def end(activations: Activations) -> Activations:
        total, residual, *sides = activations
        return (mlp.dropout(mlp.c_proj.add_bias(total)) + residual, *sides)

    yield Segment(f"{name}.start", start)
    yield _summing(f"{name}.attention", layer.inputs, attend)
    yield Segment(f"{name}.attention.norm", middle)
    yield _summing(f"{name}.mlp", layer.inputs, lambda value, sides: mlp(value))
    yield Segment(f"{name}.end", end)


def _of_bert(layer: BertLayerLayer, name: str) -> Iterator[Segment]:
    """Yield a layer's segments: the residual stream goes through the norms."""
    block: Any = layer.block
    attention, mlp = block.attention, block.output

    def start(activations: Activations) -> Activations:
        hidden, *sides = activations
        return (_other(hidden), _other(hidden), *sides)

    def attend(value: Tensor, sides: SideInputs) -> Tensor:
        own = attention.self(value, layer.context.mask("full_attention", value, sides))[0]
        result: Tensor = attention.output.dense(own)
        return result

    def normed(output: Any, total: Tensor, residual: Tensor) -> Tensor:
        result: Tensor = output.LayerNorm(output.dropout(output.dense.add_bias(total)) + residual)
        return result

    def middle(activations: Activations) -> Activations:
        total, residual, *sides = activations
        hidden = normed(attention.output, total, residual)
        return (hidden, _other(hidden), *sides)

    def end(activations: Activations) -> Activations:
        total, residual, *sides = activations
        return (normed(mlp, total, residual), *sides)

    yield Segment(f"{name}.start", start)
    yield _summing(f"{name}.attention", layer.inputs, attend)
    yield Segment(f"{name}.attention.norm", middle)
    yield _summing(
        f"{name}.mlp", layer.inputs, lambda value, sides: mlp.dense(block.intermediate(value))
    )
    yield Segment(f"{name}.end", end)


def _summing(
    name: str, inputs: Sequence[str], part: Callable[[Tensor, SideInputs], Tensor]
) -> Segment:
    """Return the segment of (x, residual, sides) that ends with this rank's part of a sum."""

    def run(activations: Activations) -> Activations:
        value, residual, *sides = activations
        with deferred_sums():
            return (part(value, dict(zip(inputs[1:], sides, strict=True))), residual, *sides)

    return Segment(name, run, sums_output=True, sums_gradient=True)


def _other(value: Tensor) -> Tensor:
    """Return the same values as a second tensor: its gradient is no part of a sum."""
    return value.view_as(value)


def _head(layer: PipelineLayer, loss: Loss) -> Callable[[Activations, Any], Tensor]:
    run = _deferred(layer)
    return lambda activations, labels: loss(run(activations)[0], labels)


def _whole(layer: PipelineLayer) -> _Run:
    def run(activations: Activations) -> Activations:
        result = layer(activations[0] if len(activations) == 1 else activations)
        return (result,) if isinstance(result, Tensor) else tuple(result)

    return run


def _deferred(layer: PipelineLayer) -> _Run:
    whole = _whole(layer)

    def run(activations: Activations) -> Activations:
        with deferred_sums():
            return whole(activations)

    return run
