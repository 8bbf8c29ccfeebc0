# SPDX-License-Identifier: Apache-2.0
"""What a recipe records, and what it shows before it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wavemare.engine.config.resolve import zero_section
from wavemare.observe.recording import Recording
from wavemare.observe.screen import Screen
from wavemare.training.arguments import TrainArguments

if TYPE_CHECKING:
    from wavemare.training.setup import Setup


def start_recording(arguments: TrainArguments, *, done: int | None = None) -> Recording:
    """Return the recording of a run by the recipe's options, which shows its progress.

    ``done`` optimizer steps were done before; by default the engine's count.

    Raises:
        ConfigError: See `wavemare.observe.Recording`.
    """
    return Recording(
        arguments.output,
        steps=arguments.max_steps,
        done=done,
        arguments=arguments.given(),
        trace_steps=arguments.trace_steps,
        show=True,
    )


def print_start(
    title: str,
    setup: Setup,
    model: Any,
    corpus: Mapping[str, object],
    parameters: int,
    rate: str | None = None,
) -> None:
    """Print on rank 0 what is trained, and how; see `wavemare.training.run.TrainingRun.show`."""
    Screen(rank=setup.rank).panel(
        f"wavemare: {title}", _groups(setup, model, corpus, parameters, rate)
    )


def _groups(
    setup: Setup, model: Any, corpus: Mapping[str, object], parameters: int, rate: str | None
) -> dict[str, Mapping[str, object]]:
    """Return rows (name and value) by their group."""
    config, batch, section = model.config, setup.batch, setup.section
    length = setup.arguments.rows_per_sample * setup.arguments.sequence_length
    samples = str(batch["train_batch_size"])
    if section.parallel.given:  # the engine makes its layout, which is shown then
        layout = {"processes": str(setup.world_size), "layout": "wavemare.parallel's, see below"}
    else:
        layout = _layout(setup) | _gradients(setup, model, samples_tokens=int(samples) * length)
        micro, accumulation = list(batch.values())[1:]
        samples += f" = {micro} x {accumulation} micro-batches x {setup.data_ranks} replicas"
    return {
        "model": {
            "architecture": type(model).__name__,
            "parameters": f"{parameters / 1e6:.2f} M",
            "layers x width x heads": f"{config.num_hidden_layers} x {config.hidden_size} x "
            f"{config.num_attention_heads}",
        },
        "layout": layout,
        "batch": {
            "samples per step": samples,
            "tokens per step": batch["train_batch_size"] * length,
            "steps": setup.arguments.max_steps,
        },
        "optimizer": _optimizer(setup, rate),
        "corpus": corpus,
    }


def count_parameters(setup: Setup, model: Any) -> int:
    """Return the trained parameters of all stages, with the copies of untied weights."""
    from wavemare.models.convert import tied_weights

    pipeline = setup.section.pipeline
    untied = tied_weights(model) if pipeline.stages > 1 and pipeline.unties else []
    own = sum(parameter.numel() for parameter in model.parameters())
    return own + sum(tie.num_parameters for tie in untied)


def _optimizer(setup: Setup, rate: str | None) -> dict[str, object]:
    """Return the rows of the optimizer that steps, and of its learning rate."""
    from wavemare.engine.optim.policy import advise, is_policys

    config = setup.config
    optimizer, scheduler = config.get("optimizer", {}), config.get("scheduler", {})
    kind = optimizer.get("type", "none")
    if is_policys(config):
        sizes = setup.section.pipeline.stages, setup.batch["gradient_accumulation_steps"]
        chosen, _ = advise(config, stages=sizes[0], micro_batches=sizes[1])
        if (taken := chosen["optimizer"]["type"]) != kind:
            kind = f"{taken}, which optimizer_policy takes in place of {kind}"
    return {
        "type": kind,
        "learning rate": f"{optimizer.get('params', {}).get('lr', 'its default')}, "
        f"{scheduler.get('type') or rate or 'constant'}",
    }


def _layout(setup: Setup) -> dict[str, str]:
    section = setup.section
    stages, parts = section.pipeline.stages, section.tensor_parallel.size
    waves = section.wavelet.mode
    return {
        "processes": f"{setup.world_size} = {stages} stages x {setup.data_ranks} replicas"
        + (f" x {parts} ranks that share layers" if parts > 1 else ""),
        "schedule": (_schedule(section.pipeline) if stages > 1 else "data parallel")
        + f", ZeRO {zero_section(setup.config).get('stage', 0)}"
        + (f", waves {waves}" if waves != "off" else ""),
    }


def _schedule(pipeline: Any) -> str:
    """Return the name of the schedule, and how many steps are synchronous before it begins."""
    steps = pipeline.pipemare.warmup_steps if pipeline.schedule == "pipemare" else 0
    return f"{pipeline.schedule} after {steps} synchronous steps" if steps else pipeline.schedule


def _gradients(setup: Setup, model: Any, samples_tokens: int) -> dict[str, str]:
    """Return how gradients are summed, and how few of them at least are zero.

    ``samples_tokens`` are the tokens of a step over all replicas.
    """
    mode = setup.section.sparse_collective.mode
    if mode == "off":
        return {}
    words, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    whole = sum(parameter.numel() for parameter in model.parameters())
    rows = min(samples_tokens // setup.data_ranks, words.shape[0])
    sent = whole
    if head is None or head.weight is not words:
        sent -= words.numel() - rows * words.shape[1]
    return {
        "gradients": f"sparse collective ({mode}): at most {rows} of {words.shape[0]} words in a "
        f"step of a replica, {100 * sent / whole:.0f} % of the gradients"
    }
