# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments and transformers' configurations: each from the other.

What a model computes is said by its arguments, by its weights, and by a configuration beside it.
They have to agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from wavemare.errors import ModelError
from wavemare.megatron.arguments import LLAMA3, OTHER, arguments_of
from wavemare.megatron.facts import Facts
from wavemare.megatron.keys import EMBEDDING, FINAL_NORM, HEAD, POSITIONS, layer_of
from wavemare.models.source import Stored

_GIVE_CONFIG = "Give --config FOLDER with the model's config.json"
_GIVE_ITS = "Give the config.json of this model"
_ONE_MORE = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers that add a token for the end of documents to the vocabulary's size."""
_GPT2_END = 50256  # OpenAI's <|endoftext|>; a smaller vocabulary is not theirs

# With any other value Megatron computes something else of the same weights, or has other weights.
_USUAL: dict[str, tuple[Any, ...]] = {
    # None is the default of what else is a number or a name.
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "attention_output_gate": (False,),
    "enable_mhc_connections": (False,),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (0.0,),
    "heterogeneous_block_specs": (False,),
    "heterogeneous_layers_config_path": (None,),
    "linear_attention_freq": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "moe_mlp_glu_interleave_size": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_force_load_balancing": (False,),
    "moe_router_group_topk": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_score_function": ("softmax",),
    "moe_router_topk_limited_devices": (None,),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "moe_shared_expert_glu_interleave_size": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "no_rope_freq": (None,),
    "position_embedding_type": ("learned_absolute", "rope"),
    "qk_l2_norm": (False,),
    "quick_geglu": (False,),
    "rotary_interleaved": (False,),
    "rotary_percent": (1.0,),
    "rotary_seq_len_interpolation_factor": (None, 1, 1.0),
    "softmax_type": ("vanilla",),
    "squared_relu": (False,),
    "use_mup": (False,),
    "window_attn_skip_freq": (None,),
}
_ROUTING = ("sinkhorn", "quantile_balancing")


# --- what the weights show ------------------------------------------------------------------------


