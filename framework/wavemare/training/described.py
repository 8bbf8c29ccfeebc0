# SPDX-License-Identifier: Apache-2.0
"""A model by Megatron's options: the configuration of transformers that computes the same.

The options change what Megatron would say of the recipe's own model, a folder's or a checkpoint's;
`wavemare.megatron.config` makes a configuration of the result.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from wavemare.errors import ConfigError, ModelError, WavemareError
from wavemare.training.megatron import MODEL, TABLE, given

SIZES = {"num_layers": "num_hidden_layers"} | {
    name: name for name in ("hidden_size", "num_attention_heads", "max_position_embeddings")
}
"""transformers' names of the sizes that every model has, by Megatron's."""
_TRAINED = (
    "hidden_dropout",
    "attention_dropout",
    "init_method_std",
    "moe_aux_loss_coeff",
    "moe_router_load_balancing_type",
)
"""Options that say how a model is trained, whatever its weights are."""
_BALANCED = ("aux_loss", "none")
_ROWS = 2**18  # of a vocabulary whose size is not known yet
_OF_TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "dtype", "architectures")


def described(values: Mapping[str, Any], options: Any) -> dict[str, Any]:
    """Return a transformers configuration as the options change it.

    Args:
        values: Of the recipe's model, with its ``model_type``.
        options: The recipe's.

    Raises:
        ConfigError: The options do not describe a model of the families that there are.
    """
    asked = given(options, MODEL)
    if not asked:
        return dict(values)
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[values["model_type"]]
    sizes = {name: asked[name] for name in SIZES if name in asked}
    known = _arguments(values)
    if known is None:
        return _resized(values, kind, asked, sizes)
    changes = _changes(asked, known)
    config = _config({**known, **changes}, asked)
    own = {k: v for k, v in config.to_diff_dict().items() if k not in _OF_TOKENS}
    if config.model_type == values["model_type"]:
        before, now = _config(known, asked).to_dict(), config.to_dict()
        own = {kind.attribute_map.get(name, name): value for name, value in values.items()}
        own |= {name: value for name, value in now.items() if value != before[name]}
    return own | _training(config.model_type, asked)


def check_agreement(config: Any, options: Any, key: str, folder: str) -> dict[str, Any]:
    """Check that options which describe a model agree with one that there is.

    Args:
        config: Of the model, of transformers.
        options: The recipe's.
        key: The option that names where the model comes from.
        folder: Where it comes from.

    Returns:
        The options that say how it is trained, as values of its configuration.

    Raises:
        ConfigError: Naming the first option that does not.
    """
    asked = given(options, MODEL)
    own = {name: value for name, value in asked.items() if name not in _TRAINED}
    known = _arguments(config.to_dict())
    if own and known is None:
        name = TABLE[next(iter(own))].name
        reason = f"{key} {folder} holds a {config.model_type}, which they do not describe"
        raise ConfigError(f"--{name}", next(iter(own.values())), reason, "Leave it out")
    if not options.use_checkpoint_args:
        for name, value in (_changes(own, known or {}) if own else {}).items():
            theirs = (known or {}).get(name)
            if not _same(value, theirs):
                option = _OPTION_OF.get(name, name)
                if option not in TABLE:
                    continue
                reason = f"the model in {folder} has {theirs}"
                remedy = "Give that, or leave out what describes the model (--use-checkpoint-args)"
                raise ConfigError(f"--{TABLE[option].name}", value, reason, remedy)
    return _training(config.model_type, asked)


def _arguments(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return Megatron's arguments of a configuration; None if Megatron has no such model."""
    import torch
    from transformers import AutoConfig

    from wavemare.megatron.arguments import arguments_of

    try:
        config = AutoConfig.for_model(**{"vocab_size": _ROWS, **values})
        return arguments_of(config, dtype=torch.float32)
    except ModelError:
        return None


def _resized(
    values: Mapping[str, Any], kind: Any, asked: Mapping[str, Any], sizes: Mapping[str, int]
) -> dict[str, Any]:
    """Return another kind of configuration with the sizes that every model has."""
    others = [name for name in asked if name not in SIZES]
    if others:
        reason = f"it does not describe a {values['model_type']}"
        raise ConfigError(f"--{TABLE[others[0]].name}", asked[others[0]], reason, "Leave it out")
    changed = dict(values)
    for name, size in sizes.items():
        changed[kind.attribute_map.get(SIZES[name], SIZES[name])] = size
    if "hidden_size" in sizes and hasattr(kind(), "intermediate_size"):
        changed["intermediate_size"] = 4 * sizes["hidden_size"]
    return changed


