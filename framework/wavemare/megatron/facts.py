# SPDX-License-Identifier: Apache-2.0
"""What a Megatron checkpoint says of its model, whoever wrote it: by Megatron-LM's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from wavemare.errors import ModelError
from wavemare.megatron.arguments import OTHER

# Bridge's names of what Megatron-LM's arguments say.
_BRIDGE: dict[str, str] = {
    "bias_activation_fusion": "bias_gelu_fusion",
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
}
_WHOLE = {
    "consumed_train_samples",
    "ffn_hidden_size",
    "hidden_size",
    "kv_channels",
    "max_position_embeddings",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "moe_shared_expert_intermediate_size",
    "num_attention_heads",
    "num_experts",
    "num_layers",
    "num_query_groups",
    "vocab_size",
}
_NUMBERS = {
    "attention_dropout",
    "hidden_dropout",
    "init_method_std",
    "layernorm_epsilon",
    "moe_aux_loss_coeff",
    "norm_epsilon",
    "rope_scaling_factor",
    "rotary_base",
    "softmax_scale",
}
_FLAGS = {
    "add_bias_linear",
    "add_qkv_bias",
    "apply_layernorm_1p",
    "bias_gelu_fusion",
    "group_query_attention",
    "moe_router_pre_softmax",
    "openai_gelu",
    "qk_layernorm",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "use_rotary_position_embeddings",
}
_LISTED = {"moe_aux_loss_coeff"}  # one number, or one for each kind of balancing


def _wrong_type(name: str, value: Any) -> str:
    """Return why a value is none of its argument; empty if it is one."""
    if name in _FLAGS:
        return "" if isinstance(value, bool) else "it is neither true nor false"
    if name not in _WHOLE | _NUMBERS:
        return ""
    kinds = int if name in _WHOLE else int | float
    each = value if name in _LISTED and isinstance(value, list | tuple) and value else [value]
    if all(isinstance(n, kinds) and not isinstance(n, bool) and math.isfinite(n) for n in each):
        return ""
    return "it is no whole number" if name in _WHOLE else "it is no number"


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of its model.

    Attributes:
        values: By the names of Megatron-LM's arguments.
        place: Where they stand, as the first words of an error's key.
        names: Names that differ there.
        target: The class that Megatron-Bridge would make.
        legacy: Whether Megatron's legacy models wrote it, whose defaults are others.
    """

    values: Mapping[str, Any]
    place: str = "args."
    names: Mapping[str, str] | None = None
    target: str = ""
    legacy: bool = False

    def key(self, name: str) -> str:
        """Return how an error calls an argument."""
        return self.place + (self.names or {}).get(name, name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, or the default if the checkpoint does not say it.

        Raises:
            ModelError: It is of another type than Megatron's.
        """
        value = self.values.get(name)
        if value is None:
            return default
        reason = _wrong_type(name, value)
        if reason:
            remedy = (
                "Correct it there" if self.names else "Save the checkpoint again with a right one"
            )
            raise ModelError(self.key(name), value, reason, remedy)
        return value


def facts_of(
    arguments: Mapping[str, Any], run_config: Mapping[str, Any] | None, *, legacy: bool = False
) -> Facts:
    """Return what Megatron-LM's arguments or, without them, Bridge's ``run_config.yaml`` say.

    Args:
        arguments: Megatron-LM's.
        run_config: Bridge's, parsed.
        legacy: See `Facts`.

    Raises:
        ModelError: Bridge's activation is none of the families'.
    """
    if arguments or not run_config or not isinstance(run_config.get("model"), Mapping):
        return Facts(dict(arguments), legacy=legacy)
    model = dict(run_config["model"])
    inner = model.get("transformer")
    if isinstance(inner, Mapping):  # of Megatron-LM's own models
        model |= inner
    values: dict[str, Any] = {_BRIDGE.get(str(n), str(n)): value for n, value in model.items()}
    place = "run_config.yaml: model."
    activation = model.get("activation_func")
    if isinstance(activation, Mapping):
        activation = activation.get("_target_")
    gated, short = bool(model.get("gated_linear_unit")), str(activation).rpartition(".")[2]
    if activation is not None and short != ("silu" if gated else "gelu"):
        reason = "the families that are converted have SiLU with a gate, or GELU without"
        raise ModelError(f"{place}activation_func", activation, reason, OTHER)
    values["swiglu"] = gated
    shares = model.get("share_embeddings_and_output_weights")
    values["untie_embeddings_and_output_weights"] = (
        not shares if isinstance(shares, bool) else shares
    )
    values["group_query_attention"] = model.get("num_query_groups") is not None
    values.setdefault("max_position_embeddings", model.get("seq_length"))
    names = {ours: theirs for theirs, ours in _BRIDGE.items()} | {"swiglu": "gated_linear_unit"}
    return Facts(values, place, names, str(model.get("_target_", "")))
