# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model are split and how: transformers' plan of its class, or our own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from wavemare.errors import ModelError

EXPERTS = "moe_tp_experts"
"""transformers' style of a module of experts whose weights are split."""
_BERT = {
    **dict.fromkeys(
        (f"encoder.layer.*.attention.self.{part}" for part in ("query", "key", "value")), "colwise"
    ),
    "encoder.layer.*.attention.output.dense": "rowwise",
    "encoder.layer.*.intermediate.dense": "colwise",
    "encoder.layer.*.output.dense": "rowwise",
}


@dataclass(frozen=True)
class TensorPlan:
    """How the layers of a class are split.

    Args:
        styles: transformers' name of a style for each layer, named from the base model on; ``*``
            stands for the index of a block.
        divided: Attributes of an attention module that count what a rank has a part of.
        dropout: Attribute of an attention module: its dropout, a module or a probability.
    """

    styles: Mapping[str, str]
    divided: tuple[str, ...] = ()
    dropout: str = "attention_dropout"

    def without_experts(self) -> TensorPlan:
        """Return the plan that leaves experts whole."""
        owners = [name for name, style in self.styles.items() if style == EXPERTS]
        kept = {
            name: style
            for name, style in self.styles.items()
            if not any(f"{name}.".startswith(f"{owner}.") for owner in owners)
        }
        return replace(self, styles=kept)

    def layers(self, base: nn.Module) -> Iterator[tuple[str, str]]:
        """Yield name and style of each layer, or bare parameter, of a model that is split."""
        names = dict.fromkeys(name for name, _ in base.named_modules())
        names |= dict.fromkeys(name for name, _ in base.named_parameters())
        for pattern, style in self.styles.items():
            compiled = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
            yield from ((name, style) for name in names if compiled.fullmatch(name))


_OWN = {
    "gpt2": TensorPlan(
        {
            "h.*.attn.c_attn": "colwise_qkv",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        divided=("num_heads", "split_size"),
        dropout="attn_dropout",
    ),
    "bert": TensorPlan(_BERT, ("num_attention_heads", "all_head_size"), "dropout"),
    "roberta": TensorPlan(_BERT, ("num_attention_heads", "all_head_size"), "dropout"),
    "opt": TensorPlan(
        {
            **dict.fromkeys(
                (f"decoder.layers.*.self_attn.{part}_proj" for part in "qkv"), "colwise"
            ),
            "decoder.layers.*.self_attn.out_proj": "rowwise",
            "decoder.layers.*.fc1": "colwise",
            "decoder.layers.*.fc2": "rowwise",
        },
        divided=("num_heads",),
        dropout="dropout",
    ),
}


def plan_of(model: Any) -> TensorPlan:
    """Return the plan of a transformers model.

    Raises:
        ModelError: It is no model of transformers, or has no plan, or one that splits nothing.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "model_type"):
        raise ModelError(
            "model",
            type(model).__name__,
            "wavemare.tensor_parallel splits models of transformers alone",
            "Use ZeRO; or write a PipelineModule for it (docs/own-model.md)",
        )
    if config.model_type in _OWN:
        return _OWN[config.model_type]
    styles = getattr(config, "base_model_tp_plan", None) or {}
    if any(".*." in name for name in styles):
        return TensorPlan(styles)
    raise ModelError(
        "model",
        type(model).__name__,
        "transformers has no tensor-parallel plan for the blocks of this class "
        "(config.base_model_tp_plan)",
        f"Use ZeRO; or a class with a plan, such as llama, qwen3 and mixtral, or {', '.join(_OWN)}",
    )
