# SPDX-License-Identifier: Apache-2.0
"""A transformers model as segments: what Wavelet interleaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from wavemare.engine.waves.segments import Activations, Segment, Segments
from wavemare.errors import ModelError
from wavemare.models.activations import StageContext, split_batch
from wavemare.models.families import family_of
from wavemare.models.layers import Head, PipelineLayer, TiedHead
from wavemare.models.proof import prove
from wavemare.parallel.tensor.partition import is_split
from wavemare.parallel.tensor.segments import tensor_segments

__all__ = ["segments_of"]

_WAVES = 2


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
