# SPDX-License-Identifier: Apache-2.0
"""The facts that a run shows before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.engine.config.resolve import WavemareConfig, zero_section
from wavemare.engine.config.shape import is_enabled
from wavemare.observe import MemoryEstimate, estimate_activations, estimate_memory
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.order import ahead
from wavemare.pipeline.staleness.staleness import max_staleness

__all__ = ["start_up_panel"]

_HALF, _SINGLE = 2, 4


def start_up_panel(
    model: Any,
    corpus: Mapping[str, object],
    *,
    num_parameters: int,
    section: WavemareConfig,
    config: Mapping[str, Any],
    batch: Mapping[str, int],
    sequence_length: int,
    world_size: int,
    steps: int,
) -> dict[str, Mapping[str, object]]:
    """Return the rows of the start-up panel by group.

    Args:
        model: The whole transformers model.
        corpus: Rows about the data.
        num_parameters: That are trained, over all stages.
        section: Ours of the configuration.
        config: DeepSpeed's configuration.
        batch: DeepSpeed's three batch sizes by their keys.
        sequence_length: Tokens per sample.
        world_size: Processes.
        steps: Optimizer steps.
    """
    shape, train = model.config, batch["train_batch_size"]
    data_ranks = world_size // section.model_ranks
    if section.parallel.given:  # the plan that it makes is shown when the engine has it
        layout = {"processes": str(world_size), "plan": "that of wavemare.parallel, see below"}
        samples, memory = f"{train}", "see the plan"
    else:
        layout = _layout(section, config, batch, data_ranks)
        micro, accumulation = list(batch.values())[1:]
        samples = f"{train} = {micro} x {accumulation} micro-batches x {data_ranks} replicas"
        memory = str(
            _memory(shape, num_parameters, config, batch, sequence_length, section, data_ranks)
        )
    return {
        "model": {
            "architecture": type(model).__name__,
            "parameters": f"{num_parameters / 1e6:.2f} M",
            "layers x width x heads": f"{shape.num_hidden_layers} x {shape.hidden_size} x "
            f"{shape.num_attention_heads}",
        },
        "layout": layout,
        "batch": {
            "samples per step": samples,
            "tokens per step": train * sequence_length,
            "steps": steps,
        },
        "corpus": corpus,
        "memory": {"estimate per rank": memory},
    }


def _layout(
    section: WavemareConfig, config: Mapping[str, Any], batch: Mapping[str, int], data_ranks: int
) -> dict[str, str]:
    stages, parts = section.pipeline.stages, section.tensor_parallel.size
    schedule = _schedule(section.pipeline, batch["gradient_accumulation_steps"])
    return {
        "processes": f"{data_ranks * section.model_ranks} = {stages} stages x {data_ranks} replicas"
        + (f" x {parts} ranks that share layers" if parts > 1 else ""),
        "schedule": f"{schedule}, ZeRO {zero_section(config).get('stage', 0)}"
        + (f", waves {section.wavelet.mode}" if section.wavelet.mode != "off" else ""),
    }


def _schedule(pipeline: PipelineConfig, micro_batches: int) -> str:
    if pipeline.stages == 1:
        return "data parallel"
    if pipeline.schedule != "pipemare":
        return pipeline.schedule.upper()
    stages, slack = pipeline.stages, pipeline.pipemare.slack
    stale = [max_staleness(stage, stages, micro_batches, slack) for stage in range(stages)]
    return f"PipeMare (staleness by stage {', '.join(map(str, stale))})"


def _kept_on_the_first_stage(pipeline: PipelineConfig, micro_batches: int) -> int:
    if pipeline.schedule == "pipemare":
        return 1 + ahead(0, pipeline.stages, pipeline.pipemare.slack)
    # No micro-batch of the next step.
    most = 2 * pipeline.stages - 1 if pipeline.pair_passes else pipeline.stages
    return min(most, micro_batches)


def _memory(
    shape: Any,
    num_parameters: int,
    config: Mapping[str, Any],
    batch: Mapping[str, int],
    sequence_length: int,
    section: WavemareConfig,
    data_ranks: int,
) -> MemoryEstimate:
    pipeline = section.pipeline
    stages, micro_batches = pipeline.stages, batch["gradient_accumulation_steps"]
    half = any(is_enabled(config, key) for key in ("bf16", "fp16"))
    bytes_per_value = _HALF if half else _SINGLE
    activations = estimate_activations(
        batch=batch["train_micro_batch_size_per_gpu"],
        sequence=sequence_length,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        layers=-(-shape.num_hidden_layers // stages),
        vocabulary=shape.vocab_size,
        bytes_per_value=bytes_per_value,
        micro_batches=_kept_on_the_first_stage(pipeline, micro_batches),
        tensor_world_size=section.tensor_parallel.size,
    )
    return estimate_memory(
        -(-num_parameters // section.model_ranks),
        bytes_per_parameter=bytes_per_value,
        zero_stage=zero_section(config).get("stage", 0),
        data_world_size=data_ranks,
        activations=activations,
    )