class Seen:
    """What the weights of a checkpoint show.

    Args:
        stored: By Megatron's names.

    Raises:
        ModelError: A weight that every GPT has is missing.
    """

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        layers: dict[int, set[str]] = {}
        for key in stored:
            at = layer_of(key)
            if at:
                layers.setdefault(at[0], set()).add(at[1])
        for name in (EMBEDDING, FINAL_NORM):
            if name not in stored:
                self._refuse(name)
        if not layers:
            self._refuse("decoder.layers.0")
        for number in range(max(layers) + 1):
            if number not in layers:
                self._refuse(f"decoder.layers.{number}")
        self.layers, self.first = len(layers), layers[0]
        self.rows, self.hidden = stored[EMBEDDING].shape
        self.dtype = stored[EMBEDDING].dtype
        self.mixed = {frozenset(names) for names in layers.values()} != {frozenset(self.first)}
        self.experts = self.shape("mlp.router.weight")[0] if self.has("mlp.router.weight") else 0
        gated = self.shape(
            "mlp.experts.linear_fc1.weight" if self.experts else "mlp.linear_fc1.weight"
        )
        inner = self.shape(
            "mlp.experts.linear_fc2.weight" if self.experts else "mlp.linear_fc2.weight"
        )
        self.inner = inner[-1]
        self.gated = gated[-2] == 2 * self.inner
        self.qkv_rows = self.shape("self_attention.linear_qkv.weight")[0]
        self.qkv_bias = self.has("self_attention.linear_qkv.bias")
        self.bias = self.has("self_attention.linear_proj.bias")
        self.qk_norm = self.has("self_attention.q_layernorm.weight")
        self.shared = self.has("mlp.shared_experts.linear_fc1.weight")
        self.positions = stored[POSITIONS].shape[0] if POSITIONS in stored else None
        self.norm_bias = "decoder.final_layernorm.bias" in stored
        self.tied = HEAD not in stored

    def has(self, name: str) -> bool:
        """Whether layers have a weight."""
        return name in self.first

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight of the first layer."""
        if name not in self.first:
            self._refuse(f"decoder.layers.0.{name}")
        return self._stored[f"decoder.layers.0.{name}"].shape

    def _refuse(self, name: str) -> None:
        reason = "the checkpoint lacks it, and every GPT of Megatron has it"
        remedy = "Give a whole checkpoint of a family that docs/megatron.md names"
        raise ModelError("weights", name, reason, remedy)


# --- from Megatron --------------------------------------------------------------------------------


def config_of(
    facts: Facts,
    stored: Mapping[str, Stored],
    *,
    given: Any = None,
    vocab_size: int | None = None,
) -> Any:
    """Return the transformers configuration of a Megatron model.

    Args:
        facts: What the checkpoint says.
        stored: Its weights, by Megatron's names.
        given: A configuration that the user gives; it has to agree with the facts.
        vocab_size: Tokens without padding, if it is known otherwise.

    Raises:
        ModelError: Megatron computes what no family does, something has to be known that nothing
            says, or the facts, the weights and the given configuration differ.
    """
    _check_usual(facts)
    seen = Seen(stored)
    _check_layers(facts, seen)
    _check_shown(facts, _shown_of_model(facts, seen))
    if given is not None:
        _check_shown(facts, _shown_of_layers(facts, seen))
        _check_given(given, facts, seen)
        return given
    heads = facts.get("num_attention_heads")
    if heads is None:
        reason = "the checkpoint does not say it, and no weight shows it"
        raise ModelError(facts.key("num_attention_heads"), None, reason, _GIVE_CONFIG)
    sizes = _sizes(facts, seen, heads)
    tokens = tokens_of(facts, seen.rows, vocab_size)
    import transformers

    family = _family(facts, seen)
    _check_shown(facts, _shown_of_layers(facts, seen))
    common = {
        "vocab_size": tokens,
        "tie_word_embeddings": seen.tied,
        "initializer_range": facts.get("init_method_std", 0.02),
        "dtype": str(seen.dtype).removeprefix("torch."),
    }
    if family == "gpt2":
        return _gpt2(facts, seen, heads, common)
    kinds: dict[str, tuple[Any, str]] = {
        "llama": (transformers.LlamaConfig, "LlamaForCausalLM"),
        "mistral": (transformers.MistralConfig, "MistralForCausalLM"),
        "qwen2": (transformers.Qwen2Config, "Qwen2ForCausalLM"),
        "qwen3": (transformers.Qwen3Config, "Qwen3ForCausalLM"),
        "mixtral": (transformers.MixtralConfig, "MixtralForCausalLM"),
        "qwen2_moe": (transformers.Qwen2MoeConfig, "Qwen2MoeForCausalLM"),
        "qwen3_moe": (transformers.Qwen3MoeConfig, "Qwen3MoeForCausalLM"),
    }
    kind, name = kinds[family]
    groups, size = sizes
    values = common | {
        "architectures": [name],
        "hidden_size": seen.hidden,
        "num_hidden_layers": seen.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": facts.get("max_position_embeddings", 2048),
        "rms_norm_eps": _epsilon(facts),
        "attention_dropout": facts.get("attention_dropout", 0.0),
        "rope_parameters": _rope(facts),
        "bos_token_id": None,
        "eos_token_id": None,
        **_own(family, facts, seen),
    }
    if family not in ("qwen2", "qwen2_moe") or size != seen.hidden // heads:
        values["head_dim"] = size
    try:
        return kind(**values)
    except Exception as error:  # of wrong values, for which transformers has its own
        reason = f"transformers' {family} cannot have these sizes ({error})"
        remedy = "Give --config FOLDER with a config.json that can"
        raise ModelError("config", family, reason, remedy) from error


def _check_usual(facts: Facts) -> None:
    """Refuse arguments under which Megatron computes what no family of transformers does."""
    for name, usual in _USUAL.items():
        value = facts.values.get(name)
        if value is not None and value not in usual:
            reason = "the families of transformers that are converted do not compute this"
            raise ModelError(facts.key(name), value, reason, OTHER)
    scale, size = facts.get("softmax_scale"), facts.get("kv_channels")
    if scale is not None and not (size and math.isclose(scale, size**-0.5, rel_tol=1e-6)):
        reason = "transformers scales attention by the square root of a head's size"
        raise ModelError(facts.key("softmax_scale"), scale, reason, OTHER)
    if not facts.get("num_experts"):
        return
    balancing = facts.get("moe_router_load_balancing_type", "none")
    for kind in balancing if isinstance(balancing, list | tuple) else [balancing]:
        if kind in _ROUTING:
            reason = "transformers routes by the largest logits alone"
            raise ModelError(facts.key("moe_router_load_balancing_type"), kind, reason, OTHER)


def _check_layers(facts: Facts, seen: Seen) -> None:
    frequency = facts.get("moe_layer_freq", 1)
    listed = isinstance(frequency, list | tuple)
    dense = any(number != 1 for number in frequency) if listed else frequency != 1
    if seen.mixed or (seen.experts and dense):
        reason = "some layers have weights that others lack, and the families' layers are alike"
        raise ModelError(facts.key("moe_layer_freq"), frequency, reason, OTHER)


def _check_shown(facts: Facts, shown: Mapping[str, Any]) -> None:
    """Refuse arguments that the weights contradict.

    Args:
        facts: What the checkpoint says.
        shown: What its weights show, by arguments; None if they do not.
    """
    for name, value in shown.items():
        said = facts.get(name)
        if value is not None and said is not None and said != value:
            reason = f"the weights of the checkpoint say {value}"
            remedy = "Copy the whole checkpoint again: its arguments are those of another model"
            raise ModelError(facts.key(name), said, reason, remedy)


def _shown_of_model(facts: Facts, seen: Seen) -> dict[str, Any]:
    # A hybrid counts attention and MLP as layers of their own.
    hybrid = facts.get("hybrid_layer_pattern") or facts.get("hybrid_override_pattern")
    return {
        "num_layers": None if hybrid else seen.layers,
        "hidden_size": seen.hidden,
        "untie_embeddings_and_output_weights": not seen.tied,
        "num_experts": seen.experts,
    }


def _shown_of_layers(facts: Facts, seen: Seen) -> dict[str, Any]:
    shown = {
        "moe_ffn_hidden_size" if seen.experts else "ffn_hidden_size": seen.inner,
        "swiglu": seen.gated,
        "normalization": "LayerNorm" if seen.norm_bias else "RMSNorm",
        "qk_layernorm": seen.qk_norm,
        "add_bias_linear": seen.bias,
    }
    if not facts.get("add_bias_linear", seen.bias):  # else query, key and value have it anyway
        shown["add_qkv_bias"] = seen.qkv_bias
    if seen.shared:
        weight = "mlp.shared_experts.linear_fc2.weight"
        shown["moe_shared_expert_intermediate_size"] = seen.shape(weight)[-1]
    if seen.qk_norm:
        shown["kv_channels"] = seen.shape("self_attention.q_layernorm.weight")[0]
    if seen.positions is not None:
        shown["position_embedding_type"] = "learned_absolute"
        shown["use_rotary_position_embeddings"] = False
    return shown


def _sizes(facts: Facts, seen: Seen, heads: int) -> tuple[int, int]:
    """Return key-value heads and the size of a head, by the arguments and the weights."""
    if seen.qk_norm:
        size = seen.shape("self_attention.q_layernorm.weight")[0]
    else:
        size = facts.get("kv_channels") or seen.hidden // max(heads, 1)
    groups = heads
    if facts.get("group_query_attention"):
        groups = facts.get("num_query_groups", heads)
    valid = heads > 0 and groups > 0 and heads % groups == 0
    if not valid or (heads + 2 * groups) * size != seen.qkv_rows:
        reason = (
            f"with {groups} key-value heads of {size} channels these do not make the "
            f"{seen.qkv_rows} rows of linear_qkv"
        )
        raise ModelError(facts.key("num_attention_heads"), heads, reason, _GIVE_CONFIG)
    return groups, size


def said_tokens(facts: Facts, rows: int) -> int:
    """Return the tokens that a checkpoint says it has; all of its rows if it says nothing."""
    tokens = int(facts.get("vocab_size", rows))
    if facts.get("tokenizer_type") in _ONE_MORE:
        return min(tokens + 1, max(rows, tokens))
    return tokens


def tokens_of(facts: Facts, rows: int, vocab_size: int | None) -> int:
    """Return the tokens without padding, which a user may have given.

    Raises:
        ModelError: They are more than the rows of the checkpoint.
    """
    tokens = said_tokens(facts, rows) if vocab_size is None else vocab_size
    if not 0 < tokens <= rows:
        key = facts.key("vocab_size") if vocab_size is None else "--vocab-size"
        reason = f"the checkpoint has {rows} rows"
        raise ModelError(key, tokens, reason, "Give the tokenizer's own size by --vocab-size")
    return tokens


def _family(facts: Facts, seen: Seen) -> str:
    """Return the plainest family that computes what the checkpoint does."""
    window = _window(facts)
    if seen.positions is not None:
        plain = seen.norm_bias and not (seen.gated or seen.qk_norm or seen.experts or window)
        if plain and seen.bias and seen.qkv_bias:
            return "gpt2"
        reason = "with learned positions only GPT-2 is converted: LayerNorm, GELU, all biases"
        raise ModelError(facts.key("position_embedding_type"), "learned_absolute", reason, OTHER)
    if facts.get("position_embedding_type", "rope") != "rope" and not facts.get(
        "use_rotary_position_embeddings"
    ):
        value, reason = facts.get("position_embedding_type"), "the checkpoint has no positions"
        raise ModelError(facts.key("position_embedding_type"), value, reason, OTHER)
    if seen.norm_bias or facts.get("normalization", "RMSNorm") != "RMSNorm":
        reason = "with rotary positions the families that are converted have RMSNorm"
        raise ModelError(facts.key("normalization"), "LayerNorm", reason, OTHER)
    if not seen.gated or not facts.get("swiglu", True):
        reason = "with rotary positions the families that are converted have SwiGLU"
        raise ModelError(facts.key("swiglu"), False, reason, OTHER)
    return _family_of_experts(facts, seen) if seen.experts else _dense_family(facts, seen)


def _dense_family(facts: Facts, seen: Seen) -> str:
    if seen.qk_norm:
        family, wrong = "qwen3", seen.qkv_bias or seen.bias
    elif _window(facts) or "mistral" in facts.target.lower():
        family, wrong = "mistral", seen.qkv_bias or seen.bias
    elif seen.qkv_bias and not seen.bias:
        return "qwen2"
    else:
        family, wrong = "llama", seen.bias != seen.qkv_bias
    wrong = wrong or (family != "mistral" and bool(_window(facts)))
    if wrong:
        name = "window_size" if _window(facts) else "add_qkv_bias"
        reason = f"transformers' {family} does not have it"
        raise ModelError(facts.key(name), facts.get(name, True), reason, OTHER)
    return family


def _family_of_experts(facts: Facts, seen: Seen) -> str:
    before = bool(facts.get("moe_router_pre_softmax", False))
    if seen.shared:
        family, bias = "qwen2_moe", True
        if not seen.has("mlp.shared_experts.gate_weight"):
            reason = "Qwen2-MoE, whose experts are shared, has a gate for them"
            raise ModelError(facts.key("moe_shared_expert_gate"), False, reason, OTHER)
        wrong = "qk_layernorm" if seen.qk_norm else ""
    elif seen.qk_norm:
        family, bias, wrong = "qwen3_moe", False, ""
    else:
        family, bias, wrong = "mixtral", False, "moe_router_pre_softmax" if before else ""
    if seen.bias or (seen.qkv_bias and not bias):
        wrong = "add_bias_linear" if seen.bias else "add_qkv_bias"
    if _window(facts) and family != "mixtral":
        wrong = "window_size"
    if wrong:
        reason = f"transformers' {family}, the nearest family, does not have it"
        raise ModelError(facts.key(wrong), facts.get(wrong, True), reason, OTHER)
    return family


def _own(family: str, facts: Facts, seen: Seen) -> dict[str, Any]:
    """Return what a family's configuration has besides the common."""
    window = _window(facts)
    own: dict[str, Any] = {}
    if not seen.experts:
        own = {"intermediate_size": seen.inner}
        if family == "llama":
            own |= {"attention_bias": seen.bias, "mlp_bias": seen.bias}
        if family == "mistral":
            own["sliding_window"] = window
        return own
    own |= {
        "num_experts_per_tok": facts.get("moe_router_topk", 2),
        "router_aux_loss_coef": _first(facts.get("moe_aux_loss_coeff", 0.001)),
    }
    if family == "mixtral":
        return own | {
            "num_local_experts": seen.experts,
            "intermediate_size": seen.inner,
            "sliding_window": window,
        }
    own |= {
        "num_experts": seen.experts,
        "moe_intermediate_size": seen.inner,
        "intermediate_size": facts.get("ffn_hidden_size", 4 * seen.hidden),
        "norm_topk_prob": not facts.get("moe_router_pre_softmax", False),
    }
    if family == "qwen2_moe":
        own["shared_expert_intermediate_size"] = seen.shape("mlp.shared_experts.linear_fc2.weight")[
            -1
        ]
        own["qkv_bias"] = seen.qkv_bias
    return own


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) else value


