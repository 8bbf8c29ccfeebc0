# SPDX-License-Identifier: Apache-2.0
"""Transformers models and Megatron's arguments: each from the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ModelError
from wavemare.megatron.files import said_by
from wavemare.megatron.weights import EMBEDDING, HEAD, POSITIONS, needed, num_layers

_HEADS = ("GPT2LMHeadModel", "GPT2Model")  # what the latter lacks is its embedding
_GPT2_END = 50256  # OpenAI's <|endoftext|>; a smaller vocabulary is not theirs
# With any other value Megatron computes something else of the same weights.
_USUAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("learned_absolute",),
    "use_rotary_position_embeddings": (False,),
    "normalization": ("LayerNorm",),
    "apply_layernorm_1p": (False,),
    "apply_residual_connection_post_layernorm": (False,),
    "squared_relu": (False,),
    "swiglu": (False,),
    "quick_geglu": (False,),
    "group_query_attention": (False,),
    "multi_latent_attention": (False,),
    "num_experts": (0,),
}
_TANH = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")


def load_model(folder: str | Path) -> Any:
    """Load GPT-2 with its head, in the type of its file.

    Raises:
        ModelError: The folder holds no such model, or a damaged one.
    """
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of wrong values, too, for which transformers has its own
        reason = f"it holds no model of transformers ({said_by(error)})"
        raise ModelError("model", str(folder), reason, "Name a folder with config.json") from error
    named = (config.architectures or _HEADS)[0]
    if config.model_type != "gpt2" or named not in _HEADS:
        reason = "only GPT-2 as a language model is converted"
        raise ModelError("model", config.model_type, reason, "Give GPT-2")
    try:
        kind = transformers.GPT2LMHeadModel
        return kind.from_pretrained(folder, dtype="auto", local_files_only=True)
    except Exception as error:  # pickle, safetensors and transformers each have errors of their own
        reason = f"its weights cannot be read ({said_by(error)})"
        raise ModelError("model", str(folder), reason, "Copy its files again") from error


def model_of(config: Any, state: Mapping[str, Tensor]) -> Any:
    """Build the GPT-2 of a configuration around these weights.

    Raises:
        ModelError: The weights are not those of the model.
    """
    import transformers

    with torch.device("meta"):
        model: Any = transformers.GPT2LMHeadModel(config)
    try:
        model.load_state_dict(dict(state), strict=True, assign=True)
    except RuntimeError as error:
        reason = f"the weights are not those of GPT-2 ({str(error).splitlines()[1].strip()})"
        raise ModelError("weights", "GPT-2", reason, "Use an undamaged checkpoint") from error
    model.tie_weights()
    return model


def arguments_of(config: Any, padded_vocab_size: int) -> dict[str, Any]:
    """Return Megatron's arguments of a transformers configuration.

    Raises:
        ModelError: It has an activation or a scaling that Megatron does not have.
    """
    activation = config.activation_function
    if activation not in (*_TANH, "gelu"):
        reason = "Megatron's GPT has GELU, exact or by tanh"
        raise ModelError("activation", activation, reason, "Use a model with GELU")
    if not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx:
        reason = "Megatron scales attention by the square root of a head's size"
        raise ModelError("scale_attn_weights", False, reason, "Use a model with the usual scale")
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.n_inner or 4 * config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "norm_epsilon": config.layer_norm_epsilon,
        "layernorm_epsilon": config.layer_norm_epsilon,  # of older versions
        "bias_gelu_fusion": False,
        "openai_gelu": activation in _TANH,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "add_position_embedding": True,
    }


def check_arguments(arguments: Mapping[str, Any], hidden: int, ranks: int) -> None:
    """Refuse arguments under which Megatron computes what GPT-2 does not.

    Args:
        arguments: Megatron's, as far as the files have them.
        hidden: Width of the model.
        ranks: That share a layer.

    Raises:
        ModelError: One of them is not the usual one, or the heads do not divide the weights.
    """
    for name, usual in _USUAL.items():
        value = arguments.get(name)
        if value is not None and value not in usual:
            reason = "GPT-2 in transformers does not compute this"
            raise ModelError(f"args.{name}", value, reason, "Convert a model without it")
    heads = arguments.get("num_attention_heads")
    if heads is None:
        reason = "the checkpoint does not say it, and no weight shows it"
        raise ModelError("num_attention_heads", None, reason, "Give --num-attention-heads")
    if heads < 1 or hidden % heads or heads % ranks:
        reason = f"a width of {hidden} on {ranks} tensor-parallel ranks cannot have so many"
        raise ModelError("num_attention_heads", heads, reason, "Give --num-attention-heads")
    width = arguments.get("kv_channels")
    if width is not None and width != hidden // heads:
        reason = f"a head has {hidden // heads} of {hidden} channels in transformers"
        raise ModelError("args.kv_channels", width, reason, "Convert a model without it")


def config_of(
    arguments: Mapping[str, Any], whole: Mapping[str, Tensor], *, vocab_size: int | None
) -> Any:
    """Return the transformers configuration of a Megatron model.

    Args:
        arguments: Megatron's, as far as the files have them; see `check_arguments`.
        whole: Its weights.
        vocab_size: Tokens without padding; by default what the arguments say, else all rows.

    Raises:
        ModelError: The vocabulary has more tokens than rows.
    """
    import transformers

    rows, hidden = needed(whole, EMBEDDING).shape
    tokens = (arguments.get("vocab_size") or rows) if vocab_size is None else vocab_size
    if not 0 < tokens <= rows:
        reason = f"the checkpoint has {rows} rows"
        raise ModelError("--vocab-size", tokens, reason, "Give the tokenizer's own size")
    tanh = "gelu_fast" if arguments.get("bias_gelu_fusion", True) else "gelu"
    inner = needed(whole, "encoder.layers.0.mlp.dense_h_to_4h.weight").shape[0]
    end = _GPT2_END if tokens > _GPT2_END else None
    return transformers.GPT2Config(
        bos_token_id=end,
        eos_token_id=end,
        vocab_size=tokens,
        n_positions=len(needed(whole, POSITIONS)),
        n_embd=hidden,
        n_layer=num_layers(whole),
        n_head=arguments["num_attention_heads"],
        n_inner=None if inner == 4 * hidden else inner,
        activation_function="gelu_new" if arguments.get("openai_gelu") else tanh,
        layer_norm_epsilon=arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        tie_word_embeddings=HEAD not in whole,
        architectures=["GPT2LMHeadModel"],
        dtype=str(whole[EMBEDDING].dtype).removeprefix("torch."),
    )
