# SPDX-License-Identifier: Apache-2.0
"""GPT-2, BERT, and decoders that have a ``base_model_pp_plan``, as chains of layers.

transformers' plan names the parts in order: embedding, perhaps a dropout, blocks, norm. Their calls
have the uniform signature of its version 5. ``wavemare.models.proof`` shows for each model that
this is all its forward pass does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_causal_mask,
    create_sliding_window_causal_mask,
)

from wavemare.errors import ModelError
from wavemare.models.activations import MaskMaker, SideInputs, StageContext, side
from wavemare.models.layers import Block, Head, PipelineLayer, TiedHead, TokenEmbedding, Wrapped
from wavemare.models.packed import layer_kinds, row_mask
from wavemare.parallel.tensor.layers import VocabParallelHead

# transformers 5.24 renamed this argument of its functions for masks.
_CACHE = "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"


def causal_mask(
    config: Any,
    hidden: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    *,
    create: Callable[..., Any] = create_causal_mask,
) -> Any:
    """Make the causal mask; without an attention mask, position ids that restart separate texts.

    These are computed one by one where `row_mask` says so.

    Args:
        config: The model's.
        hidden: Embedded tokens, (batch, sequence, width), whose values do not matter.
        attention_mask: (batch, sequence), 0 where there is padding.
        position_ids: (batch, sequence).
        create: Function of transformers for this mask or a narrower one.
    """
    if attention_mask is None and position_ids is not None:
        window = config.sliding_window if create is create_sliding_window_causal_mask else None
        rows = row_mask(config, position_ids, hidden.device, window=window)
        if rows is not None:
            return rows
    return create(
        config=config,
        inputs_embeds=hidden,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{_CACHE: None},
    )


class PositionEmbedding(PipelineLayer):
    """Learned positions, added to the embedded tokens, and dropout."""

    def __init__(
        self, inputs: Sequence[str], wpe: nn.Module, drop: nn.Module, context: StageContext
    ) -> None:
        super().__init__(inputs)
        self.wpe = wpe
        self.drop = drop
        self.context = context

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Add the positions."""
        return self.drop(hidden + self.wpe(self.context.position_ids(hidden, sides)))


class GPT2BlockLayer(Block):
    """A block of GPT-2."""

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the block."""
        return self.block(
            hidden,
            attention_mask=self.context.mask("full_attention", hidden, sides),
            use_cache=False,
            position_ids=self.context.position_ids(hidden, sides),
            **self.context.row_bounds(hidden, sides),
        )


def is_tied(head: Any, embedding: Any) -> bool:
    """Whether a head and an embedding train one weight; frozen, each stage has a copy of it."""
    return head.weight is embedding.weight and head.weight.requires_grad


def gpt2_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a ``GPT2LMHeadModel``."""
    base = model.transformer
    context = StageContext(model.config, {"full_attention": causal_mask})
    embedding = TokenEmbedding(inputs, base.wte)
    tied = is_tied(model.lm_head, base.wte)
    return [
        embedding,
        PositionEmbedding(inputs, base.wpe, base.drop, context),
        *(GPT2BlockLayer(inputs, block, context) for block in base.h),
        Wrapped(inputs, base.ln_f),
        TiedHead(inputs, embedding) if tied else Head(inputs, model.lm_head),
    ]


_MASKS: Mapping[str, MaskMaker] = {
    "full_attention": causal_mask,
    "sliding_attention": partial(causal_mask, create=create_sliding_window_causal_mask),
}


class DecoderBlock(Block):
    """A decoder layer with the uniform signature.

    Args:
        inputs: Names of the tensors that enter the first layer.
        block: The decoder layer.
        context: Masks and tables, shared by all blocks of a process.
        kind: ``full_attention`` or ``sliding_attention``.
    """

    def __init__(
        self, inputs: Sequence[str], block: nn.Module, context: StageContext, kind: str
    ) -> None:
        super().__init__(inputs, block, context)
        self.kind = kind

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the layer."""
        result = self.block(
            hidden,
            attention_mask=self.context.mask(self.kind, hidden, sides),
            position_ids=self.context.position_ids(hidden, sides),
            position_embeddings=self.context.rotary(self.kind, hidden, sides),
            use_cache=False,
            **self.context.row_bounds(hidden, sides),
        )
        return result[0] if isinstance(result, tuple) else result


def has_plan(model: Any) -> bool:
    """Whether a model is a causal language model whose base model has a pipeline plan."""
    return (
        type(model).__name__.endswith("ForCausalLM")
        and bool(getattr(model.config, "base_model_pp_plan", None))
        and isinstance(model.get_output_embeddings(), nn.Linear | VocabParallelHead)
    )


def decoder_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a decoder, by its plan.

    Raises:
        ModelError: The plan, or a kind of attention layer, is of another form than the usual one.
    """
    base = model.base_model
    embedding: TokenEmbedding | None = None
    chain: list[PipelineLayer] = []
    for name, (takes, gives) in model.config.base_model_pp_plan.items():
        part = getattr(base, name, None)
        if isinstance(part, nn.ModuleList):
            chain += _blocks(model, inputs, part)
        elif list(takes) == ["input_ids"] and isinstance(part, nn.Module):
            embedding = TokenEmbedding(inputs, part)
            chain.append(embedding)
        elif isinstance(part, nn.Module) and len(takes) == len(gives) == 1:
            chain.append(Wrapped(inputs, part))
        else:
            raise _unusual(model, f"part {name!r} of its pipeline plan maps {takes} to {gives}")
    head = model.get_output_embeddings()
    if embedding is None:
        raise _unusual(model, "its pipeline plan names no embedding")
    if is_tied(head, embedding.embedding):
        return [*chain, TiedHead(inputs, embedding, head.bias)]
    return [*chain, Head(inputs, head)]


