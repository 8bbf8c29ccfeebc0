# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments of a transformers configuration; `config.py` has the other way."""

from __future__ import annotations

from typing import Any

import torch

from wavemare.errors import ModelError
from wavemare.megatron.keys import heads_of

FAMILIES = (
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
)
OTHER = "Convert a model without it"
TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""What Megatron's ``--use-rope-scaling`` has in its source."""


def language_model_of(config: Any) -> Any:
    """Return transformers' causal language model of a configuration of one of `FAMILIES`."""
    import transformers

    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def arguments_of(config: Any, *, dtype: torch.dtype, divisible_by: int = 128) -> dict[str, Any]:
    """Return Megatron's arguments of a transformers configuration.

    Args:
        config: Of one of `FAMILIES`.
        dtype: Of the weights.
        divisible_by: The vocabulary is padded to a multiple of this.

    Raises:
        ModelError: Megatron's GPT does not compute what the configuration says.
    """
    family = config.model_type
    if family not in FAMILIES:
        reason = "there is no table of its weights"
        raise ModelError("model", family, reason, f"Give one of {', '.join(FAMILIES)}")
    heads = heads_of(config)
    rows = -(-config.vocab_size // divisible_by) * divisible_by
    own = _arguments_of_gpt2(config) if family == "gpt2" else _arguments_of_llama(config)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads.queries,
        "group_query_attention": heads.groups != heads.queries,
        "num_query_groups": heads.groups,
        "kv_channels": heads.size,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": divisible_by,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "init_method_std": config.initializer_range,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "apply_layernorm_1p": False,
        "apply_query_key_layer_scaling": False,
        "squared_relu": False,
        "multi_latent_attention": False,
        "transformer_impl": "transformer_engine",
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "ckpt_format": "torch_dist",
        "consumed_train_samples": 0,
        "consumed_valid_samples": 0,
        **_arguments_of_experts(config),
        **own,
    }


def _arguments_of_gpt2(config: Any) -> dict[str, Any]:
    activation = config.activation_function
    if activation not in (*TANH, "gelu"):
        reason = "Megatron's GPT has GELU, exact or by tanh"
        raise ModelError("activation_function", activation, reason, "Use a model with GELU")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        reason = "Megatron scales attention by the square root of a head's size"
        name = "scale_attn_weights"
        if config.scale_attn_weights:
            name = "scale_attn_by_inverse_layer_idx"
        raise ModelError(name, getattr(config, name), reason, "Use a model with the usual scale")
    if config.add_cross_attention:
        raise ModelError("add_cross_attention", True, "Megatron's GPT has none", OTHER)
    return {
        "ffn_hidden_size": config.n_inner or 4 * config.hidden_size,
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": config.layer_norm_epsilon,
        "swiglu": False,
        "bias_gelu_fusion": activation in TANH,
        "openai_gelu": activation in ("gelu_new", "gelu_pytorch_tanh"),
        "add_bias_linear": True,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "attention_dropout": config.attn_pdrop,
        "hidden_dropout": config.resid_pdrop,
    }


def _arguments_of_llama(config: Any) -> dict[str, Any]:
    family = config.model_type
    if config.hidden_act != "silu":
        reason = "Megatron's gated layers have SiLU"
        raise ModelError("hidden_act", config.hidden_act, reason, "Use a model with silu")
    attention_bias = bool(getattr(config, "attention_bias", False))
    bias = bool(getattr(config, "mlp_bias", False))
    if attention_bias != bias:
        reason = "Megatron has biases in all linear layers, in query, key and value, or in none"
        raise ModelError("attention_bias", attention_bias, reason, OTHER)
    return {
        "ffn_hidden_size": config.intermediate_size,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps,
        "swiglu": True,
        "bias_swiglu_fusion": True,
        "openai_gelu": False,
        "add_bias_linear": bias,
        "add_qkv_bias": family == "qwen2" or (family == "qwen2_moe" and bool(config.qkv_bias)),
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": 0.0,
        "window_size": _window_of(config),
        **_rotary(config),
    }


def _window_of(config: Any) -> tuple[int, int] | None:
    kinds = set(getattr(config, "layer_types", None) or [])
    window = getattr(config, "sliding_window", None)
    if config.model_type not in ("mistral", "mixtral"):
        if "sliding_attention" in kinds:
            reason = "some layers have a window and others none, or the family has none in Megatron"
            raise ModelError("use_sliding_window", True, reason, OTHER)
        return None
    if not window or window >= config.max_position_embeddings:
        return None  # no query has so many tokens before it
    return int(window) - 1, 0


def _rotary(config: Any) -> dict[str, Any]:
    rope = dict(config.rope_parameters or {})
    kind, partial = rope.get("rope_type", "default"), rope.get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        reason = "the families that are converted rotate whole heads"
        raise ModelError("partial_rotary_factor", partial, reason, OTHER)
    scaled = kind == "llama3"
    known = kind == "default" or (scaled and all(rope.get(k) == v for k, v in LLAMA3.items()))
    if not known:
        reason = f"Megatron scales rotary positions as Llama 3 does, with {LLAMA3}, or not"
        raise ModelError("rope_parameters", rope, reason, OTHER)
    theta = rope.get("rope_theta", 10000.0)
    return {
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "use_rope_scaling": scaled,
        "rope_scaling_factor": rope.get("factor", 8.0),
    }


def _arguments_of_experts(config: Any) -> dict[str, Any]:
    family = config.model_type
    if family not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return {"num_experts": None, "moe_layer_freq": 1}
    mixtral = family == "mixtral"
    if not mixtral and (config.decoder_sparse_step != 1 or config.mlp_only_layers):
        reason = "some layers have no experts, and Megatron's would have to be listed"
        name = "mlp_only_layers" if config.mlp_only_layers else "decoder_sparse_step"
        raise ModelError(name, getattr(config, name), reason, OTHER)
    normalized = mixtral or config.norm_topk_prob
    if normalized and config.num_experts_per_tok == 1:
        reason = "Megatron's router does not normalise the probability of a single expert"
        raise ModelError("num_experts_per_tok", 1, reason, OTHER)
    coefficient = config.router_aux_loss_coef
    inner = config.intermediate_size if mixtral else config.moe_intermediate_size
    shared = config.shared_expert_intermediate_size if family == "qwen2_moe" else None
    return {
        "num_experts": config.num_local_experts if mixtral else config.num_experts,
        "moe_layer_freq": 1,
        "moe_ffn_hidden_size": inner,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not normalized,
        "moe_router_score_function": "softmax",
        "moe_router_load_balancing_type": "aux_loss" if coefficient else "none",
        "moe_aux_loss_coeff": coefficient,
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": shared is not None,
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "alltoall",
    }
