# SPDX-License-Identifier: Apache-2.0
"""Shared by the ranks of all benchmarks: interleaved rounds, ratios, the GPT, the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from deepspeed.accelerator import get_accelerator

from benchmarks.request import GptRequest, Request

SEED = 7
_Item = TypeVar("_Item")


def interleaved(
    request: Request, items: Sequence[_Item], note: Callable[[str], None]
) -> Iterator[tuple[bool, _Item]]:
    """Yield the items of all rounds; each round begins with another item.

    Args:
        request: Has the numbers of rounds.
        items: Systems, or other things to measure in turns.
        note: Shows a line as a round begins.

    Yields:
        Whether the round is timed (after the warm-ups), and the item.
    """
    for turn in range(request.warmups + request.rounds):
        number = turn - request.warmups + 1
        note("warming up" if number < 1 else f"round {number} of {request.rounds}")
        first = turn % len(items)
        for item in (*items[first:], *items[:first]):
            yield number > 0, item


def ratio_row(rounds_s: Sequence[float], baseline_s: Sequence[float] | None) -> dict[str, Any]:
    """Return the part of a row that all benchmarks share."""
    own = median(rounds_s)
    return {
        "median_s": own,
        "ratio": None if baseline_s is None else median(baseline_s) / own,
        "rounds_s": list(rounds_s),
    }


def build_gpt(request: GptRequest, *, ties: bool = False, seed: int = SEED) -> Any:
    """Return a GPT-2 with the same weights each time."""
    from transformers import GPT2Config, GPT2LMHeadModel, set_seed

    set_seed(seed)
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
