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
from wavemare.megatron.weights import EMBEDDING, HEAD, Shape, needed, size_of

__all__ = [
    "arguments_of",
    "check_arguments",
    "class_of",
    "config_of",
    "load_model",
    "model_of",
    "shape_of",
]

_POST_NORM = (
    "Megatron's BERT normalises before each layer and once at the end, transformers' bert after "
    "each layer: no weights make one compute what the other does"
)
_REMEDY = "Use megatron_bert (MegatronBertForPreTraining), which is Megatron's own form"
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "megatron-bert": "MegatronBertForPreTraining",
}
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
    """Load GPT-2, BERT or Megatron's BERT with its heads, in the type of its file.

    Raises:
        ModelError: The folder holds no such model, or a damaged one.
    """
    import transformers

    try:
        config: Any = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of wrong values, too, for which transformers has its own
        reason = f"it holds no model of transformers ({said_by(error)})"
        raise ModelError("model", str(folder), reason, "Name a folder with config.json") from error
    kind = class_of(config)
    try:
        return kind.from_pretrained(folder, dtype="auto", local_files_only=True).eval()
    except Exception as error:  # pickle, safetensors and transformers each have errors of their own
        reason = f"its weights cannot be read ({said_by(error)})"
        raise ModelError("model", str(folder), reason, "Copy its files again") from error


def class_of(config: Any) -> Any:
    """Return the class of a model with its heads.

    Raises:
        ModelError: It is neither GPT-2 nor a BERT.
    """
    import transformers

    if config.model_type not in _CLASSES:
        reason = f"its type is {config.model_type!r}"
        raise ModelError("model", config.model_type, reason, "Give GPT-2, BERT or megatron_bert")
    named = (config.architectures or [""])[0]
    # A model without heads has no logits to compare; it gets the head of pretraining.
    bare = named.endswith("Model") and not named.endswith("HeadModel")
    use_own = hasattr(transformers, named) and not bare
    return getattr(transformers, named if use_own else _CLASSES[config.model_type])


def model_of(config: Any, state: Mapping[str, Tensor]) -> Any:
    """Build the model of a configuration with these weights, in their type.

    Raises:
        ModelError: The weights are not those of the model.
    """
    kind = class_of(config)
    with torch.device("meta"):
        model = kind(config)
    dtype = next(weight.dtype for weight in state.values() if weight.is_floating_point())
    model = model.to_empty(device="cpu").to(dtype)
    _fill_buffers(model)
    try:
        model.load_state_dict(dict(state), strict=True)
    except RuntimeError as error:
        reason = (
            f"the weights are not those of {kind.__name__} ({str(error).splitlines()[1].strip()})"
        )
        raise ModelError(
            "weights", kind.__name__, reason, "Give the model's own configuration"
        ) from error
    model.tie_weights()
    return model.eval()


def _fill_buffers(model: Any) -> None:
    # Not in the state dict: the positions and token types of BERT.
    for name, buffer in model.named_buffers():
        if name.endswith("position_ids"):
            buffer.copy_(torch.arange(buffer.shape[-1]).expand_as(buffer))
        else:
            buffer.zero_()


def shape_of(config: Any) -> Shape:
    """Return what decides the form of a model's weights in Megatron.

    Raises:
        ModelError: It is transformers' ``bert``, which Megatron does not have.
    """
    if config.model_type == "bert":
        raise ModelError("model", "bert", _POST_NORM, _REMEDY)
    return Shape(
        config.model_type, config.num_hidden_layers, config.num_attention_heads, config.vocab_size
    )


def arguments_of(config: Any, padded_vocab_size: int) -> dict[str, Any]:
    """Return Megatron's arguments of a transformers configuration.

    Raises:
        ModelError: It has an activation or a scaling that Megatron does not have.
    """
    is_gpt = config.model_type == "gpt2"
    activation = config.activation_function if is_gpt else config.hidden_act
    if activation not in (*_TANH, "gelu"):
        reason = "Megatron's GPT and BERT have GELU, exact or by tanh"
        raise ModelError("activation", activation, reason, "Use a model with GELU")
    if is_gpt and (not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx):
        reason = "Megatron scales attention by the square root of a head's size"
        raise ModelError("scale_attn_weights", False, reason, "Use a model with the usual scale")
    inner = config.n_inner if is_gpt else config.intermediate_size
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": inner or 4 * config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "seq_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "padded_vocab_size": padded_vocab_size,
        "layernorm_epsilon": config.layer_norm_epsilon if is_gpt else config.layer_norm_eps,
        "bias_gelu_fusion": False,
        "openai_gelu": activation in _TANH,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "add_position_embedding": True,
    }


