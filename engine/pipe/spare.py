# SPDX-License-Identifier: Apache-2.0
"""A weight for a stage that trains none, for DeepSpeed's optimizers of ZeRO and of 16 bits.

These need one on each rank. It takes no part in a pass, so that its gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from torch import nn

from wavemare.engine.config.shape import is_enabled, zero_section
from wavemare.engine.launch.group import gather
from wavemare.errors import ConfigError


def with_spare(model: Any, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    """Give a stage without trained weights one, if an optimizer needs it; all ranks call this.

    Args:
        model: A pipeline's stage gets the weight; another model stays as it is.
        config: DeepSpeed's configuration.
        arguments: Of ``deepspeed.initialize``. An ``optimizer`` that is one, not a function, gets
            the weight, too.

    Returns:
        The ``model_parameters``, with that weight.

    Raises:
        ConfigError: No stage trains a weight.
    """
    parameters = arguments.get("model_parameters")
    if not isinstance(model, deepspeed.PipelineModule):
        return parameters
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if not any(gather(trains)):
        reason = "all weights of all stages are frozen, so there is nothing to train"
        raise ConfigError("model", type(model).__name__, reason, "Let some require gradients")
    wrapped = zero_section(config).get("stage") or is_enabled(config, "bf16")
    if trains or not (wrapped or is_enabled(config, "fp16")):
        return parameters
    spare = nn.Parameter(torch.zeros(1))
    model.register_parameter(f"spare_of_stage_{model.stage_id}", spare)
    groups = getattr(arguments.get("optimizer"), "param_groups", None)
    if groups is not None:
        groups[0]["params"].append(spare)
    if parameters is None:
        return None  # the engine asks the model
    parameters = list(parameters)
    if parameters and isinstance(parameters[0], dict):
        first, *others = parameters
        return [{**first, "params": [*first["params"], spare]}, *others]
    return [*parameters, spare]
