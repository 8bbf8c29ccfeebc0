# SPDX-License-Identifier: Apache-2.0
"""Layers from configurations, against the layers and parameters of real models."""

import pytest
import transformers

from support.refusals import refuses
from wavemare.errors import PlanError
from wavemare.models.families import family_of
from wavemare.models.layers import TiedHead
from wavemare.parallel.planner.model import model_costs

TINY = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 0}
DECODER = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4}
BERT = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_labels": 3,
}
# Name: model, configuration and its numbers.
MODELS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {**GPT2, **TINY, "n_inner": 72}),
    "gpt2-untied": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {**GPT2, **TINY, "tie_word_embeddings": False},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert-classes": ("BertForSequenceClassification", "BertConfig", BERT),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "llama-biases": ("LlamaForCausalLM", "LlamaConfig", {**DECODER, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**DECODER, "tie_word_embeddings": True}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**DECODER, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {**DECODER, "num_experts": 4, "moe_intermediate_size": 40, "head_dim": 8},
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**DECODER, "head_dim": 8}),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**DECODER, "pad_token_id": 0}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**DECODER, "head_dim": 16}),
}


def build(name):
    model, config, numbers = MODELS[name]
    return getattr(transformers, model)(getattr(transformers, config)(**numbers))


@pytest.mark.parametrize("name", MODELS)
def test_layers_and_parameters_are_those_of_the_model(name):
    model = build(name)
    costs = model_costs(model.config, 16, head=type(model).__name__)
    family = family_of(model)
    chain = family.chain(model, family.declared(None))
    assert [layer.is_block for layer in costs.layers] == [layer.is_block for layer in chain]
    for layer, real in zip(costs.layers, chain, strict=True):
        assert layer.parameters == sum(w.numel() for w in real.parameters()), layer.name
        tied = real.tied.embedding.weight.numel() if isinstance(real, TiedHead) else 0
        assert layer.tied_parameters == tied
    assert costs.parameters == sum(w.numel() for w in model.parameters())


def test_operations_of_a_block_are_those_of_its_products():
    """2 for each weight and token, and two products of sequence by sequence."""
    model = build("gpt2")
    costs = model_costs(model.config, 16)
    block = model.transformer.h[0]
    matrices = sum(w.numel() for w in block.parameters() if w.dim() == 2)
    assert costs.layers[2].flops == 2 * 16 * matrices + 2 * (2 * 16 * 16 * 32)
    assert costs.layers[-1].flops == 2 * 16 * 50 * 32


@pytest.mark.parametrize("sequence", [16, 64])
def test_activations_are_those_of_korthikanti(sequence):
    """34 bytes of 16 bits for each token and unit of width, with an inner width of 4."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, **TINY)
    block = model_costs(config, sequence, dtype="bf16").layers[2]
    assert block.kept_bytes + block.split_bytes == 34 * sequence * 32
    values = config.to_dict() | {"_attn_implementation": "eager"}
    eager = model_costs(values, sequence, dtype="bf16").layers[2]
    scores = 5 * 4 * sequence**2
    assert eager.kept_bytes + eager.split_bytes == 34 * sequence * 32 + scores


def test_a_sequence_longer_than_the_model_is_refused():
    with refuses(PlanError, "sequence_length", 4096):
        model_costs(build("gpt2").config.to_dict(), 4096)


def test_of_experts_a_token_is_multiplied_by_those_it_is_routed_to():
    model = build("mixtral")
    costs = model_costs(model.config, 16)
    block = costs.layers[1]
    experts = model.model.layers[0].mlp.experts
    whole = sum(w.numel() for w in experts.parameters())
    others = sum(w.numel() for w in model.model.layers[0].parameters() if w.dim() == 2)
    assert (block.expert_parameters, block.routed, costs.experts) == (whole, 2, 4)
    attention = 4 * 16**2 * 32
    assert block.flops == 2 * 16 * (others + whole // 2) + attention


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "mixtral"])
def test_decoders_are_split_by_whole_key_heads(name):
    costs = model_costs(build(name).config, 16)
    assert [n for n in (1, 2, 4) if costs.splits(n)] == [1, 2]


def test_the_dtype_is_that_of_the_configuration():
    config = build("llama").config.to_dict()
    assert model_costs({**config, "dtype": "bfloat16"}, 16).dtype == "bf16"
    assert model_costs({**config, "dtype": None, "torch_dtype": "float16"}, 16).dtype == "fp16"
    assert model_costs({**config, "dtype": "bfloat16"}, 16, dtype="fp32").dtype == "fp32"
    assert model_costs({**config, "dtype": None}, 16).dtype == "fp32"