_OPTION_OF = {
    "add_bias_linear": "disable_bias_linear",
    "bias_gelu_fusion": "no_bias_gelu_fusion",
    "untie_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
}
"""The options that set arguments of other names."""


def _changes(asked: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that given options change, also those that follow by Megatron's defaults."""
    found = {name: value for name, value in asked.items() if name not in _TRANSLATED}
    for name, (argument, value) in _TRANSLATED.items():
        if name in asked:
            found[argument] = asked[name] if value is None else value
    heads = {"num_attention_heads", "group_query_attention", "num_query_groups"} & asked.keys()
    if heads:
        grouped = bool(asked.get("group_query_attention"))
        if "num_query_groups" in asked and not grouped:
            reason = "without --group-query-attention, Megatron ignores it"
            remedy = "Give both, or none"
            raise ConfigError("--num-query-groups", asked["num_query_groups"], reason, remedy)
        all_heads = asked.get("num_attention_heads", known.get("num_attention_heads"))
        groups = asked.get("num_query_groups", 1) if grouped else all_heads
        found |= {"group_query_attention": groups != all_heads, "num_query_groups": groups}
    width = asked.get("hidden_size", known.get("hidden_size"))
    if {"hidden_size", "num_attention_heads"} & asked.keys() and "kv_channels" not in asked:
        heads_now = asked.get("num_attention_heads", known.get("num_attention_heads"))
        found["kv_channels"] = width // max(heads_now, 1)
    if "hidden_size" in asked and "ffn_hidden_size" not in asked:
        gated = asked.get("swiglu", known.get("swiglu"))
        inner = int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width
        if not inner:
            reason = "with --swiglu the feed-forward layers of so small a model have no width"
            raise ConfigError("--hidden-size", width, reason, "Give --ffn-hidden-size")
        found["ffn_hidden_size"] = inner
    if "window_size" in asked:
        window = re.fullmatch(r"\(?\s*(\d+)\s*,\s*(\d+)\s*\)?", asked["window_size"])
        if window is None:
            reason = "it is no pair of numbers"
            raise ConfigError("--window-size", asked["window_size"], reason, "Give 4095,0")
        found["window_size"] = tuple(map(int, window.groups()))
    return found | _of_experts(asked, known, found)


_TRANSLATED: Mapping[str, tuple[str, Any]] = {
    "disable_bias_linear": ("add_bias_linear", False),
    "no_bias_gelu_fusion": ("bias_gelu_fusion", False),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
    "layernorm_epsilon": ("norm_epsilon", None),
}
"""Options that set an argument of another name, and to which value; None: to their own."""


def _of_experts(
    asked: Mapping[str, Any], known: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what follows for experts."""
    if not asked.get("num_experts", known.get("num_experts")):
        for name in asked:
            if name.startswith("moe_"):
                reason = "the model has no experts"
                raise ConfigError(
                    f"--{TABLE[name].name}", asked[name], reason, "Give --num-experts"
                )
        return {}
    more: dict[str, Any] = {}
    if "num_experts" in asked:
        inner = found.get("ffn_hidden_size", known.get("ffn_hidden_size"))
        more["moe_ffn_hidden_size"] = asked.get("moe_ffn_hidden_size", inner)
        more["moe_router_topk"] = asked.get("moe_router_topk", 2)
        more["moe_router_pre_softmax"] = bool(asked.get("moe_router_pre_softmax"))
        shared = asked.get("moe_shared_expert_intermediate_size")
        more["moe_shared_expert_intermediate_size"] = shared
        more["moe_shared_expert_gate"] = shared is not None
    return more


def _config(arguments: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """Return the configuration of Megatron's arguments.

    Raises:
        ConfigError: No family computes what they say.
    """
    from wavemare.megatron.config import config_of
    from wavemare.megatron.facts import Facts

    try:
        return config_of(Facts(arguments), shapes_of(arguments), vocab_size=_ROWS)
    except WavemareError as error:
        name = str(error.key).removeprefix("args.")
        option = _OPTION_OF.get(name, name)
        if option not in TABLE:
            raise
        key = f"--{TABLE[option].name}"
        remedy = "Give the options that describe a GPT-2, Llama, Qwen or Mixtral, all of them"
        raise ConfigError(key, asked.get(option, error.value), error.reason, remedy) from error


def shapes_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights that Megatron's GPT of some arguments has, by its names, unread."""
    import torch

    from wavemare.models.source import Stored

    a: Any = arguments
    width, size = a["hidden_size"], a["kv_channels"]
    heads = a["num_attention_heads"]
    groups = a["num_query_groups"] if a["group_query_attention"] else heads
    biased = bool(a["add_bias_linear"])
    qkv, gates = (heads + 2 * groups) * size, 2 if a["swiglu"] else 1
    norm = {"weight": (width,)} | ({"bias": (width,)} if a["normalization"] == "LayerNorm" else {})
    layer: dict[str, tuple[int, ...]] = {
        "self_attention.linear_qkv.weight": (qkv, width),
        "self_attention.linear_proj.weight": (width, heads * size),
    }
    for place in ("self_attention.linear_qkv", "mlp.linear_fc1"):
        layer |= {f"{place}.layer_norm_{end}": shape for end, shape in norm.items()}
    if biased or a["add_qkv_bias"]:
        layer["self_attention.linear_qkv.bias"] = (qkv,)
    if biased:
        layer["self_attention.linear_proj.bias"] = (width,)
    if a["qk_layernorm"]:
        layer |= {f"self_attention.{each}_layernorm.weight": (size,) for each in "qk"}
    if a["num_experts"]:
        experts, inner = a["num_experts"], a["moe_ffn_hidden_size"]
        layer["mlp.router.weight"] = (experts, width)
        layer["mlp.experts.linear_fc1.weight"] = (experts, gates * inner, width)
        layer["mlp.experts.linear_fc2.weight"] = (experts, width, inner)
        if shared := a["moe_shared_expert_intermediate_size"]:
            layer["mlp.shared_experts.linear_fc1.weight"] = (gates * shared, width)
            layer["mlp.shared_experts.linear_fc2.weight"] = (width, shared)
            layer["mlp.shared_experts.gate_weight"] = (1, width)
    else:
        inner = a["ffn_hidden_size"]
        layer["mlp.linear_fc1.weight"] = (gates * inner, width)
        layer["mlp.linear_fc2.weight"] = (width, inner)
        if biased:
            layer |= {"mlp.linear_fc1.bias": (gates * inner,), "mlp.linear_fc2.bias": (width,)}
    found: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (_ROWS, width)}
    if a["position_embedding_type"] == "learned_absolute":
        positions = (a["max_position_embeddings"], width)
        found["embedding.position_embeddings.weight"] = positions
    for number in range(a["num_layers"]):
        found |= {f"decoder.layers.{number}.{name}": shape for name, shape in layer.items()}
    found |= {f"decoder.final_layernorm.{end}": shape for end, shape in norm.items()}
    if a["untie_embeddings_and_output_weights"]:
        found["output_layer.weight"] = (_ROWS, width)
    return {name: Stored(shape, torch.float32) for name, shape in found.items()}


def _training(family: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return what options say of the training, as values of a configuration.

    Raises:
        ConfigError: The family's models do not have it.
    """
    values: dict[str, Any] = {}
    dropout = asked.get("hidden_dropout")
    if dropout is not None and family == "gpt2":
        values |= {"resid_pdrop": dropout, "embd_pdrop": dropout}
    elif dropout:
        reason = f"transformers' {family} has no dropout outside of attention"
        raise ConfigError("--hidden-dropout", dropout, reason, "Give 0.0")
    if (dropout := asked.get("attention_dropout")) is not None:
        values["attn_pdrop" if family == "gpt2" else "attention_dropout"] = dropout
    if (deviation := asked.get("init_method_std")) is not None:
        values["initializer_range"] = deviation
    balancing = asked.get("moe_router_load_balancing_type")
    if balancing not in (None, *_BALANCED):
        reason = "the families here balance experts by an auxiliary loss, or not"
        key = "--moe-router-load-balancing-type"
        raise ConfigError(key, balancing, reason, f"Use one of {', '.join(_BALANCED)}")
    factor = 0.0 if balancing == "none" else asked.get("moe_aux_loss_coeff")
    if factor is not None:
        values |= {"router_aux_loss_coef": factor, "output_router_logits": factor > 0}
    return values


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return other is not None and abs(one - other) <= 1e-9 * abs(one)
    return bool(one == other or (not one and not other))
