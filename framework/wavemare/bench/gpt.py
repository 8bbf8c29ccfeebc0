# SPDX-License-Identifier: Apache-2.0
"""The GPT that benches train: without dropout, so that systems train what others do."""

from __future__ import annotations

from typing import Any, Protocol

from transformers import GPT2Config, GPT2LMHeadModel, set_seed

__all__ = ["SEED", "build_gpt"]

SEED = 7


class Sizes(Protocol):
    """What a request says of the model."""

    @property
    def layers(self) -> int:
        """Blocks."""

    @property
    def hidden(self) -> int:
        """Width."""

    @property
    def heads(self) -> int:
        """Of the attention."""

    @property
    def sequence(self) -> int:
        """Positions."""

    @property
    def vocabulary(self) -> int:
        """Tokens."""


def build_gpt(sizes: Sizes, *, ties: bool = False) -> Any:
    """Return a GPT-2 with the same weights each time.

    Args:
        sizes: A bench's request.
        ties: Whether the head is the embedding.
    """
    set_seed(SEED)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=sizes.layers,
            n_embd=sizes.hidden,
            n_head=sizes.heads,
            n_positions=sizes.sequence,
            vocab_size=sizes.vocabulary,
            tie_word_embeddings=ties,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
