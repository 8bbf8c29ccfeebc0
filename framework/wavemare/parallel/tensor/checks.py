# SPDX-License-Identifier: Apache-2.0
"""Which models can be split over how many ranks, and what is refused."""

from __future__ import annotations

from typing import Any

from wavemare.errors import ModelError
from wavemare.models.adapters import is_adapted
from wavemare.models.deferred import lacks_weights
from wavemare.parallel.tensor.partition import is_split
from wavemare.parallel.tensor.plan import TensorPlan, plan_of

_SPLITS_HEADS = {"colwise", "colwise_qkv"}


def check_adapters(model: Any) -> None:
    """Refuse adapters that read whole rows of a weight."""
    if is_adapted(model) and any(c.use_dora for c in model.peft_config.values()):
        reason = "DoRA needs the norms of whole rows, of which wavemare.tensor_parallel gives parts"
        remedy = "Leave use_dora out, or use pipeline stages or ZeRO"
        raise ModelError("use_dora", True, reason, remedy)


def checked_plan(model: Any) -> TensorPlan:
    """Return the plan of a model that is there, has a head, and has not been split.

    Raises:
        ModelError: It is none.
    """
    plan = plan_of(model)
    name, config = type(model).__name__, model.config
    if is_split(model):
        raise ModelError("model", name, "it has been split already", "Split it once")
    if model.base_model is model:
        raise ModelError("model", name, "it has no head", "Use the class with the head")
    if getattr(config, "add_cross_attention", False) or getattr(config, "is_decoder", False):
        raise ModelError(
            "model",
            name,
            "it is a decoder with an encoder, or BERT as a decoder, which are not split",
            "Set add_cross_attention and is_decoder to false",
        )
    if "linear_attention" in (getattr(config, "layer_types", None) or ()):
        raise refusal(model, "it has layers of kind 'linear_attention'")
    if lacks_weights(model):
        raise ModelError(
            "model",
            name,
            "its weights are not all here: they are on the meta device, or ZeRO-3 has cut them",
            "Load the weights, outside deepspeed.zero.Init, or by wavemare.models.from_folder",
        )
    return plan


def key_copies(model: Any, plan: TensorPlan, ranks: int) -> int:
    """Return how many ranks hold the same heads of keys and values: 1 unless there are fewer.

    Raises:
        ModelError: A rank would not get whole heads, where they are split.
    """
    names = [name for name, style in plan.layers(model.base_model) if style in _SPLITS_HEADS]
    heads = getattr(model.config, "num_attention_heads", None)
    if heads is None or not any("att" in name for name in names):
        return 1
    keys = getattr(model.config, "num_key_value_heads", None) or heads
    owners = {model.base_model.get_submodule(n.rpartition(".")[0]) for n in names if gives_keys(n)}
    repeats = bool(owners) and all(hasattr(owner, "num_key_value_groups") for owner in owners)
    fit = [n for n in range(1, heads + 1) if heads % n == 0]
    fit = [n for n in fit if keys % n == 0 or (repeats and n % keys == 0)]
    if ranks not in fit:
        key = "num_key_value_heads" if heads % ranks == 0 else "num_attention_heads"
        raise ModelError(
            f"config.{key}",
            getattr(model.config, key),
            f"the {ranks} ranks that share a model cannot have whole heads each",
            f"Use {', '.join(map(str, fit))} ranks",
        )
    return max(ranks // int(keys), 1)


def gives_keys(name: str) -> bool:
    """Whether a layer gives keys or values, with heads of their own number."""
    return name.endswith(("attn.k_proj", "attn.v_proj"))


def check_vocabulary(names: dict[Any, str], embedding: Any, head: Any) -> None:
    """Refuse an embedding or a head that is more than its weight, as inside an adapter."""
    for module in (embedding, head):
        if module is None:
            continue
        own = {name for name, _ in module.named_parameters()} - {"weight", "bias"}
        options = [n for n in ("max_norm", "scale_grad_by_freq") if getattr(module, n, None)]
        if own or options:
            found = f"the weight {min(own)}" if own else options[0]
            raise ModelError(
                names[module],
                type(module).__name__,
                f"it has {found}, which wavemare.tensor_parallel does not keep",
                "Leave that out, or use ZeRO",
            )


def refusal(model: Any, reason: str) -> ModelError:
    """Return the error of a model that cannot be split."""
    return ModelError(
        "model",
        type(model).__name__,
        f"wavemare.tensor_parallel cannot split it: {reason}",
        "Use ZeRO; or pipeline stages, if wavemare.models.SUPPORTED names the class",
    )
