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
from wavemare.observe.recording import Recording
from wavemare.recipes.gpt.pretrain import PretrainArguments as TextArguments
from wavemare.recipes.gpt.pretrain import learn, make_model
from wavemare.training.arguments import option, parse_arguments
from wavemare.training.models import read_model_config
from wavemare.training.setup import Setup, connect, prefer_bf16, prepare
from wavemare.training.text import find_text, read_text


@dataclass(frozen=True)
class PretrainArguments(TextArguments):
    """Options of Llama pretraining."""

    output: str = option("runs/llama-pretrain", "run folder")
    max_steps: int = option(200, "optimizer steps")
    save_interval: int = option(100, "steps between checkpoints")
    model_config: str = option(
        str(Path(__file__).with_name("model.json")), "transformers configuration of the model"
    )


def main() -> None:
    """Pretrain, evaluate, export and sample."""
    args = parse_arguments(PretrainArguments)
    setup = prepare(args)
    source = find_text(args)
    shape = read_model_config(args.model_config, args.sequence_length, args.sizes())
    recording = Recording(args.output, steps=args.max_steps, arguments=args.given(), show=True)

    connect(setup)
    prefer_bf16(setup)
    text = read_text(source, args, "gpt", tokenizer=args.tokenizer, vocab_size=args.vocab_size)
    model = make_model(args, shape, text.tokenizer, setup.section.tensor_parallel.size)
    title = "wavemare: Llama pretraining"
    learn(setup, recording, model, text, args.prompt, title, warmup_stable_decay(setup))


def warmup_stable_decay(setup: Setup) -> Callable[[Any], Any] | None:
    """Return what makes an optimizer's schedule; None if the JSON or an option names another."""
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