def _window(facts: Facts) -> int | None:
    """Return the tokens that a query sees, itself among them."""
    window = facts.get("window_size")
    if window is None:
        return None
    try:
        before, after = window
    except (TypeError, ValueError):
        before, after = -1, 1
    if not isinstance(before, int) or not isinstance(after, int):
        before, after = -1, 1
    if before == -1 and after in (-1, 0):  # all, as far as the causal mask allows
        return None
    if before < 0 or after != 0:
        reason = "transformers' windows begin some tokens before a query and end with it"
        raise ModelError(facts.key("window_size"), window, reason, OTHER)
    return int(before) + 1


def _epsilon(facts: Facts) -> float:
    return float(facts.get("norm_epsilon", facts.get("layernorm_epsilon", 1e-5)))


def _rope(facts: Facts) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(facts.get("rotary_base", 10000))}
    if facts.get("use_rope_scaling"):
        factor = float(facts.get("rope_scaling_factor", 8.0))
        rope |= {"rope_type": "llama3", "factor": factor, **LLAMA3}
    return rope


def _gelu(facts: Facts) -> str:
    # Today's models have the tanh in their fused kernel alone, and say so; legacy ones by default.
    openai = bool(facts.get("openai_gelu"))
    fused = facts.get("bias_gelu_fusion", facts.legacy) or (openai and facts.legacy)
    tanh = "gelu_new" if openai else "gelu_fast"
    return tanh if fused else "gelu"