def check_arguments(arguments: Mapping[str, Any], hidden: int, ranks: int) -> None:
    """Refuse arguments under which Megatron computes what GPT-2 and Megatron's BERT do not.

    The comparison of logits would not find it: it knows the usual computation alone.

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
            reason = "GPT-2 and Megatron's BERT in transformers do not compute this"
            raise ModelError(f"args.{name}", value, reason, "Convert a model without it")
    heads = arguments.get("num_attention_heads")
    if heads is not None and (heads < 1 or hidden % heads or heads % ranks):
        reason = f"a width of {hidden} on {ranks} tensor-parallel ranks cannot have so many"
        raise ModelError("num_attention_heads", heads, reason, "Give --num-attention-heads")
    width = arguments.get("kv_channels")
    if heads is not None and width is not None and width != hidden // heads:
        reason = f"a head has {hidden // heads} of {hidden} channels in transformers"
        raise ModelError("args.kv_channels", width, reason, "Convert a model without it")


def config_of(
    arguments: Mapping[str, Any],
    whole: Mapping[str, Tensor],
    *,
    vocab_size: int | None,
    model_type: str | None = None,
) -> Any:
    """Return the transformers configuration of a Megatron model.

    Args:
        arguments: Megatron's, as far as the files have them.
        whole: Its weights.
        vocab_size: Tokens without padding; by default what the arguments say, else all rows.
        model_type: What is asked for; by default what the weights are.

    Raises:
        ModelError: The weights cannot say the number of heads, or ``bert`` is asked for.
    """
    import transformers

    is_bert = "lm_head.dense.weight" in whole
    if is_bert and model_type == "bert":
        raise ModelError("--model-type", model_type, _POST_NORM, _REMEDY)
    own = "megatron-bert" if is_bert else "gpt2"
    if model_type not in (None, own, own.replace("-", "_")):
        raise ModelError("--model-type", model_type, f"the checkpoint is {own}", "Leave it out")
    size = size_of(whole)
    heads = arguments.get("num_attention_heads")
    if heads is None:
        reason = "the checkpoint does not say it, and no weight shows it"
        raise ModelError("num_attention_heads", None, reason, "Give --num-attention-heads")
    said = arguments.get("vocab_size") or size["padded_vocab_size"]
    tokens = said if vocab_size is None else vocab_size
    if not 0 < tokens <= size["padded_vocab_size"]:
        reason = f"the checkpoint has {size['padded_vocab_size']} rows"
        raise ModelError("--vocab-size", tokens, reason, "Give the tokenizer's own size")
    tanh = "gelu_fast" if arguments.get("bias_gelu_fusion", True) else "gelu"
    activation = "gelu_new" if arguments.get("openai_gelu") else tanh
    inner = needed(whole, "encoder.layers.0.mlp.dense_h_to_4h.weight").shape[0]
    dtype = str(whole[EMBEDDING].dtype).removeprefix("torch.")
    epsilon = arguments.get("layernorm_epsilon", 1e-5)
    if not is_bert:
        end = _GPT2_END if tokens > _GPT2_END else None
        return transformers.GPT2Config(
            bos_token_id=end,
            eos_token_id=end,
            vocab_size=tokens,
            n_positions=size["max_position_embeddings"],
            n_embd=size["hidden_size"],
            n_layer=size["num_layers"],
            n_head=heads,
            n_inner=None if inner == 4 * size["hidden_size"] else inner,
            activation_function=activation,
            layer_norm_epsilon=epsilon,
            tie_word_embeddings=HEAD not in whole,
            architectures=["GPT2LMHeadModel"],
            dtype=dtype,
        )
    name = (
        "MegatronBertForPreTraining" if "binary_head.weight" in whole else "MegatronBertForMaskedLM"
    )
    return transformers.MegatronBertConfig(
        vocab_size=tokens,
        max_position_embeddings=size["max_position_embeddings"],
        hidden_size=size["hidden_size"],
        num_hidden_layers=size["num_layers"],
        num_attention_heads=heads,
        intermediate_size=inner,
        hidden_act=activation,
        layer_norm_eps=epsilon,
        type_vocab_size=len(needed(whole, "embedding.tokentype_embeddings.weight")),
        architectures=[name],
        dtype=dtype,
    )
