# SPDX-License-Identifier: Apache-2.0
"""The GPT that benchmarks train, without dropout: all systems train the same."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from wavemare.bench.request import GptRequest

__all__ = ["SEED", "bench_device", "build_gpt"]

SEED = 7


def build_gpt(request: GptRequest, *, ties: bool = False) -> Any:
    """Return a GPT-2 with the same weights each time.

    Args:
        request: Has the sizes.
        ties: Whether the head is the embedding.
    """
    set_seed(SEED)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=request.layers,
            n_embd=request.hidden,
            n_head=request.heads,
            n_positions=request.sequence,
            vocab_size=request.vocabulary,
            tie_word_embeddings=ties,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def bench_device() -> torch.device:
    """Return the device that DeepSpeed gives to this process."""
    return torch.device(get_accelerator().current_device_name())