def _blocks(model: Any, inputs: Sequence[str], layers: nn.ModuleList) -> list[PipelineLayer]:
    config = model.config
    kinds = layer_kinds(config, len(layers))
    unknown = sorted(set(kinds) - set(_MASKS))
    if unknown:
        raise _unusual(model, f"it has layers of kind {unknown[0]!r}")
    context = StageContext(config, _MASKS, getattr(model.base_model, "rotary_emb", None))
    return [
        DecoderBlock(inputs, layer, context, kind)
        for layer, kind in zip(layers, kinds, strict=False)
    ]


def _unusual(model: Any, reason: str) -> ModelError:
    return ModelError(
        "model",
        type(model).__name__,
        reason,
        "Train it with one stage, or write a PipelineModule (docs/own-model.md)",
    )


def bidirectional_mask(
    config: Any, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
) -> Any:
    """Make the mask of padding; position ids, which separate texts in a causal one, do nothing."""
    return create_bidirectional_mask(
        config=config, inputs_embeds=hidden, attention_mask=attention_mask
    )


class BertEmbedding(PipelineLayer):
    """Token types and positions, added to the embedded words, then norm and dropout."""

    def __init__(self, inputs: Sequence[str], embeddings: Any, context: StageContext) -> None:
        super().__init__(inputs)
        self.token_type_embeddings: nn.Module = embeddings.token_type_embeddings
        self.position_embeddings: nn.Module = embeddings.position_embeddings
        self.LayerNorm: nn.Module = embeddings.LayerNorm
        self.dropout: nn.Module = embeddings.dropout
        self.context = context

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Add the token types first: the order of the sum is the model's."""
        positions = self.context.position_ids(hidden, sides)
        types = side(sides, "token_type_ids")
        if types is None:
            types = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        embedded = hidden + self.token_type_embeddings(types) + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(embedded))


class BertLayerLayer(Block):
    """A layer of the encoder."""

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the layer."""
        return self.block(hidden, self.context.mask("full_attention", hidden, sides))


class Pooler(Wrapped):
    """From the hidden states to one vector per text, that of the first token."""

    ends_chain = True


class Classifier(PipelineLayer):
    """Dropout and the projection to the labels."""

    ends_chain = True

    def __init__(self, inputs: Sequence[str], dropout: nn.Module, classifier: nn.Module) -> None:
        super().__init__(inputs)
        self.dropout = dropout
        self.classifier = classifier

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Return logits, (batch, labels)."""
        return self.classifier(self.dropout(hidden))


def masked_lm_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a ``BertForMaskedLM``.

    Raises:
        ModelError: It is a decoder.
    """
    words, rest = _encoder(model, inputs)
    head = model.cls.predictions
    if is_tied(head.decoder, model.bert.embeddings.word_embeddings):
        decoder: PipelineLayer = TiedHead(inputs, words, head.decoder.bias)
    else:
        decoder = Head(inputs, head.decoder)
    return [words, *rest, Wrapped(inputs, head.transform), decoder]


def masked_lm_spares(model: Any) -> Mapping[str, Tensor]:
    """Return what stands for a bias that the forward pass of an untied ``BertForMaskedLM`` ignores.

    With tied weights it is the decoder's bias under another name. So it is again in what is saved,
    whichever of the two names a reader takes.
    """
    return {"cls.predictions.bias": model.cls.predictions.decoder.bias}


def classification_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a ``BertForSequenceClassification``.

    Raises:
        ModelError: It is a decoder.
    """
    words, rest = _encoder(model, inputs)
    pooler = Pooler(inputs, model.bert.pooler)
    return [words, *rest, pooler, Classifier(inputs, model.dropout, model.classifier)]


def _encoder(model: Any, inputs: Sequence[str]) -> tuple[TokenEmbedding, list[PipelineLayer]]:
    if model.config.is_decoder:
        raise ModelError(
            "model",
            type(model).__name__,
            "config.is_decoder is true, and only BERT as an encoder can become a pipeline",
            "Set is_decoder to false, or use a decoder such as GPT-2",
        )
    embeddings = model.bert.embeddings
    context = StageContext(model.config, {"full_attention": bidirectional_mask})
    layers = (BertLayerLayer(inputs, layer, context) for layer in model.bert.encoder.layer)
    return (
        TokenEmbedding(inputs, embeddings.word_embeddings),
        [BertEmbedding(inputs, embeddings, context), *layers],
    )
