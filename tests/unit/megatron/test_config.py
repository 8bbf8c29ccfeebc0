# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments and transformers' configurations."""

import pytest
import torch
import transformers

from megatron_models import CONFIGS, TOKENS, build
from support.refusals import refuses
from wavemare.errors import ModelError
from wavemare.megatron.arguments import arguments_of
from wavemare.megatron.config import config_of
from wavemare.megatron.facts import facts_of
from wavemare.megatron.keys import MegatronWeights
from wavemare.models.source import MemorySource, Stored

PLAINEST = {
    "gpt2, exact GELU, untied": "gpt2",
    "llama, scaled positions, tied": "llama",
    "llama, biases": "llama",
    "mistral": "llama",
    "mistral, a window": "mistral",
}


def described(name):
    """The arguments and the weights of a family's model."""
    config = CONFIGS[name]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    arguments = arguments_of(config, dtype=torch.float32, divisible_by=8)
    rows = arguments["padded_vocab_size"]
    stored = MegatronWeights(MemorySource(model.state_dict()), config, padded=rows).stored
    return config, arguments, dict(stored)


def computed(config):
    """What of a configuration decides what the model computes."""
    return arguments_of(config, dtype=torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plainest_family_that_computes_the_same(name):
    config, arguments, stored = described(name)
    found = config_of(facts_of(arguments, None), stored)
    assert found.model_type == PLAINEST.get(name, name)
    assert computed(found) == computed(config)
    given = config_of(facts_of(arguments, None), stored, given=config)
    assert given is config


def bridged(arguments, activation):
    """A model's facts as Megatron-Bridge writes them."""
    names = {
        "norm_epsilon": "layernorm_epsilon",
        "num_experts": "num_moe_experts",
        "use_rope_scaling": "rope_scaling",
        "bias_gelu_fusion": "bias_activation_fusion",
        "swiglu": "gated_linear_unit",
    }
    model = {names.get(name, name): value for name, value in arguments.items()}
    model["share_embeddings_and_output_weights"] = not model.pop(
        "untie_embeddings_and_output_weights"
    )
    model["seq_length"] = model.pop("max_position_embeddings")
    if not model.pop("group_query_attention"):
        model["num_query_groups"] = None
    model["activation_func"] = {"_target_": f"torch.nn.functional.{activation}", "_call_": False}
    return {"model": {"_target_": "megatron.bridge.models.gpt_provider.GPTModelProvider", **model}}


@pytest.mark.parametrize("name", CONFIGS)
def test_facts_of_bridge(name):
    config, arguments, stored = described(name)
    run_config = bridged(arguments, "gelu" if name.startswith("gpt2") else "silu")
    found = config_of(facts_of({}, run_config), stored)
    assert found.model_type == PLAINEST.get(name, name)
    assert computed(found) == computed(config)
    run_config["model"]["_target_"] = "megatron.bridge.models.mistral.MistralModelProvider"
    if name == "llama":
        assert config_of(facts_of({}, run_config), stored).model_type == "mistral"
    run_config["model"]["activation_func"] = "torch.nn.functional.relu"
    with refuses(ModelError, "run_config.yaml: model.activation_func", "torch.nn.functional.relu"):
        facts_of({}, run_config)


REFUSED = [
    ("llama", "multi_latent_attention", True),
    ("llama", "attention_output_gate", True),
    ("llama", "apply_residual_connection_post_layernorm", True),
    ("llama", "softmax_scale", 0.3),
    ("llama", "rotary_percent", 0.5),
    ("llama", "rotary_interleaved", True),
    ("llama", "rotary_seq_len_interpolation_factor", 4),
    ("llama", "position_embedding_type", "yarn"),
    ("llama", "position_embedding_type", "none"),
    ("llama", "normalization", "LayerNorm"),
    ("llama", "qk_l2_norm", True),
    ("llama", "no_rope_freq", 4),
    ("llama", "quick_geglu", True),
    ("llama", "mtp_num_layers", 1),
    ("llama", "window_size", 5),
    ("llama", "window_size", (-2, 0)),
    ("llama", "window_size", (5, 2)),
    ("llama", "num_attention_heads", 3),
    ("llama", "num_query_groups", 4),
    ("llama", "vocab_size", 900),
    ("qwen2", "window_size", (5, 0)),
    ("gpt2", "squared_relu", True),
    ("mixtral", "moe_router_score_function", "sigmoid"),
    ("mixtral", "moe_router_topk_scaling_factor", 2.5),
    ("mixtral", "moe_router_enable_expert_bias", True),
    ("mixtral", "moe_router_num_groups", 2),
    ("mixtral", "moe_router_load_balancing_type", "sinkhorn"),
    ("mixtral", "moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
    ("mixtral", "moe_router_pre_softmax", True),
    ("mixtral", "moe_mlp_glu_interleave_size", 32),
    ("mixtral", "moe_layer_freq", 2),
    ("mixtral", "moe_layer_freq", [0, 1]),
]


@pytest.mark.parametrize(("name", "argument", "value"), REFUSED)
def test_what_computes_something_else_is_refused(name, argument, value):
    """The weights alone would fit, and a comparison of both ends would find nothing."""
    _, arguments, stored = described(name)
    key = argument
    if argument in ("num_query_groups",):
        key = "num_attention_heads"  # what is said to make the wrong rows
    with pytest.raises(ModelError) as caught:
        config_of(facts_of(arguments | {argument: value}, None), stored)
    assert caught.value.key == f"args.{key}"


CONTRADICTED = [
    ("llama", "num_layers", 3),
    ("llama", "num_layers", 1),
    ("llama", "hidden_size", 32),
    ("llama", "ffn_hidden_size", 25),
    ("llama", "untie_embeddings_and_output_weights", False),
    ("qwen3", "untie_embeddings_and_output_weights", True),
    ("llama", "num_experts", 4),
    ("mixtral", "num_experts", 8),
    ("mixtral", "moe_ffn_hidden_size", 25),
    ("qwen2_moe", "moe_shared_expert_intermediate_size", 21),
    ("llama", "qk_layernorm", True),
    ("qwen3", "qk_layernorm", False),
    ("qwen3", "kv_channels", 4),
    ("llama", "add_qkv_bias", True),
    ("qwen2", "add_qkv_bias", False),
    ("llama", "add_bias_linear", True),
    ("llama, biases", "add_bias_linear", False),
    ("gpt2", "add_bias_linear", False),
    ("gpt2", "swiglu", True),
    ("gpt2", "normalization", "RMSNorm"),
    ("gpt2", "position_embedding_type", "rope"),
    ("gpt2", "use_rotary_position_embeddings", True),
]


@pytest.mark.parametrize(("name", "argument", "value"), CONTRADICTED)
def test_arguments_that_the_weights_contradict_are_refused(name, argument, value):
    """Weights are missing, or the arguments are another model's. No configuration mends it."""
    config, arguments, stored = described(name)
    for given in (None, config):
        with pytest.raises(ModelError) as caught:
            config_of(facts_of(arguments | {argument: value}, None), stored, given=given)
        assert caught.value.key == f"args.{argument}"


def test_a_head_that_is_missing_and_layers_of_a_hybrid():
    _, arguments, stored = described("llama")
    del stored["output_layer.weight"]
    with refuses(ModelError, "args.untie_embeddings_and_output_weights", True):
        config_of(facts_of(arguments, None), stored)
    del arguments["untie_embeddings_and_output_weights"]
    assert config_of(facts_of(arguments, None), stored).tie_word_embeddings
    hybrid = {"num_layers": 4, "hybrid_layer_pattern": "*-*-"}
    assert config_of(facts_of(arguments | hybrid, None), stored).num_hidden_layers == 2
    run_config = bridged(arguments | {"untie_embeddings_and_output_weights": False}, "silu")
    run_config["model"]["num_layers"] = 5
    with refuses(ModelError, "run_config.yaml: model.num_layers", 5):
        config_of(facts_of({}, run_config), stored)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_attention_heads", "4"),
        ("num_attention_heads", True),
        ("num_layers", [2]),
        ("vocab_size", "37"),
        ("rotary_base", "1e6"),
        ("norm_epsilon", float("nan")),
        ("rope_scaling_factor", "x"),
        ("kv_channels", 4.5),
        ("use_rope_scaling", "false"),
        ("window_size", ("5", 0)),
        ("init_method_std", {}),
    ],
)
def test_values_of_another_type_are_refused_by_their_argument(argument, value):
    config, arguments, stored = described("llama")
    arguments |= {"use_rope_scaling": True, argument: value}
    for given in (None, config):
        if given is not None and argument in ("vocab_size", "init_method_std", "rotary_base"):
            continue  # not asked for, or another difference is found before
        with pytest.raises(ModelError) as caught:
            config_of(facts_of(arguments, None), stored, given=given)
        assert caught.value.key == f"args.{argument}"
    run_config = bridged(described("llama")[1], "silu")
    run_config["model"]["num_attention_heads"] = "four"
    with refuses(ModelError, "run_config.yaml: model.num_attention_heads", "four"):
        config_of(facts_of({}, run_config), stored)


