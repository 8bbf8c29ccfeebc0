# SPDX-License-Identifier: Apache-2.0
"""The facts that a run shows before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.engine.config.resolve import zero_section
from wavemare.engine.config.shape import is_enabled
from wavemare.models.convert import tied_weights
from wavemare.observe.memory import estimate_activations, estimate_memory
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.order import ahead
from wavemare.pipeline.staleness.staleness import max_staleness
from wavemare.training.setup import Setup

__all__ = ["count_parameters", "start_up_panel"]

_HALF, _SINGLE = 2, 4


def start_up_panel(
    setup: Setup, model: Any, corpus: Mapping[str, object]
) -> dict[str, Mapping[str, object]]:
    """Return the rows of the start-up panel by group.

    Args:
        setup: Of the run.
        model: The whole transformers model.
        corpus: Rows about the data.
    """
    shape, batch, section = model.config, setup.batch, setup.section
    length, samples = setup.arguments.sequence_length, str(batch["train_batch_size"])
    if section.parallel.given:  # the engine makes its plan, which is shown then
        layout = {"processes": str(setup.world_size), "plan": "wavemare.parallel's, see below"}
        memory = "see the plan"
    else:
        layout = _layout(setup)
        micro, accumulation = list(batch.values())[1:]
        samples += f" = {micro} x {accumulation} micro-batches x {setup.data_ranks} replicas"
        memory = _memory(setup, model)
    return {
        "model": {
            "architecture": type(model).__name__,
            "parameters": f"{count_parameters(setup, model) / 1e6:.2f} M",
            "layers x width x heads": f"{shape.num_hidden_layers} x {shape.hidden_size} x "
            f"{shape.num_attention_heads}",
        },
        "layout": layout,
        "batch": {
            "samples per step": samples,
            "tokens per step": batch["train_batch_size"] * length,
            "steps": setup.arguments.max_steps,
        },
        "corpus": corpus,
        "memory": {"estimate per rank": memory},
    }


def count_parameters(setup: Setup, model: Any) -> int:
    """Return the trained parameters of all stages, with the copies of untied weights."""
    pipeline = setup.section.pipeline
    untied = tied_weights(model) if pipeline.stages > 1 and pipeline.unties else []
    own = sum(parameter.numel() for parameter in model.parameters())
    return own + sum(tie.num_parameters for tie in untied)


def _layout(setup: Setup) -> dict[str, str]:
    section, config = setup.section, setup.balance.config
    stages, parts = section.pipeline.stages, section.tensor_parallel.size
    schedule = _schedule(section.pipeline, setup.batch["gradient_accumulation_steps"])
    waves = section.wavelet.mode
    return {
        "processes": f"{setup.world_size} = {stages} stages x {setup.data_ranks} replicas"
        + (f" x {parts} ranks that share layers" if parts > 1 else ""),
        "schedule": f"{schedule}, ZeRO {zero_section(config).get('stage', 0)}"
        + (f", waves {waves}" if waves != "off" else ""),
    }


def _schedule(pipeline: PipelineConfig, micro_batches: int) -> str:
    if pipeline.stages == 1:
        return "data parallel"
    if pipeline.schedule != "pipemare":
        return pipeline.schedule.upper()
    stages, slack = pipeline.stages, pipeline.pipemare.slack
    stale = [max_staleness(stage, stages, micro_batches, slack) for stage in range(stages)]
    return f"PipeMare (staleness by stage {', '.join(map(str, stale))})"


def _micro_batches_in_memory(pipeline: PipelineConfig, micro_batches: int) -> int:
    """Return how many micro-batches' activations the first stage keeps at most."""
    if pipeline.schedule == "pipemare":
        return 1 + ahead(0, pipeline.stages, pipeline.pipemare.slack)
    # Another schedule keeps no micro-batch of the next step.
    most = 2 * pipeline.stages - 1 if pipeline.overlap_forward_backward else pipeline.stages
    return min(most, micro_batches)


def _memory(setup: Setup, model: Any) -> str:
    shape, config, section = model.config, setup.balance.config, setup.section
    pipeline = section.pipeline
    half = any(is_enabled(config, key) for key in ("bf16", "fp16"))
    bytes_per_value = _HALF if half else _SINGLE
    activations = estimate_activations(
        batch=setup.batch["train_micro_batch_size_per_gpu"],
        sequence=setup.arguments.sequence_length,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        layers=-(-shape.num_hidden_layers // pipeline.stages),
        vocabulary=shape.vocab_size,
        bytes_per_value=bytes_per_value,
        micro_batches=_micro_batches_in_memory(
            pipeline, setup.batch["gradient_accumulation_steps"]
        ),
        tensor_world_size=section.tensor_parallel.size,
    )
    estimate = estimate_memory(
        -(-count_parameters(setup, model) // section.model_ranks),
        bytes_per_parameter=bytes_per_value,
        zero_stage=zero_section(config).get("stage", 0),
        data_world_size=setup.data_ranks,
        activations=activations,
    )
    return str(estimate)
