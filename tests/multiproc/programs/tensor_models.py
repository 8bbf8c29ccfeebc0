# SPDX-License-Identifier: Apache-2.0
"""Tiny models of many families and kinds and their batches."""

from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from wavemare.parallel.tensor.partition import partition_of

# What configurations of transformers call these sizes, where they have them.
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "max_position_embeddings": 32,
    "sliding_window": 5,
    "query_pre_attn_scalar": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "vocab_size": 101,
}
LENGTH = 9
GPT2: dict[str, Any] = {
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
BERT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 3,
    "num_labels": 3,
}
# 96 tokens need no padding on 2 ranks, 101 do, and of 20 the last of 4 ranks holds none.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {"vocab_size": 96}),
    "gpt2-101": ("gpt2", {"vocab_size": 101, "n_inner": 24}),
    "gpt2-20": ("gpt2", {"vocab_size": 20}),
    "gpt2-untied": ("gpt2", {"vocab_size": 101, "tie_word_embeddings": False}),
    "gpt2-eager": (
        "gpt2",
        {
            "vocab_size": 96,
            "attn_implementation": "eager",
            "reorder_and_upcast_attn": True,
            "scale_attn_by_inverse_layer_idx": True,
        },
    ),
    "bert-mlm": ("bert-mlm", {"vocab_size": 96}),
    "bert-mlm-101": ("bert-mlm", {"vocab_size": 101}),
    "bert-mlm-untied": ("bert-mlm", {"vocab_size": 101, "tie_word_embeddings": False}),
    "bert-cls": ("bert-cls", {"vocab_size": 101}),
    "bert-qa": ("bert-qa", {"vocab_size": 101, "num_labels": 2}),
    "bert-regression": ("bert-cls", {"vocab_size": 96, "num_labels": 1}),
}
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    f"{kind}-kv1": (kind, {"num_key_value_heads": 1}) for kind in ("llama", "qwen2", "qwen3")
}
"""One head of keys and values, which all ranks hold."""


class Widths(TorchDispatchMode):
    """Notes the last dimensions of all tensors that are computed."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(t)]
        self.seen |= {tensor.shape[-1] for tensor in tensors if tensor.ndim > 1}
        return result


def build(name, residual=0.0, attention=0.0):
    own = name.removesuffix("-tied"), {"tie": name.endswith("-tied")}
    kind, changes = (KINDS | SHARED).get(name, own)
    transformers.set_seed(7)
    if kind == "gpt2":
        drop = {"resid_pdrop": residual, "embd_pdrop": residual, "attn_pdrop": attention}
        model: Any = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(**{**GPT2, **drop, **changes})
        )
    elif kind not in ("bert-mlm", "bert-cls", "bert-qa"):
        drop = dict.fromkeys(("attention_dropout", "attention_probs_dropout_prob"), attention)
        drop |= {"dropout": residual, "hidden_dropout_prob": residual}
        model = of_family(kind, {**drop, **changes})
    else:
        drop = {"hidden_dropout_prob": residual, "attention_probs_dropout_prob": attention}
        config = transformers.BertConfig(**{**BERT, **drop, **changes})
        heads = {
            "bert-mlm": transformers.BertForMaskedLM,
            "bert-cls": transformers.BertForSequenceClassification,
            "bert-qa": transformers.BertForQuestionAnswering,
        }
        model = heads[kind](config)
    for parameter in model.parameters():
        # Weights of trained size, and biases that show where they are added twice or not at all.
        scale = 4.0 if parameter.ndim > 1 else 1.0
        parameter.data.mul_(scale).add_(0.1 * torch.randn(parameter.shape) * (parameter.ndim == 1))
    return model


def of_family(model_type, changes):
    """A tiny language model of a type that transformers knows."""
    kind = transformers.CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | kind.attribute_map.keys()
    tied = changes.pop("tie", False)
    sizes = {name: value for name, value in {**SMALL, **changes}.items() if name in known}
    config = kind(**sizes, tie_word_embeddings=tied)
    masked = model_type in ("roberta", "modernbert")
    heads = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    return heads.from_config(config)


def batch(model, seed=13, texts=3):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, model.config.vocab_size, (texts, LENGTH), generator=generator)
    device = next(model.parameters()).device
    ids[0, :2] = 3  # BERT's padding, which is a token of these texts as well
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    result = {"input_ids": ids, "attention_mask": mask}
    if model.config.model_type == "bert":
        result["token_type_ids"] = (torch.arange(LENGTH) > LENGTH // 2).long().repeat(texts, 1)
    if "Classification" in type(model).__name__:
        labels = torch.arange(texts) % 3
        result["labels"] = labels if model.config.num_labels > 1 else labels.float()
    elif "Question" in type(model).__name__:
        result["start_positions"] = torch.arange(texts)
        result["end_positions"] = torch.arange(texts) + 2
    else:
        result["labels"] = ids.masked_fill(mask == 0, -100)
    return {name: tensor.to(device) for name, tensor in result.items()}


def gradients(model):
    """Gradients by the names of the state dict; names that are tied share one."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: value.grad for name, value in named if value.grad is not None}


def distance(these, those):
    """Largest difference, against the largest element of that tensor."""
    assert these.keys() == those.keys(), these.keys() ^ those.keys()
    worst = 0.0
    for name, value in these.items():
        assert value.shape == those[name].shape, name
        if value.numel():
            scale = max(1.0, float(those[name].abs().max()))
            worst = max(worst, float((value - those[name]).abs().max()) / scale)
    return worst


def own_part(whole, split, rank, ranks):
    """A rank's part of tensors of a whole model, by the partitions of the split one's weights."""
    cuts = {name: partition_of(value) for name, value in split.state_dict(keep_vars=True).items()}
    return {
        name: cuts[name].part(value.detach(), rank, ranks) if cuts[name] else value.detach()
        for name, value in whole.items()
    }
