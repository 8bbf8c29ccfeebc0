"""A split model as a row of segments that meet where the ranks' parts have to be summed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForSequenceClassification, GPT2LMHeadModel
from transformers.masking_utils import create_bidirectional_mask

from wavemare.engine.segments import Carry, Segment, Segments
from wavemare.models.batches import split_batch
from wavemare.models.bert import BertEmbedding
from wavemare.models.carry import MaskMaker, SideInputs, StageContext
from wavemare.models.families import family_of
from wavemare.models.gpt2 import PositionEmbedding, causal_mask
from wavemare.models.losses import ClassificationLoss
from wavemare.parallel.tensor.collectives import deferred_sums
from wavemare.parallel.tensor.layers import RowParallelLinear
from wavemare.parallel.tensor.loss import next_tokens
from wavemare.parallel.tensor.state import split_embedding
from wavemare.parallel.tensor.vocabulary import VocabParallelHead

__all__ = ["tensor_segments"]

_WAVES = 2

_Run = Callable[[Carry], Carry]
_Part = Callable[[Tensor, Sequence[Tensor]], Tensor]
"""From (x, side inputs) to this rank's part of a sum."""


def tensor_segments(model: Any, group: Any, inputs: Sequence[str] | None = None) -> Segments:
    """Return a split model as segments between which the executor sums over the group.

    Segments that sum (``x.attention``, ``x.mlp``: from the input of a column-parallel layer to the
    output of a row-parallel one) alternate with those in between (``x.norm``: bias, dropout,
    residual, norm). The carry is first (token ids, side inputs), then (this rank's part of the
    embedded tokens, side inputs), then (x, residual, side inputs), where x is a part of a sum after
    a segment with ``sums_output``, and at last (x,), the head's input.

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

    def split(batch: Any) -> tuple[Carry, Any]:
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
    def run(carry: Carry) -> Carry:
        tokens, *sides = carry
        with deferred_sums():
            return (embedding(tokens), *sides)

    return Segment("embedding", run, sums_output=True)


def _summing(name: str, part: _Part) -> Segment:
    """Return the segment that ends with this rank's part of a sum."""

    def run(carry: Carry) -> Carry:
        value, residual, *sides = carry
        with deferred_sums():
            return (part(value, sides), residual, *sides)

    return Segment(name, run, sums_output=True, sums_gradient=True)


def _gpt2_body(model: Any, names: Sequence[str]) -> list[Segment]:
    base = model.transformer
    context = _context(model, causal_mask)
    positions = PositionEmbedding(names, base.wpe, base.drop, context)

    def start(carry: Carry) -> Carry:
        embedded, *sides = carry
        residual = positions.run(embedded, _named(names, sides))
        return (base.h[0].ln_1(residual), residual, *sides)

    def attention(block: Any) -> _Part:
        def part(value: Tensor, sides: Sequence[Tensor]) -> Tensor:
            named = _named(names, sides)
            result: Tensor = block.attn(
                value,
                attention_mask=context.mask("full_attention", value, named),
                use_cache=False,
                position_ids=context.position_ids(value, named),
            )[0]
            return result

        return part

    def mlp(block: Any) -> _Part:
        return lambda value, sides: block.mlp(value)

    segments = [Segment("embedding.norm", start)]
    next_norms = [*(block.ln_1 for block in base.h[1:]), base.ln_f]
    for index, (block, next_norm) in enumerate(zip(base.h, next_norms, strict=True)):
        attended = _add_then_norm(block.attn.c_proj, block.attn.resid_dropout, block.ln_2)
        ends = next_norm is base.ln_f
        segments += [
            _summing(f"{index}.attention", attention(block)),
            Segment(f"{index}.attention.norm", attended),
            _summing(f"{index}.mlp", mlp(block)),
            Segment(
                f"{index}.mlp.norm",
                _add_then_norm(block.mlp.c_proj, block.mlp.dropout, next_norm, ends=ends),
            ),
        ]
    return segments


