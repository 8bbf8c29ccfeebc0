# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small Llama on text: the recipe of `wavemare.recipes.gpt.pretrain`, modernized.

RMSNorm, rotary positions, grouped-query attention, tied embeddings, bf16 on GPUs, and a learning
rate that warms up, stays and decays over the last fifth of the steps::

    wavemare train llama
    wavemare train llama -- --model_config recipes/llama/model_135m.json --vocab_size 49152

Beside it: ``pretrain_pipemare.json``, ``pretrain_pipeline.json``, ``pretrain_zero.json`` and
``pretrain_wave.json``, all on the same batches; and ``pretrain_experts.json``, which takes
``--model_config recipes/llama/model_experts.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from wavemare.failure import run_main
from wavemare.recipes.gpt import pretrain as gpt
from wavemare.training.arguments import option
from wavemare.training.setup import Setup, prefer_bf16


@dataclass(frozen=True)
class PretrainArguments(gpt.PretrainArguments):
    """Options of Llama pretraining."""

    output: str = option("runs/llama-pretrain", "run folder")
    max_steps: int = option(200, "optimizer steps")
    save_interval: int = option(100, "steps between checkpoints")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    gpt.main(PretrainArguments, "wavemare: Llama pretraining", adjust)


def adjust(setup: Setup) -> Callable[[Any], Any] | None:
    """Prefer bf16, and a learning rate that warms up, stays and decays.

    Returns:
        What makes an optimizer's schedule; None if the JSON or an option names another.
    """
    prefer_bf16(setup)
    if "scheduler" in setup.balance.config:
        return None
    from transformers import get_wsd_schedule

    steps = setup.arguments.max_steps
    warmup, decay = max(steps // 10, 1), steps // 5
    return partial(
        get_wsd_schedule,
        num_warmup_steps=warmup,
        num_decay_steps=decay,
        num_stable_steps=max(steps - warmup - decay, 0),
        decay_type="linear",
    )


if __name__ == "__main__":
    run_main(main)
