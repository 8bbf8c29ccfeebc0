# SPDX-License-Identifier: Apache-2.0
"""Train a recipe's model as a pipeline of any length in one process: ``wavemare simulate``.

Weight versions, delays and corrections are exactly those of the real pipeline, so that one machine
shows what 8 or 32 stages learn. Nothing is exported: the results are curves.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from wavemare.engine.config.resolve import SECTION
from wavemare.errors import ConfigError, did_you_mean
from wavemare.failure import run_main
from wavemare.observe.quiet import quiet_libraries
from wavemare.observe.recording import Recording
from wavemare.recipes.bert import pretrain as bert
from wavemare.recipes.gpt import pretrain as gpt
from wavemare.training.arguments import option, parse_arguments
from wavemare.training.config import resolve_config
from wavemare.training.models import new_causal_model, new_masked_model, read_model_config
from wavemare.training.text import TrainingText, find_text, read_text

_EVALUATED_AT_ONCE = 32  # samples


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation, beside the recipe's."""

    stages: int | None = option(None, "length of the pipeline; the configuration's if omitted")
    micro_batches: int | None = option(None, "micro-batches; the configuration's if omitted")
    delays: str = option(
        "pipeline",
        "pipeline, one-step (PipeDream-2BW) or dataflow (PipeMare's paper, twice the delay)",
    )
    output: str = option("runs/simulation", "run folder")
    eval_samples: int = option(512, "samples of an evaluation")


@dataclass(frozen=True)
class GptArguments(SimulationOptions, gpt.PretrainArguments):
    """Options of a simulated GPT pretraining."""


@dataclass(frozen=True)
class BertArguments(SimulationOptions, bert.PretrainArguments):
    """Options of a simulated BERT pretraining."""


def main(make: Any = None) -> None:
    """Train and evaluate.

    Args:
        make: Makes the pipeline of model and configuration; by default that of the options.
    """
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in ("gpt", "bert"):
        reason = "a simulation pretrains one of the two models"
        raise ConfigError("RECIPE", name, reason, did_you_mean(name, ("gpt", "bert")))
    arguments: Any = parse_arguments(cast(Any, GptArguments if name == "gpt" else BertArguments))
    refuse_idle(arguments)
    config = configure(arguments)
    shape = read_model_config(arguments.model_config, arguments.sequence_length, arguments)
    source = find_text(arguments)
    recording = Recording(
        arguments.output, steps=arguments.max_steps, arguments=arguments.given(), show=True
    )
    quiet_libraries()

    import torch
    import transformers

    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.simulation import SimulatedPipeline

    text = read_text(
        source,
        arguments,
        "gpt" if name == "gpt" else "bert",
        tokenizer=arguments.tokenizer,
        vocab_size=arguments.trained_vocabulary,
    )
    if text.split is not None:
        reason = "a simulation reads no data in Megatron's order"
        raise ConfigError("--data", arguments.data, reason, "Give one text")
    transformers.set_seed(arguments.seed)
    if name == "gpt":
        model = new_causal_model(arguments, shape, text.tokenizer)
        text.check_fits(arguments.sequence_length, model.config)
        train, validation = text.causal_samples(arguments.sequence_length, 0, arguments.seed)
    else:
        model = new_masked_model(arguments, shape, text.tokenizer)
        text.check_fits(arguments.sequence_length, model.config)
        train, validation = text.masked_samples(
            arguments.sequence_length, probability=arguments.mask_probability, seed=arguments.seed
        )
    make = make or partial(SimulatedPipeline, delays=arguments.delays)
    pipeline = make(model, config)
    torch.manual_seed(arguments.seed + 1)
    recording.screen.note(pipeline.advice)
    batches = ResumableLoader(
        train,
        micro_batch_size=pipeline.micro_batch_size,
        data_rank=0,
        data_world_size=1,
        seed=arguments.seed,
    )
    recording.tokens = pipeline.micro_batches * pipeline.micro_batch_size
    recording.tokens *= arguments.sequence_length
    recording.config = config
    losses: list[float] = []
    with recording:
        for step in range(1, arguments.max_steps + 1):
            rate = pipeline.learning_rate
            with recording.step(step):
                losses.append(pipeline.train_batch(batches))
            if step % arguments.log_interval == 0:
                recording.log(step, loss=sum(losses) / len(losses), learning_rate=rate)
                losses.clear()
            if step % arguments.eval_interval == 0 or step == arguments.max_steps:
                loss = pipeline.evaluate(
                    evaluation_batches(validation, _EVALUATED_AT_ONCE, limit=arguments.eval_samples)
                )
                recording.run.log(step, eval_loss=loss)
    finish(recording, pipeline, text, arguments.sequence_length, loss)


def refuse_idle(arguments: Any) -> None:
    """Refuse options that have no effect.

    Raises:
        ConfigError: One of them is given.
    """
    for name, idle, reason in (
        ("resume", False, "a simulation saves nothing to resume from"),
        ("balance", "none", "a simulation is one process"),
        ("split", None, "a simulation reads no data in Megatron's order"),
        ("eval_iters", None, "a simulation counts samples: --eval_samples"),
    ):
        value = getattr(arguments, name)
        if value != idle:
            raise ConfigError(f"--{name}", value, reason, "Leave it out")


def configure(arguments: Any) -> dict[str, Any]:
    """Return the configuration with the changes of the options."""
    config = resolve_config(arguments)
    section = config.setdefault(SECTION, {}).setdefault("pipeline", {})
    if arguments.stages is not None:
        section["stages"] = arguments.stages
    if arguments.micro_batches is not None:
        config["gradient_accumulation_steps"] = arguments.micro_batches
        config.pop("train_micro_batch_size_per_gpu", None)
    return config


def finish(
    recording: Recording, pipeline: Any, text: TrainingText, sequence_length: int, loss: float
) -> None:
    """Write the results and the curve."""
    figures = {
        "eval_loss": loss,
        "stages": len(pipeline.stages),
        "micro-batches": pipeline.micro_batches,
        "largest staleness": max(map(max, pipeline.replay.records[-1].staleness)),
        "seconds": round(recording.training_seconds),
        "memory": pipeline.memory(),
    }
    recording.finish(figures, partial(text.baselines, sequence_length))


if __name__ == "__main__":
    run_main(main)