@pytest.mark.parametrize("kind", ["NullTokenizer", "NullMultimodalTokenizer"])
def test_a_tokenizer_that_adds_a_token(kind):
    """Megatron's has one more than --vocab-size says, the end of documents."""
    _, arguments, stored = described("llama")
    arguments["tokenizer_type"] = kind
    assert config_of(facts_of(arguments, None), stored).vocab_size == TOKENS + 1
    assert config_of(facts_of(arguments, None), stored, vocab_size=TOKENS).vocab_size == TOKENS
    rows = stored["embedding.word_embeddings.weight"].shape[0]
    arguments["vocab_size"] = rows
    assert config_of(facts_of(arguments, None), stored).vocab_size == rows
    del arguments["vocab_size"]
    assert config_of(facts_of(arguments, None), stored).vocab_size == rows


def changed(name, old, new):
    """A family's weights, of which one has another name."""
    _, arguments, stored = described(name)
    return arguments, {key.replace(old, new): value for key, value in stored.items()}


WEIGHTS = [
    ("qwen2_moe", "mlp.shared_experts.gate_weight", "other", "moe_shared_expert_gate"),
    ("llama", "layers.1.mlp.linear_fc1.weight", "layers.1.mlp.router.weight", "moe_layer_freq"),
    ("llama", "decoder.layers.1.", "decoder.layers.3.", "weights"),
    ("llama", "embedding.word_embeddings.weight", "other", "weights"),
    ("gpt2", "self_attention.linear_proj.bias", "other", "position_embedding_type"),
]


