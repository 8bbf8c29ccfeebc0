# SPDX-License-Identifier: Apache-2.0
"""Train a recipe's model as a pipeline of any length in one process: ``wavemare simulate``.

Weight versions, delays and corrections are exactly those of the real pipeline, so that one machine
shows what 8 or 32 stages learn. Nothing is exported: what comes out are curves.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from wavemare.engine.config.resolve import SECTION, load_config
from wavemare.errors import ConfigError, did_you_mean
from wavemare.failure import run_main
from wavemare.observe import Run, Screen, quiet_libraries
from wavemare.recipes.arguments import parse_arguments
from wavemare.recipes.bert import pretrain as bert
from wavemare.recipes.gpt import pretrain as gpt
from wavemare.recipes.job import MEASURED, resolve_schedule
from wavemare.recipes.pretrained import longest, read_model_config
from wavemare.recipes.text import TextData

_EVALUATED_AT_ONCE = 32  # samples


@dataclass
class SimulationOptions:
    """Options of a simulation, beside the recipe's."""

    stages: int | None = field(
        default=None, metadata={"help": "length of the pipeline; the configuration's if omitted"}
    )
    micro_batches: int | None = field(
        default=None, metadata={"help": "per optimizer step; the configuration's if omitted"}
    )
    delays: str = field(
        default="pipeline",
        metadata={
            "help": "pipeline, one-step (PipeDream-2BW) or dataflow (the paper's machine, twice as "
            "far)"
        },
    )
    set: list[str] = field(
        default_factory=list,
        metadata={"help": "changes of the configuration: KEY.KEY=VALUE KEY.KEY=VALUE ..."},
    )

    output: str = field(default="runs/simulation", metadata={"help": "run folder"})
    eval_samples: int = field(default=512, metadata={"help": "samples of an evaluation"})


@dataclass
class GptArguments(SimulationOptions, gpt.PretrainArguments):
    """Options of a simulated GPT pretraining."""


@dataclass
class BertArguments(SimulationOptions, bert.PretrainArguments):
    """Options of a simulated BERT pretraining."""


def main() -> None:
    """Train and evaluate."""
    kind = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if kind not in ("gpt", "bert"):
        reason = "a simulation pretrains one of the two models"
        raise ConfigError("RECIPE", kind, reason, did_you_mean(kind, ("gpt", "bert")))
    arguments: Any = parse_arguments(cast(Any, GptArguments if kind == "gpt" else BertArguments))
    _refuse_idle(arguments)
    config = _configuration(arguments)
    values = read_model_config(
        arguments.model_config, arguments.sequence_length, arguments.megatron.model
    )
    quiet_libraries()

    import torch
    import transformers

    from wavemare.simulation import SimulatedPipeline

    text = TextData(arguments)
    text.read(
        kind="gpt" if kind == "gpt" else "bert",
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
    )
    transformers.set_seed(arguments.seed)
    model, train, held_out = _samples(arguments, values, text)
    pipeline = SimulatedPipeline(model, config, delays=cast(Any, arguments.delays))
    torch.manual_seed(arguments.seed + 1)
    Simulation(arguments, config, pipeline, text).run(train, held_out)


def _refuse_idle(arguments: Any) -> None:
    if sys.argv.count("--set") > 1:  # argparse would take the last alone
        reason = "it is given more than once"
        raise ConfigError("--set", arguments.set[0], reason, "Write --set ONE=1 TWO=2 ...")
    for name, idle, reason in (
        ("resume", False, "a simulation saves nothing to resume from"),
        ("balance", "none", "a simulation is one process"),
        ("split", None, "a simulation reads no data in Megatron's order"),
    ):
        value = getattr(arguments, name)
        if value != idle:
            raise ConfigError(f"--{name}", value, reason, "Leave it out")


def _configuration(arguments: Any) -> dict[str, Any]:
    """Return the configuration with what the options change of it."""
    config = arguments.megatron.config(load_config(arguments.deepspeed_config))
    section = config.setdefault(SECTION, {}).setdefault("pipeline", {})
    if arguments.stages is not None:
        section["stages"] = arguments.stages
        if not isinstance(section.get("partition", ""), str):
            del section["partition"]  # cuts for another number of stages
    if arguments.micro_batches is not None:
        config["gradient_accumulation_steps"] = arguments.micro_batches
        config.pop("train_micro_batch_size_per_gpu", None)
    for change in arguments.set:
        _change(config, change)
    warmup = arguments.megatron.warmup_steps(arguments.max_steps)
    return resolve_schedule(load_config(config), arguments.max_steps, warmup)


