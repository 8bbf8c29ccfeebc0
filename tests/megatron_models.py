# SPDX-License-Identifier: Apache-2.0
"""A small model of every family that is converted to Megatron's checkpoints and back."""

import torch
import transformers

from wavemare.models.spans import chunks

TOKENS, LAYERS = 37, 2
_SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 12}


def _gpt2(**changes):
    return transformers.GPT2Config(
        vocab_size=TOKENS,
        n_positions=20,
        n_embd=16,
        n_layer=LAYERS,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        **changes,
    )


CONFIGS = {
    "gpt2": _gpt2,
    "gpt2, exact GELU, untied": lambda: _gpt2(
        activation_function="gelu", tie_word_embeddings=False, n_inner=24
    ),
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "llama, scaled positions, tied": lambda: transformers.LlamaConfig(
        **_SIZES | {"max_position_embeddings": 10000},
        tie_word_embeddings=True,
        head_dim=8,
        rope_parameters=_LLAMA3,
    ),
    "llama, biases": lambda: transformers.LlamaConfig(**_SIZES, attention_bias=True, mlp_bias=True),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "mistral, a window": lambda: transformers.MistralConfig(**_SIZES, sliding_window=5),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=8, tie_word_embeddings=True),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SIZES, num_experts_per_tok=2, num_local_experts=4
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES, **_EXPERTS, shared_expert_intermediate_size=20
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, head_dim=8, norm_topk_prob=True
    ),
}


def build(name, **changes):
    """Return a model with values of its own in every weight, biases and norms as well."""
    transformers.set_seed(3)
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


@torch.no_grad()
def logits(model):
    """What a model says of some tokens."""
    return model(torch.arange(24).view(2, 12) % TOKENS).logits


def lies_at(weight, spans):
    """Whether the bytes of a tensor are those of parts of files."""
    numbers = weight.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return numbers.tobytes() == b"".join(map(bytes, chunks(spans)))


def files(folder):
    """The bytes of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