def _gpt2(facts: Facts, seen: Seen, heads: int, common: Mapping[str, Any]) -> Any:
    import transformers

    groups, size = _sizes(facts, seen, heads)
    if groups != heads or size * heads != seen.hidden:
        name = "num_query_groups" if groups != heads else "kv_channels"
        reason = f"GPT-2's {heads} heads share a width of {seen.hidden} alike"
        raise ModelError(facts.key(name), facts.get(name), reason, OTHER)
    end = _GPT2_END if common["vocab_size"] > _GPT2_END else None
    return transformers.GPT2Config(
        **common,
        architectures=["GPT2LMHeadModel"],
        bos_token_id=end,
        eos_token_id=end,
        n_positions=seen.positions or 0,
        n_embd=seen.hidden,
        n_layer=seen.layers,
        n_head=heads,
        n_inner=None if seen.inner == 4 * seen.hidden else seen.inner,
        activation_function=_gelu(facts),
        layer_norm_epsilon=_epsilon(facts),
        attn_pdrop=facts.get("attention_dropout", 0.1),
        resid_pdrop=facts.get("hidden_dropout", 0.1),
        embd_pdrop=facts.get("hidden_dropout", 0.1),
    )


def _check_given(given: Any, facts: Facts, seen: Seen) -> None:
    """Refuse a configuration that is not the checkpoint's."""
    wanted = arguments_of(given, dtype=seen.dtype)
    shown = {
        "num_layers": seen.layers,
        "hidden_size": seen.hidden,
        "untie_embeddings_and_output_weights": not seen.tied,
    }
    for name, value in shown.items():
        if wanted[name] != value:
            reason = f"the weights of the checkpoint say {value}"
            raise ModelError(f"--config: {name}", wanted[name], reason, _GIVE_ITS)
    if given.vocab_size > seen.rows:
        reason = f"the checkpoint has {seen.rows} rows"
        raise ModelError("--config: vocab_size", given.vocab_size, reason, _GIVE_ITS)
    ours, theirs = _computed(Facts(wanted)), _computed(facts)
    for name, value in theirs.items():
        if value is not None and not _same(value, ours.get(name)):
            reason = f"the checkpoint has {facts.key(name)} = {value!r}"
            raise ModelError(f"--config: {name}", ours.get(name), reason, _GIVE_ITS)


