# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own models under our engines: what Megatron's training loop does beside backward.

Nothing here imports megatron-core: whoever has built such a model has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from wavemare.errors import ConfigError, ModelError
from wavemare.parallel.layout.grid import ProcessGrid
from wavemare.parallel.tensor.layers import sum_gradients

_UNLIKE = {
    "gradient_accumulation_fusion": (
        "its kernels add gradients to main_grad, where our engines do not look"
    ),
    "moe_router_enable_expert_bias": "Megatron's training loop moves this bias, our engines do not",
    "calculate_per_token_loss": (
        "it divides by the tokens of the whole batch, our engines by those of each micro-batch"
    ),
}
_SCALERS = {
    "megatron.core.transformer.moe.moe_utils": "MoEAuxLossAutoScaler",
    "megatron.core.transformer.multi_token_prediction": "MTPLossAutoScaler",
}
_hooks = WeakIdKeyDictionary()
"""Handle by parameter: a model may get one engine after another."""


def prepare_core(model: Any, mpu: Any) -> None:
    """Have the engine train a model of megatron-core as Megatron does; other models are let alone.

    Args:
        model: Any module.
        mpu: A `ProcessGrid` or None, as ``initialize`` has it.

    Raises:
        ConfigError: The model is split over ranks of which ``mpu`` does not know.
        ModelError: The model is a stage, or its configuration asks for what only Megatron's
            training loop does.
    """
    module = sys.modules.get("megatron.core.transformer.module")
    if module is None or not isinstance(model, module.MegatronModule):
        return
    config, name = model.config, type(model).__name__
    if hasattr(model, "ddp_config"):
        reason = "it reduces gradients by itself, as our engines do"
        remedy = "Give the model that it wraps: megatron.core.utils.unwrap_model(model)"
        raise ModelError("model", name, reason, remedy)
    for key, reason in _UNLIKE.items():
        if getattr(config, key, False):
            remedy = f"Build the model with {key}=False"
            raise ModelError(f"model.config.{key}", True, reason, remedy)
    if not (getattr(model, "pre_process", True) and getattr(model, "post_process", True)):
        reason = "it is one stage of a model, whose inputs come from another rank"
        remedy = "Build it whole, or train load_hf(folder) with wavemare.pipeline.stages"
        raise ModelError("model", name, reason, remedy)
    size = getattr(config, "tensor_model_parallel_size", 1)
    grid = mpu if isinstance(mpu, ProcessGrid) else None
    known = grid.tensor.size if grid else 1
    if size != known:
        reason = f"{name} is split over {size} tensor-parallel ranks, and mpu has {known}"
        remedy = "Give mpu=megatron.core.parallel_state, initialized with that size"
        raise ConfigError("mpu", None if grid is None else "ProcessGrid", reason, remedy)
    if grid is not None and size > 1:
        for parameter in _partial(model):
            if (before := _hooks.pop(parameter, None)) is not None:
                before.remove()
            _hooks[parameter] = sum_gradients(parameter, grid.tensor.group)


def _partial(model: Any) -> Iterator[nn.Parameter]:
    """Yield the whole parameters that each tensor-parallel rank uses on its part of the values.

    Megatron adds up their gradients at the end of a step.
    """
    config = model.config
    for name, parameter in model.named_parameters():
        by_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        by_tokens = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            reason = "its gradient is the mean of the tensor-parallel ranks', not the sum"
            raise ModelError("model", name, reason, "Train it with one tensor-parallel rank")
        if parameter.requires_grad and (by_heads or by_tokens):
            yield parameter


def scale_auxiliary_losses(engine: Any, micro_steps: int) -> None:
    """Scale the losses that layers add in the backward pass as the engine scales a micro-batch's.

    Args:
        engine: Any data-parallel engine.
        micro_steps: Micro-batches per step.
    """
    scale = float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0) / micro_steps
    for name, scaler in _SCALERS.items():
        if (module := sys.modules.get(name)) is not None:
            getattr(module, scaler).set_loss_scale(torch.tensor(scale, device=engine.device))
