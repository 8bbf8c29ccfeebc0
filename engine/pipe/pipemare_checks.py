# SPDX-License-Identifier: Apache-2.0
"""What a model must not have to be trained by stages that never meet."""

from __future__ import annotations

from typing import Any

from wavemare.errors import ConfigError, ModelError

__all__ = ["check_losses", "check_model"]


def check_model(engine: Any) -> None:
    """Check the model and topology of an engine that is being built.

    Raises:
        ConfigError: The topology's model axis holds weights of which it is not known who has them.
        ModelError: Weights are tied.
    """
    tied = engine.module.tied_comms
    if tied:
        raise ModelError(
            "tied layers",
            ", ".join(sorted(tied)),
            "stages that share a weight must meet at each step, and asynchronous ones never do",
            "Use LayerSpec instead of TiedLayerSpec (to_pipeline: untie=True), or schedule 1f1b",
        )
    splits = engine.grid.get_slice_parallel_world_size() > 1
    if splits and not getattr(engine.module, "sends_whole", False):
        raise ConfigError(
            "wavemare.pipeline.schedule",
            "pipemare",
            "the topology has a model axis, of whose ranks it is not known which weights they all "
            "hold and which they split",
            "Use the axes pipe and data alone, a model split by wavemare.tensor_parallel, or "
            "schedule 1f1b",
        )


def check_losses(module: Any) -> None:
    """Check a model after a forward pass.

    Raises:
        ModelError: It has losses besides the loss function's.
    """
    if module.get_additional_losses() is not None:
        raise ModelError(
            "get_additional_losses",
            type(module).__name__,
            "the schedule pipemare carries one loss",
            "Add them up in the loss function, or use schedule 1f1b",
        )