@pytest.mark.parametrize(("name", "old", "new", "key"), WEIGHTS)
def test_weights_of_no_family_are_refused(name, old, new, key):
    arguments, stored = changed(name, old, new)
    with pytest.raises(ModelError) as caught:
        config_of(facts_of(arguments, None), stored)
    assert caught.value.key in (key, f"args.{key}")


def test_a_scale_of_attention_that_is_the_usual_one():
    _, arguments, stored = described("llama")
    arguments["softmax_scale"] = arguments["kv_channels"] ** -0.5
    arguments["window_size"] = (-1, 0)  # and a window that is none
    assert config_of(facts_of(arguments, None), stored).model_type == "llama"


def test_what_is_not_known_is_asked_for():
    config, arguments, stored = described("llama")
    with refuses(ModelError, "args.num_attention_heads", None):
        config_of(facts_of({}, None), stored)
    assert config_of(facts_of({}, None), stored, given=config) is config
    for key, value in (("rope_parameters", None), ("hidden_size", 8), ("num_hidden_layers", 3)):
        other = CONFIGS["llama"]()
        setattr(other, key, value or {"rope_type": "default", "rope_theta": 7.0})
        with pytest.raises(ModelError, match=r"^--config: .* Give the config.json of this model"):
            config_of(facts_of(arguments, None), stored, given=other)
    with refuses(ModelError, "--vocab-size", 900):
        config_of(facts_of(arguments, None), stored, vocab_size=900)
    arguments |= {"group_query_attention": True, "window_size": (-1, 0)}  # said in other words
    assert config_of(facts_of(arguments, None), stored, given=config) is config
    del arguments["vocab_size"]
    assert config_of(facts_of(arguments, None), stored).vocab_size == 40
    assert config_of(facts_of(arguments, None), stored, vocab_size=TOKENS).vocab_size == TOKENS


@pytest.mark.parametrize(
    ("said", "legacy", "activation"),
    [
        ({}, False, "gelu"),
        ({}, True, "gelu_fast"),
        ({"bias_gelu_fusion": True}, False, "gelu_fast"),
        ({"bias_gelu_fusion": True, "openai_gelu": True}, False, "gelu_new"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, False, "gelu"),
        ({"bias_gelu_fusion": False, "openai_gelu": True}, True, "gelu_new"),
        ({"bias_gelu_fusion": False}, True, "gelu"),
    ],
)
def test_the_gelu_of_gpt2(said, legacy, activation):
    """Megatron's fused kernel has the tanh. Its option for OpenAI's has an effect on old models."""
    _, arguments, stored = described("gpt2")
    for name in ("bias_gelu_fusion", "openai_gelu"):
        arguments.pop(name)
    facts = facts_of(arguments | said, None, legacy=legacy)
    assert config_of(facts, stored).activation_function == activation


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("llama", "hidden_act", "gelu"),
        ("llama", "attention_bias", True),
        ("llama", "rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}),
        ("qwen3", "attention_bias", True),
        ("qwen2", "use_sliding_window", True),
        ("qwen3_moe", "mlp_only_layers", [0]),
        ("qwen2_moe", "decoder_sparse_step", 2),
    ],
)
def test_what_megatron_does_not_compute_is_refused(name, key, value):
    config = CONFIGS[name]()
    setattr(config, key, value)
    if key == "use_sliding_window":
        config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ModelError) as caught:
        arguments_of(config, dtype=torch.float32)
    assert caught.value.key == key


def test_other_families_are_refused():
    with refuses(ModelError, "model", "olmo2"):
        arguments_of(transformers.Olmo2Config(), dtype=torch.float32)


def test_weights_of_another_size_are_refused():
    config = build("llama").config
    stored = {"decoder.layers.0.self_attention.linear_qkv.weight": Stored((7, 16), torch.float32)}
    from wavemare.megatron.keys import HfWeights

    class Source:
        pass

    source = Source()
    source.stored = stored
    with refuses(ModelError, "weights", "decoder.layers.0.self_attention.linear_qkv.weight"):
        HfWeights(source, config)
