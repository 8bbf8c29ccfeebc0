# SPDX-License-Identifier: Apache-2.0
"""Decoders that describe themselves by a ``base_model_pp_plan`` as a chain of layers.

transformers' plan names the parts in order: embedding, perhaps a dropout, blocks, norm. How the
parts are called is the uniform signature of its version 5; ``wavemare.models.proof`` shows for
each model that this is all its forward pass does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_sliding_window_causal_mask

from wavemare.errors import ModelError
from wavemare.models.activations import MaskMaker, SideInputs, StageContext
from wavemare.models.gpt2 import causal_mask
from wavemare.models.layers import Block, Head, PipelineLayer, TiedHead, TokenEmbedding, Wrapped

__all__ = ["decoder_chain", "has_plan"]


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
        )
        return result[0] if isinstance(result, tuple) else result


def has_plan(model: Any) -> bool:
    """Whether a model is a causal language model whose base model has a pipeline plan."""
    return (
        type(model).__name__.endswith("ForCausalLM")
        and bool(getattr(model.config, "base_model_pp_plan", None))
        and isinstance(model.get_output_embeddings(), nn.Linear)
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
    if head.weight is embedding.embedding.weight:
        return [*chain, TiedHead(inputs, embedding, head.bias)]
    return [*chain, Head(inputs, head)]


def _blocks(model: Any, inputs: Sequence[str], layers: nn.ModuleList) -> list[PipelineLayer]:
    config = model.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        sliding = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * len(layers)
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
        "model", type(model).__name__, reason, "Train it with one stage, or write a PipelineModule"
    )
