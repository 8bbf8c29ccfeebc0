# SPDX-License-Identifier: Apache-2.0
"""Train a recipe's model as a pipeline of any length in one process: ``wavemare simulate``.

Weight versions, delays and corrections are exactly those of the real pipeline, so that one machine
shows what 8 or 32 stages learn. Nothing is exported: the results are curves. ``--resume`` goes on
from the run's checkpoint, to the same bits.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, fields
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, cast

from wavemare.engine.config.resolve import SECTION
from wavemare.errors import CheckpointError, ConfigError, did_you_mean
from wavemare.failure import run_main
from wavemare.files import atomic_write_bytes
from wavemare.observe.quiet import quiet_libraries
from wavemare.observe.recording import Recording
from wavemare.recipes.bert import pretrain as bert
from wavemare.recipes.gpt import pretrain as gpt
from wavemare.training.arguments import option, parse_arguments
from wavemare.training.config import resolve_config
from wavemare.training.models import check_model, make_masked_model, make_or_load_model
from wavemare.training.start import start_recording
from wavemare.training.text import TrainingText, find_data, read_text

_EVALUATED_AT_ONCE = 32  # samples
_FREE = ("resume", "output", "log_interval", "save_interval", "eval_interval", "eval_samples")
"""Options that a resumed run may change."""


@dataclass(frozen=True)
class SimulationOptions:
    """Options of a simulation, beside the recipe's."""

    stages: int | None = option(None, "length of the pipeline; the configuration's if omitted")
    micro_batches: int | None = option(None, "micro-batches; the configuration's if omitted")
    delays: str = option(
        "pipeline",
        "pipeline, one-step (PipeDream-2BW) or dataflow (PipeMare's paper, twice the delay)",
    )
    together: bool = option(
        False, "micro-batches that see the same weights pass a stage as one batch: equal but faster"
    )
    output: str = option("runs/simulation", "run folder")
    eval_samples: int = option(512, "samples of an evaluation")
    trace_steps: int = option(0, "0: there are no ranks whose actions could be recorded")


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
    check_model(arguments)
    source = find_data(arguments)
    saved = read_checkpoint(arguments, config) if arguments.resume else None
    recording = start_recording(arguments, done=saved["replay"]["steps"] if saved else 0)
    quiet_libraries()

    import torch
    import transformers

    from wavemare.data.loader import ResumableLoader, evaluation_batches
    from wavemare.simulation import SimulatedPipeline

    kind: Literal["gpt", "bert"] = "gpt" if name == "gpt" else "bert"
    text = read_text(source, arguments, special_tokens=kind)
    if text.split is not None:
        reason = "a simulation reads no data in Megatron's order"
        raise ConfigError("--data", arguments.data, reason, "Give one text")
    transformers.set_seed(arguments.seed)
    model, train, validation = prepare(name, arguments, text)
    make = make or partial(SimulatedPipeline, delays=arguments.delays, together=arguments.together)
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
    samples = pipeline.micro_batches * pipeline.micro_batch_size
    losses, recording.earlier_seconds = go_on(saved, pipeline, batches) if saved else ([], 0.0)
    tokens = samples * arguments.sequence_length
    with recording.training(None, tokens=tokens, config=config):
        for step in range(pipeline.global_steps + 1, arguments.max_steps + 1):
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
                recording.log_eval(step, eval_loss=loss)
            if step % arguments.save_interval == 0 and step < arguments.max_steps:
                state = {
                    "replay": pipeline.replay.state_dict(),
                    "loader": batches.state_dict(),
                    "random": torch.get_rng_state(),
                    "losses": losses,
                    "seconds": recording.training_seconds,
                }
                write_checkpoint(arguments, config, state)
    finish(recording, pipeline, text, arguments.sequence_length, loss)


def write_checkpoint(arguments: Any, config: Any, state: dict[str, Any]) -> None:
    """Replace the run's checkpoint."""
    import torch

    contents = BytesIO()
    torch.save({**state, "run": _describe(arguments, config)}, contents)
    _checkpoint(arguments).parent.mkdir(exist_ok=True)
    atomic_write_bytes(_checkpoint(arguments), contents.getvalue())


def read_checkpoint(arguments: Any, config: Any) -> dict[str, Any]:
    """Return the state that `write_checkpoint` was given.

    Raises:
        CheckpointError: There is none, it is damaged, or it is of other settings.
    """
    from wavemare.engine.checkpoint.files import read_file

    file, run = _checkpoint(arguments), _describe(arguments, config)
    if not file.is_file():
        remedy = "Start without --resume, or name the run's folder as --output"
        raise CheckpointError("--resume", str(file), "there is no checkpoint", remedy)
    state: dict[str, Any] = read_file(file)
    for key, own in run.items():
        if state["run"][key] != own:
            reason = f"the checkpoint was made with another {key}"
            raise CheckpointError("--resume", str(file), reason, "Give the options of that run")
    return state


def go_on(saved: dict[str, Any], pipeline: Any, batches: Any) -> tuple[list[float], float]:
    """Put all of a run as it was at its checkpoint.

    Returns:
        The losses that are not logged yet, and the training time so far in seconds.
    """
    import torch

    pipeline.replay.load_state_dict(saved["replay"])
    batches.load_state_dict(saved["loader"])
    torch.set_rng_state(saved["random"])
    return saved["losses"], saved["seconds"]


def _checkpoint(arguments: Any) -> Path:
    return Path(arguments.output) / "checkpoints" / "simulation.pt"


def _describe(arguments: Any, config: Any) -> dict[str, str]:
    """Return what a resumed run must have in common, as text."""
    section = {key: value for key, value in config[SECTION].items() if key != "watchdog"}
    options = {key: value for key, value in arguments.given().items() if key not in _FREE}
    texts = {"configuration": {**config, SECTION: section}, "option": options}
    return {key: json.dumps(value, sort_keys=True) for key, value in texts.items()}


def prepare(name: str, arguments: Any, text: TrainingText) -> tuple[Any, Any, Any]:
    """Return a new model, and samples to train and to evaluate it."""
    make = make_or_load_model if name == "gpt" else make_masked_model
    model = make(arguments, text)
    length, seed = arguments.sequence_length, arguments.seed
    if name == "gpt":
        return (model, *text.causal_samples(length, num_samples=0, seed=seed))
    probability = arguments.mask_probability
    return (model, *text.masked_samples(length, probability=probability, seed=seed))


IDLE = {
    "balance": "a simulation is one process",
    "split": "a simulation reads no data in Megatron's order",
    "eval_iters": "a simulation counts samples: --eval_samples",
    "final_eval_samples": "the last evaluation is like the others: --eval_samples",
    "trace_steps": "a simulation has no ranks whose actions it could record",
    "prompt": "a simulation shows no sample",
    "save_megatron": "a simulation writes no model",
}
"""Options of the recipes that have no effect here, and why."""


def refuse_idle(arguments: Any) -> None:
    """Refuse options that have no effect.

    Raises:
        ConfigError: One of them is given.
    """
    for each in fields(arguments):
        value = getattr(arguments, each.name)
        if each.name in IDLE and value != each.default:
            raise ConfigError(f"--{each.name}", value, IDLE[each.name], "Leave it out")


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
