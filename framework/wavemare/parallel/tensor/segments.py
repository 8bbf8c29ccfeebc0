# SPDX-License-Identifier: Apache-2.0
"""A split model as a row of segments that meet where the ranks' parts have to be summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel

from wavemare.engine.waves.segments import Activations, Segment, Segments
from wavemare.models.activations import MaskMaker, StageContext, split_batch
from wavemare.models.bert import BertEmbedding, bidirectional_mask
from wavemare.models.families import family_of
from wavemare.models.gpt2 import PositionEmbedding, causal_mask
from wavemare.models.losses import ClassificationLoss
from wavemare.parallel.tensor.blocks import (
    add_then_norm,
    bert_attention,
    bert_mlp,
    gpt2_attention,
    gpt2_mlp,
    named,
    norm_of_sum,
    other,
    summing,
)
from wavemare.parallel.tensor.collectives import deferred_sums
from wavemare.parallel.tensor.loss import next_tokens
from wavemare.parallel.tensor.state import split_embedding
from wavemare.parallel.tensor.vocabulary import VocabParallelHead

__all__ = ["tensor_segments"]

_WAVES = 2


def tensor_segments(model: Any, group: Any, inputs: Sequence[str] | None = None) -> Segments:
    """Return a split model as segments between which the executor sums over the group.

    Segments that sum (``x.attention``, ``x.mlp``: from the input of a column-parallel layer to the
    output of a row-parallel one) alternate with those in between (``x.norm``: bias, dropout,
    residual, norm). Activations are first (token ids, side inputs), then (this rank's part of
    the embedded tokens, side inputs), then (x, residual, side inputs), where x is a partial sum
    after a segment with ``sums_output``, and at last (x,), the head's input.

    The head of a language model exchanges what its loss needs by itself: three numbers for each
    position.

    Args:
        model: What :func:`split_model` has returned.
        group: The ranks over which it was split.
        inputs: Names of the batch entries that are carried, ``input_ids`` first; by default the
            model's usual ones.

    Raises:
        ModelError: The model has not been split.
        ConfigError: The model does not take such an input.
    """
    embedding = split_embedding(model)
    family = family_of(model)
    names = family.declared(inputs)
    body = _gpt2_body if isinstance(model, GPT2LMHeadModel) else _bert_body
    head, sums_gradient = _head(model)

    def split(batch: Any) -> tuple[Activations, Any]:
        first, labels = split_batch(batch, names)
        return (first,) if isinstance(first, Tensor) else first, labels

    return Segments(
        split=split,
        body=(_embed(embedding), *body(model, names)),
        head=head,
        head_sums_gradient=sums_gradient,
        group=group,
    )


def _embed(embedding: nn.Module) -> Segment:
    def run(activations: Activations) -> Activations:
        tokens, *sides = activations
        with deferred_sums():
            return (embedding(tokens), *sides)

    return Segment("embedding", run, sums_output=True)


def _gpt2_body(model: Any, names: Sequence[str]) -> list[Segment]:
    base = model.transformer
    context = _context(model, causal_mask)
    positions = PositionEmbedding(names, base.wpe, base.drop, context)

    def start(activations: Activations) -> Activations:
        embedded, *sides = activations
        residual = positions.run(embedded, named(names, sides))
        return (base.h[0].ln_1(residual), residual, *sides)

    segments = [Segment("embedding.norm", start)]
    next_norms = [*(block.ln_1 for block in base.h[1:]), base.ln_f]
    for index, (block, next_norm) in enumerate(zip(base.h, next_norms, strict=True)):
        attended = add_then_norm(block.attn.c_proj, block.attn.resid_dropout, block.ln_2)
        ends = next_norm is base.ln_f
        segments += [
            summing(f"{index}.attention", gpt2_attention(block, names, context)),
            Segment(f"{index}.attention.norm", attended),
            summing(f"{index}.mlp", gpt2_mlp(block)),
            Segment(
                f"{index}.mlp.norm",
                add_then_norm(block.mlp.c_proj, block.mlp.dropout, next_norm, ends=ends),
            ),
        ]
    return segments


def _bert_body(model: Any, names: Sequence[str]) -> list[Segment]:
    layers = model.bert.encoder.layer
    context = _context(model, bidirectional_mask)
    embedding = BertEmbedding(names, model.bert.embeddings, context)

    def start(activations: Activations) -> Activations:
        embedded, *sides = activations
        hidden = embedding.run(embedded, named(names, sides))
        return (hidden, other(hidden), *sides)

    transform = model.cls.predictions.transform if isinstance(model, BertForMaskedLM) else _same
    segments = [Segment("embedding.norm", start)]
    for index, layer in enumerate(layers):
        ending = transform if layer is layers[-1] else None
        segments += [
            summing(f"{index}.attention", bert_attention(layer, names, context)),
            Segment(f"{index}.attention.norm", norm_of_sum(layer.attention.output)),
            summing(f"{index}.mlp", bert_mlp(layer)),
            Segment(f"{index}.mlp.norm", norm_of_sum(layer.output, ending)),
        ]
    return segments


def _head(model: Any) -> tuple[Callable[[Activations, Any], Tensor], bool]:
    """Return the head, and whether the gradient of its input is a part of a sum."""
    classifies = isinstance(model, BertForSequenceClassification)
    if classifies:
        loss = ClassificationLoss(model.config.num_labels, model.config.problem_type)

        def classify(activations: Activations, labels: Any) -> Tensor:
            pooled = model.bert.pooler(activations[0])
            return loss(model.classifier(model.dropout(pooled)), labels)

        return classify, False
    shifts_labels = isinstance(model, GPT2LMHeadModel)
    projection: VocabParallelHead = model.get_output_embeddings()

    def predict(activations: Activations, labels: Any) -> Tensor:
        with deferred_sums():
            logits = projection(activations[0])
        return projection.loss(logits, next_tokens(labels) if shifts_labels else labels)

    return predict, True


def _context(model: Any, mask: MaskMaker) -> StageContext:
    context = StageContext(model.config, {"full_attention": mask})
    context.kept_batches = _WAVES
    return context


def _same(value: Tensor) -> Tensor:
    return value
