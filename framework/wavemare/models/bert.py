# SPDX-License-Identifier: Apache-2.0
"""BERT for masked language modelling and sequence classification as a chain of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from wavemare.errors import ModelError
from wavemare.models.activations import SideInputs, StageContext
from wavemare.models.layers import Block, Head, PipelineLayer, TiedHead, TokenEmbedding, Wrapped

__all__ = ["bidirectional_mask", "classification_chain", "masked_lm_chain", "masked_lm_spares"]


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
        types = sides.get("token_type_ids")
        if types is None:
            types = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
        embedded = hidden + self.token_type_embeddings(types) + self.position_embeddings(positions)
        result: Tensor = self.dropout(self.LayerNorm(embedded))
        return result


class BertLayerLayer(Block):
    """A layer of the encoder."""

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the layer."""
        result: Tensor = self.block(hidden, self.context.mask("full_attention", hidden, sides))
        return result


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
        result: Tensor = self.classifier(self.dropout(hidden))
        return result


def masked_lm_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a ``BertForMaskedLM``.

    Raises:
        ModelError: It is a decoder.
    """
    words, rest = _encoder(model, inputs)
    head = model.cls.predictions
    if head.decoder.weight is model.bert.embeddings.word_embeddings.weight:
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
