# SPDX-License-Identifier: Apache-2.0
"""LoRA models of peft: the transformers model inside, and their weights for a folder.

peft is imported only where a model of its class is met.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.engine.parts import own_part
from wavemare.errors import ModelError
from wavemare.models.deferred import become, deferred
from wavemare.models.int8 import Int8Linear
from wavemare.models.quantized import (
    check_quantization,
    is_quantized_layer,
    prepare,
    unquantized,
)

PREFIX = "base_model.model."
"""What stands before a weight's own name in the state dict of a LoRA model."""
_INITIALIZATIONS = {"init_lora_weights", "init_weights"}
"""What says in an adapter's configuration how it begins."""


def is_adapted(model: Any) -> bool:
    """Whether a model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_lora(layer: Any) -> bool:
    """Whether a module is a linear layer with LoRA, whose weight may be quantized."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(layer, peft.tuners.lora.LoraLayer):
        return False
    return type(layer) is peft.tuners.lora.Linear or is_quantized_layer(layer.get_base_layer())


def tuned_layers(model: nn.Module) -> list[Any]:
    """Return the layers of a model that have adapters."""
    peft = sys.modules.get("peft")
    kind = () if peft is None else peft.tuners.tuners_utils.BaseTunerLayer
    return [module for module in model.modules() if isinstance(module, kind)]


def are_merged(model: nn.Module) -> bool:
    """Whether adapters of this rank's layers have been added to the weights."""
    return any(layer.merged for layer in tuned_layers(model))


def base_of(model: Any) -> Any:
    """Return the model inside a LoRA model, with its adapters; another model as it is.

    Raises:
        ModelError: Adapters, or a form of weights, that a pipeline cannot train; or
            ``torch.compile`` has wrapped the model, whose layers cannot be laid out then.
    """
    if hasattr(model, "_orig_mod"):
        raise ModelError(
            "model",
            type(model).__name__,
            "torch.compile has wrapped it, and neither stages nor split layers call the wrapper",
            "Give the model that torch.compile got, and call compile() of each of its blocks",
        )
    if not is_adapted(model):
        if isinstance(model, nn.Module):
            check_quantization(model)
        return model
    configs, base = model.peft_config, model.get_base_model()
    config = next(iter(configs.values()))
    if len(configs) > 1:
        raise _refusal(f"it has {len(configs)} adapters", "Merge all but one")
    if config.peft_type != "LORA":
        raise _refusal(f"its adapters are of the kind {config.peft_type.value}", "Use LoRA")
    if getattr(config, "alora_invocation_tokens", None):
        raise _refusal("its LoRA configuration sets alora_invocation_tokens", "Leave it out")
    check_quantization(base)
    for layer in (base.get_input_embeddings(), base.get_output_embeddings()):
        if type(layer).__module__.startswith("peft."):
            reason = "adapters or modules_to_save stand in place of its embedding or head"
            raise _refusal(reason, "Adapt the layers between them alone")
    return base


def _refusal(reason: str, remedy: str) -> ModelError:
    remedy = f"{remedy}; or train it by ZeRO alone"
    return ModelError(
        "model", "PeftModel", f"{reason}, which neither stages nor tensor_parallel train", remedy
    )


def make_ready(model: nn.Module) -> None:
    """Let a model's quantized layers train in an engine, and its adapters have values.

    Raises:
        ModelError: See `begin_adapters`.
    """
    begin_adapters(model)
    prepare(model)
    for layer in tuned_layers(model):
        if type(layer) is sys.modules["peft"].tuners.lora.Linear:
            _merge_as_torchao(layer, model)


def _merge_as_torchao(layer: Any, model: Any) -> None:
    """Let a LoRA layer be merged as peft does it over int8, which was not there at first."""
    if isinstance(layer.get_base_layer(), Int8Linear):
        from peft.tuners.lora.torchao import TorchaoLoraLinear

        layer.__class__ = TorchaoLoraLinear
        asked = model.get_base_model().config.quantization_config
        layer.get_apply_tensor_subclass = asked.get_apply_tensor_subclass


@torch.no_grad()
def begin_adapters(model: nn.Module) -> None:
    """Give the adapters of a model whose weights are read late their first values.

    peft leaves them on the meta device, where the weights are.

    Raises:
        ModelError: Their first values are computed with the weights.
    """
    for layer in tuned_layers(model):
        unset = [p for p in layer.parameters() if p.is_meta and deferred(p) is None]
        if not unset:
            continue
        (name,) = layer.active_adapters
        config: Any = getattr(model, "peft_config", {}).get(name)
        how = getattr(config, "init_lora_weights", None)
        if not is_lora(layer) or how not in (True, False, "gaussian") or config.use_dora:
            reason = f"adapters that begin with the weights' values ({how}) need them"
            raise _refusal(reason, "Load the base with from_pretrained")
        for factor in (layer.lora_A[name], layer.lora_B[name]):
            new = nn.Linear(factor.in_features, factor.out_features, factor.bias is not None)
            for key, own in new.named_parameters():
                former = factor.get_parameter(key)
                values = nn.Parameter(own.to(former.dtype), former.requires_grad)
                become(former, values)  # optimizers may hold it
        layer.reset_lora_parameters(name, how)


def adapter_names(model: Any) -> set[str]:
    """Return the names of a PEFT model's weights that belong into an adapter's folder."""
    from peft import get_peft_model_state_dict

    with own_part():
        state = model.state_dict(keep_vars=True)
        kept = {
            id(tensor)
            for name in model.peft_config
            for tensor in get_peft_model_state_dict(model, state, name).values()
        }
    return {name for name, tensor in state.items() if id(tensor) in kept}


def whole_without_weights(model: Any, config: Any = None) -> Any:
    """Return a model on the meta device, as it was before it was split over ranks.

    Args:
        model: A transformers model, or a PEFT model of one.
        config: The whole model's; the split one's if omitted.
    """
    base = model.get_base_model() if is_adapted(model) else model
    with torch.device("meta"):
        whole: Any = type(base)(unquantized(base.config if config is None else config))
        if base.can_generate():
            whole.generation_config = base.generation_config
        whole = whole.to(base.dtype)
        return _with_adapters(whole, model) if is_adapted(model) else whole


def _with_adapters(whole: Any, model: Any) -> Any:
    """Return a model with another one's adapters, on the meta device."""
    from peft import get_peft_model

    adapted: Any = None
    for name, config in model.peft_config.items():
        # No initialization: some compute with the weights of the base, and change them.
        empty = copy.deepcopy(config)
        for key in _INITIALIZATIONS & vars(empty).keys():
            setattr(empty, key, False)
        if adapted is None:
            adapted = get_peft_model(whole, empty, name)
        else:
            adapted.add_adapter(name, empty)
        adapted.peft_config[name] = copy.deepcopy(config)  # loading repeats what it says
    adapted.base_model.set_adapter(model.active_adapters)
    return adapted


def merged(model: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the model inside with its adapter merged into them.

    Args:
        model: A PEFT model, whose own weights are not used.
        state: Its state dict.
    """
    whole = whole_without_weights(model)
    whole.load_state_dict(state, assign=True)
    # A safe merge leaves the given tensors, which may be the engine's, as they are.
    return whole.merge_and_unload(safe_merge=True).state_dict()