def _add_then_norm(
    row: RowParallelLinear, dropout: nn.Module, norm: nn.Module, *, ends: bool = False
) -> _Run:
    """Return what GPT-2 does between sums: the residual stream goes around the norm."""

    def run(carry: Carry) -> Carry:
        total, residual, *sides = carry
        residual = dropout(row.add_bias(total)) + residual
        return (norm(residual),) if ends else (norm(residual), residual, *sides)

    return run


def _bert_body(model: Any, names: Sequence[str]) -> list[Segment]:
    layers = model.bert.encoder.layer
    context = _context(model, _bidirectional_mask)
    embedding = BertEmbedding(names, model.bert.embeddings, context)

    def start(carry: Carry) -> Carry:
        embedded, *sides = carry
        hidden = embedding.run(embedded, _named(names, sides))
        return (hidden, _other(hidden), *sides)

    def attention(layer: Any) -> _Part:
        def part(value: Tensor, sides: Sequence[Tensor]) -> Tensor:
            mask = context.mask("full_attention", value, _named(names, sides))
            own: Tensor = layer.attention.self(value, mask)[0]
            return layer.attention.output.dense(own)

        return part

    def mlp(layer: Any) -> _Part:
        return lambda value, sides: layer.output.dense(layer.intermediate(value))

    transform = model.cls.predictions.transform if isinstance(model, BertForMaskedLM) else _same
    segments = [Segment("embedding.norm", start)]
    for index, layer in enumerate(layers):
        ending = transform if layer is layers[-1] else None
        segments += [
            _summing(f"{index}.attention", attention(layer)),
            Segment(f"{index}.attention.norm", _norm_of_sum(layer.attention.output)),
            _summing(f"{index}.mlp", mlp(layer)),
            Segment(f"{index}.mlp.norm", _norm_of_sum(layer.output, ending)),
        ]
    return segments


def _norm_of_sum(output: Any, ending: Callable[[Tensor], Tensor] | None = None) -> _Run:
    """Return what BERT does between sums: the residual stream goes through the norm.

    Args:
        output: A ``BertSelfOutput`` or ``BertOutput``.
        ending: After the last layer, from the hidden states to the head's input.
    """

    def run(carry: Carry) -> Carry:
        total, residual, *sides = carry
        hidden = output.LayerNorm(output.dropout(output.dense.add_bias(total)) + residual)
        return (ending(hidden),) if ending is not None else (hidden, _other(hidden), *sides)

    return run


def _head(model: Any) -> tuple[Callable[[Carry, Any], Tensor], bool]:
    """Return the head, and whether the gradient of its input is a part of a sum."""
    classifies = isinstance(model, BertForSequenceClassification)
    if classifies:
        loss = ClassificationLoss(model.config.num_labels, model.config.problem_type)

        def classify(carry: Carry, labels: Any) -> Tensor:
            pooled = model.bert.pooler(carry[0])
            return loss(model.classifier(model.dropout(pooled)), labels)

        return classify, False
    shifts_labels = isinstance(model, GPT2LMHeadModel)
    projection: VocabParallelHead = model.get_output_embeddings()

    def predict(carry: Carry, labels: Any) -> Tensor:
        with deferred_sums():
            logits = projection(carry[0])
        return projection.loss(logits, next_tokens(labels) if shifts_labels else labels)

    return predict, True


def _bidirectional_mask(
    config: Any, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Any:
    return create_bidirectional_mask(
        config=config, inputs_embeds=hidden, attention_mask=attention_mask
    )


def _context(model: Any, mask: MaskMaker) -> StageContext:
    context = StageContext(model.config, {"full_attention": mask})
    context.kept_batches = _WAVES
    return context


def _named(names: Sequence[str], sides: Sequence[Tensor]) -> SideInputs:
    return dict(zip(names[1:], sides, strict=True))


def _other(value: Tensor) -> Tensor:
    """Return the same values as a second tensor: its gradient is no part of a sum."""
    return value.view_as(value)


def _same(value: Tensor) -> Tensor:
    return value
