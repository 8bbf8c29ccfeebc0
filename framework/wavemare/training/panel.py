# SPDX-License-Identifier: Apache-2.0
"""The facts that a run shows before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.engine.config.resolve import zero_section
from wavemare.models.convert import tied_weights
from wavemare.training.setup import Setup

__all__ = ["count_parameters", "start_up_panel"]


def start_up_panel(
    setup: Setup, model: Any, corpus: Mapping[str, object]
) -> dict[str, Mapping[str, object]]:
    """Return the rows of the start-up panel by group, for a whole transformers model."""
    shape, batch, section = model.config, setup.batch, setup.section
    length, samples = setup.arguments.sequence_length, str(batch["train_batch_size"])
    if section.parallel.given:  # the engine makes its plan, which is shown then
        layout = {"processes": str(setup.world_size), "plan": "wavemare.parallel's, see below"}
    else:
        layout = _layout(setup)
        micro, accumulation = list(batch.values())[1:]
        samples += f" = {micro} x {accumulation} micro-batches x {setup.data_ranks} replicas"
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
    }


def count_parameters(setup: Setup, model: Any) -> int:
    """Return the trained parameters of all stages, with the copies of untied weights."""
    pipeline = setup.section.pipeline
    untied = tied_weights(model) if pipeline.stages > 1 and pipeline.unties else []
    own = sum(parameter.numel() for parameter in model.parameters())
    return own + sum(tie.num_parameters for tie in untied)


def _layout(setup: Setup) -> dict[str, str]:
    section = setup.section
    stages, parts, waves = (
        section.pipeline.stages,
        section.tensor_parallel.size,
        section.wavelet.mode,
    )
    return {
        "processes": f"{setup.world_size} = {stages} stages x {setup.data_ranks} replicas"
        + (f" x {parts} ranks that share layers" if parts > 1 else ""),
        "schedule": (section.pipeline.schedule if stages > 1 else "data parallel")
        + f", ZeRO {zero_section(setup.balance.config).get('stage', 0)}"
        + (f", waves {waves}" if waves != "off" else ""),
    }
