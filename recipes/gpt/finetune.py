# SPDX-License-Identifier: Apache-2.0
"""Continue training a causal language model from a Hugging Face folder.

::

    wavemare train gpt/finetune -- --model runs/gpt-pretrain/model --data 'notes/*.txt'

It is the program of ``gpt/pretrain.py``, with other options:

* model and tokenizer come from a folder, ``--model``;
* ``finetune.json`` has two stages with 1F1B, 16 samples in a step, and AdamW, whose rate rises to
  3e-4 and falls to a tenth. ``--set`` changes it;
* there are fewer steps, and more evaluations.

It trains all weights, on every token of the text. ``llama/sft.py`` has LoRA, and trains answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wavemare.failure import run_main
from wavemare.recipes.gpt import pretrain
from wavemare.training.arguments import TokenizerArguments, TrainArguments, option


@dataclass(frozen=True)
class FinetuneArguments(TokenizerArguments, TrainArguments):
    """Options of GPT fine-tuning, beside those of all recipes (``--data``, ``--set``, ...)."""

    megatron_checkpoints: ClassVar[bool] = True  # --load may name one; --save-megatron writes one

    output: str = option("runs/gpt-finetune", "run folder")
    model: str = option(
        "runs/gpt-pretrain/model", "Hugging Face folder of the model and its tokenizer"
    )
    max_steps: int = option(100, "optimizer steps")
    eval_interval: int = option(50, "steps between evaluations")
    save_interval: int = option(50, "steps between checkpoints")
    prompt: str | None = option(None, "start of the sample text; by default a validation text's")


def main() -> None:
    """Load, train, evaluate, export and sample."""
    pretrain.main(FinetuneArguments, "GPT fine-tuning")


if __name__ == "__main__":
    run_main(main)