def _change(config: dict[str, Any], change: str) -> None:
    path, equals, text = change.partition("=")
    if not equals or not path:
        reason = "it is not of the form KEY.KEY=VALUE"
        raise ConfigError("--set", change, reason, "Write for example optimizer.params.lr=1e-3")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    *parents, key = path.split(".")
    place = config
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            reason = f"{parent!r} is not a section"
            raise ConfigError("--set", change, reason, "Name a key of a section")
    place[key] = value


def _samples(arguments: Any, values: dict[str, Any], text: TextData) -> tuple[Any, Any, Any]:
    """Return the model, the samples to train on and those held out."""
    if isinstance(arguments, BertArguments):
        model = bert.make_model(arguments, values, text)
        return (model, *bert.masked_samples(arguments, text, model.config))
    model = gpt.make_model(arguments, values, text)
    sizes = {"positions": longest(model.config), "vocabulary": model.config.vocab_size}
    return (model, *text.pack(arguments.sequence_length, **sizes))


class Simulation:
    """The loop: steps, evaluations, a run folder.

    Args:
        arguments: Its options.
        config: The whole configuration.
        pipeline: A `SimulatedPipeline`.
        text: The corpus.
    """

    def __init__(
        self, arguments: Any, config: dict[str, Any], pipeline: Any, text: TextData
    ) -> None:
        self._arguments = arguments
        self._pipeline = pipeline
        self._text = text
        self._screen = Screen(rank=0)
        self._run = Run(Path(arguments.output), rank=0)
        older = self._run.begin(done=None)
        if older is not None:
            self._screen.note(f"the older run is now {older}")
        self._run.write_config({"arguments": asdict(arguments), "deepspeed": config}, world_size=1)

    def run(self, train: Any, held_out: Any) -> None:
        """Train to the last step, and write what came of it."""
        from wavemare.data import ResumableLoader

        arguments, pipeline = self._arguments, self._pipeline
        if pipeline.advice is not None:
            self._screen.note(pipeline.advice)
        loader = ResumableLoader(
            train,
            micro_batch_size=pipeline.micro_batch_size,
            data_rank=0,
            data_world_size=1,
            seed=arguments.seed,
        )
        samples = pipeline.micro_batches * pipeline.micro_batch_size
        losses: list[float] = []
        started = time.perf_counter()
        with self._screen.progress(arguments.max_steps) as progress:
            for step in range(1, arguments.max_steps + 1):
                rate = pipeline.learning_rate
                losses.append(pipeline.train_batch(loader))
                progress.step(
                    step,
                    tokens=samples * arguments.sequence_length,
                    loss=losses[-1],
                    learning_rate=rate,
                    facts={} if step % arguments.log_interval == 0 else None,
                )
                if step % arguments.log_interval == 0:
                    self._run.log(step, loss=sum(losses) / len(losses), learning_rate=rate)
                    losses.clear()
                if step % arguments.eval_interval == 0 and step < arguments.max_steps:
                    self._evaluate(step, held_out)
        loss = self._evaluate(arguments.max_steps, held_out)
        self._finish(loss, time.perf_counter() - started)

    def _evaluate(self, step: int, held_out: Any) -> float:
        loss = float(self._pipeline.evaluate(self._batches(held_out)))
        self._run.log(step, **{MEASURED[0]: loss})
        return loss

    def _batches(self, held_out: Any) -> Iterator[Any]:
        from wavemare.data import evaluation_batches

        samples = min(self._arguments.eval_samples, len(held_out))
        return evaluation_batches(held_out, min(_EVALUATED_AT_ONCE, samples), limit=samples)

    def _finish(self, loss: float, seconds: float) -> None:
        pipeline = self._pipeline
        entropies = self._text.entropies(self._arguments.sequence_length)
        self._run.curve(baselines=entropies)
        figures: dict[str, Any] = {
            MEASURED[0]: loss,
            **{f"{name} cross-entropy": value for name, value in entropies.items()},
            "stages": len(pipeline.stages),
            "micro-batches": pipeline.micro_batches,
            "largest staleness": max(map(max, pipeline.replay.records[-1].staleness)),
            "steps": self._arguments.max_steps,
            "seconds": round(seconds),
            "memory": pipeline.memory(),
        }
        self._run.summary({"results": figures})
        self._screen.results(figures)
        self._run.close()


if __name__ == "__main__":
    run_main(main)
