# SPDX-License-Identifier: Apache-2.0
"""GPT-2 with its language-modelling head as a chain of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import create_causal_mask

from wavemare.models.activations import SideInputs, StageContext
from wavemare.models.layers import Block, Head, PipelineLayer, TiedHead, TokenEmbedding, Wrapped

__all__ = ["causal_mask", "gpt2_chain"]

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

    Args:
        config: The model's.
        hidden: Embedded tokens, (batch, sequence, width), whose values do not matter.
        attention_mask: (batch, sequence), 0 where there is padding.
        position_ids: (batch, sequence).
        create: Function of transformers for this mask or a narrower one.
    """
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
        result: Tensor = self.drop(hidden + self.wpe(self.context.position_ids(hidden, sides)))
        return result


class GPT2BlockLayer(Block):
    """A block of GPT-2."""

    def run(self, hidden: Tensor, sides: SideInputs) -> Tensor:
        """Apply the block."""
        result: Tensor = self.block(
            hidden,
            attention_mask=self.context.mask("full_attention", hidden, sides),
            use_cache=False,
            position_ids=self.context.position_ids(hidden, sides),
        )
        return result


def gpt2_chain(model: Any, inputs: Sequence[str]) -> list[PipelineLayer]:
    """Return the layers of a ``GPT2LMHeadModel``."""
    base = model.transformer
    context = StageContext(model.config, {"full_attention": causal_mask})
    embedding = TokenEmbedding(inputs, base.wte)
    tied = model.lm_head.weight is base.wte.weight
    return [
        embedding,
        PositionEmbedding(inputs, base.wpe, base.drop, context),
        *(GPT2BlockLayer(inputs, block, context) for block in base.h),
        Wrapped(inputs, base.ln_f),
        TiedHead(inputs, embedding) if tied else Head(inputs, model.lm_head),
    ]
