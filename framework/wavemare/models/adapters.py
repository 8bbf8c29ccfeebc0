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

PREFIX = "base_model.model."
"""What stands before a weight's own name in the state dict of a LoRA model."""
_INITIALIZATIONS = {"init_lora_weights", "init_weights"}
"""What says in an adapter's configuration how it begins."""


def is_adapted(model: Any) -> bool:
    """Whether a model is a ``PeftModel``."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_lora(layer: Any) -> bool:
    """Whether a module is a linear layer with LoRA."""
    peft = sys.modules.get("peft")
    return peft is not None and type(layer) is peft.tuners.lora.Linear


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
        ModelError: Adapters that a pipeline cannot train.
    """
    if not is_adapted(model):
        return model
    configs, base = model.peft_config, model.get_base_model()
    config = next(iter(configs.values()))
    if len(configs) > 1:
        raise _refusal(f"it has {len(configs)} adapters", "Merge all but one")
    if config.peft_type != "LORA":
        raise _refusal(f"its adapters are of the kind {config.peft_type.value}", "Use LoRA")
    for key in ("use_dora", "alora_invocation_tokens"):
        if getattr(config, key, None):
            raise _refusal(f"its LoRA configuration sets {key}", "Leave it out")
    if getattr(base, "is_quantized", False) or not all(
        p.is_floating_point() for p in base.parameters()
    ):
        raise _refusal("its base is quantized", "Load the base in bf16")
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
        whole: Any = type(base)(base.config if config is None else config)
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
