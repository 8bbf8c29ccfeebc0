# SPDX-License-Identifier: Apache-2.0
"""What a Megatron checkpoint computes, straight from the shares in its files.

Each tensor-parallel rank's part is computed from its own file, in the order of that file's version,
and summed or concatenated as the ranks would: so a conversion is compared with something that has
not been through the conversion's own merging.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wavemare.megatron.files import Checkpoint

__all__ = ["megatron_logits"]

State = dict[str, Tensor]


@torch.no_grad()
def megatron_logits(checkpoint: Checkpoint, ids: Tensor) -> Tensor:
    """Return logits over the padded vocabulary, fp32 [batch, length, padded].

    Args:
        checkpoint: GPT or BERT.
        ids: Tokens [batch, length]; all are attended to, token types are 0.
    """
    arguments = checkpoint.arguments
    heads = int(arguments["num_attention_heads"])
    epsilon = float(arguments.get("layernorm_epsilon", 1e-5))
    is_bert = any("lm_head.dense.weight" in share for share in checkpoint.stages[-1])
    stages = [[_floats(share) for share in stage] for stage in checkpoint.stages]
    hidden = _embed(stages[0], ids)
    for stage in stages:
        layers = {int(n.split(".")[2]) for n in stage[0] if n.startswith("encoder.layers.")}
        for number in range(len(layers)):
            layer = _Layer(stage, f"encoder.layers.{number}.", epsilon)
            inner = layer.norm("input_layernorm", hidden)
            attended = layer.attention(inner, heads, checkpoint.version, causal=not is_bert)
            hidden = hidden + attended
            inner = layer.norm("post_attention_layernorm", hidden)
            hidden = hidden + layer.mlp(inner, arguments)
    last = stages[-1]
    final = _Layer(last, "encoder.", epsilon)
    hidden = final.norm("final_layernorm", hidden)
    if is_bert:
        hidden = F.linear(hidden, last[0]["lm_head.dense.weight"], last[0]["lm_head.dense.bias"])
        exact = not arguments.get("openai_gelu", False)
        hidden = F.gelu(hidden, approximate="none" if exact else "tanh")
        hidden = _Layer(last, "lm_head.", epsilon).norm("layernorm", hidden)
    logits = [F.linear(hidden, _head(share), share.get("lm_head.bias")) for share in last]
    return torch.cat(logits, dim=-1)


def _floats(share: State) -> State:
    return {name: weight.float() for name, weight in share.items()}


def _head(share: State) -> Tensor:
    for name in ("output_layer.weight", "word_embeddings_for_head.weight"):
        if name in share:
            return share[name]
    return share["embedding.word_embeddings.weight"]


def _embed(shares: list[State], ids: Tensor) -> Tensor:
    hidden: Any = 0
    first = 0
    for share in shares:
        table = share["embedding.word_embeddings.weight"]
        here = (ids >= first) & (ids < first + len(table))
        # Each rank looks up the tokens that are its own, and all add up.
        hidden = hidden + table[(ids - first) * here] * here[..., None]
        first += len(table)
    hidden = hidden + shares[0]["embedding.position_embeddings.weight"][: ids.shape[1]]
    types = shares[0].get("embedding.tokentype_embeddings.weight")
    return hidden if types is None else hidden + types[0]


class _Layer:
    """Weights of all ranks below one prefix."""

    def __init__(self, shares: list[State], prefix: str, epsilon: float) -> None:
        self.shares = [
            {name.removeprefix(prefix): w for name, w in share.items() if name.startswith(prefix)}
            for share in shares
        ]
        self.epsilon = epsilon

    def norm(self, name: str, hidden: Tensor) -> Tensor:
        own = self.shares[0]
        weight, bias = own[f"{name}.weight"], own[f"{name}.bias"]
        return F.layer_norm(hidden, weight.shape, weight, bias, self.epsilon)

    def attention(self, hidden: Tensor, heads: int, version: int, *, causal: bool) -> Tensor:
        batch, length, width = hidden.shape
        each, rows = heads // len(self.shares), width // heads
        total: Any = 0
        for share in self.shares:
            weight = share["self_attention.query_key_value.weight"]
            bias = share["self_attention.query_key_value.bias"]
            fused = F.linear(hidden, weight, bias)
            if version == 0:
                query, key, value = fused.view(batch, length, 3, each, rows).unbind(2)
            elif version == 1:
                query, key, value = fused.view(batch, length, each, rows, 3).unbind(4)
            else:
                query, key, value = fused.view(batch, length, each, 3, rows).unbind(3)
            scores = torch.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(rows)
            if causal:
                later = torch.ones(length, length, dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later, -math.inf)
            context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value).flatten(2)
            total = total + F.linear(context, share["self_attention.dense.weight"])
        return total + self.shares[0]["self_attention.dense.bias"]

    def mlp(self, hidden: Tensor, arguments: dict[str, Any]) -> Tensor:
        # Megatron's fused bias and GELU is the tanh form, as is its --openai-gelu.
        tanh = arguments.get("bias_gelu_fusion", True) or arguments.get("openai_gelu", False)
        total: Any = 0
        for share in self.shares:
            inner = F.linear(
                hidden, share["mlp.dense_h_to_4h.weight"], share["mlp.dense_h_to_4h.bias"]
            )
            inner = F.gelu(inner, approximate="tanh" if tanh else "none")
            total = total + F.linear(inner, share["mlp.dense_4h_to_h.weight"])
        return total + self.shares[0]["mlp.dense_4h_to_h.bias"]