def _computed(facts: Facts) -> dict[str, Any]:
    """Return what decides what a model computes, and no weight shows; None is not said."""
    found = {
        name: facts.get(name)
        for name in (
            "num_attention_heads",
            "kv_channels",
            "position_embedding_type",
            "rotary_base",
            "use_rope_scaling",
            "normalization",
            "moe_router_topk",
            "moe_router_pre_softmax",
        )
    }
    grouped = facts.get("group_query_attention")
    if grouped is not None:
        name = "num_query_groups" if grouped else "num_attention_heads"
        found["num_query_groups"] = facts.get(name)
    if facts.get("norm_epsilon", facts.get("layernorm_epsilon")) is not None:
        found["norm_epsilon"] = _epsilon(facts)
    if facts.get("position_embedding_type", "rope") == "learned_absolute":
        del found["rotary_base"], found["use_rope_scaling"]
        if facts.get("bias_gelu_fusion") is not None:
            found["bias_gelu_fusion"] = _gelu(facts) != "gelu"
    elif facts.get("use_rope_scaling"):
        found["rope_scaling_factor"] = float(facts.get("rope_scaling_factor", 8.0))
    if not facts.get("num_experts"):
        del found["moe_router_topk"], found["moe_router_pre_softmax"]
    if facts.get("use_rotary_position_embeddings"):
        found["position_embedding_type"] = "rope"
    if "window_size" in facts.values:
        found["window_size"] = _window(facts) or 0
    return found


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float | int):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
