# SPDX-License-Identifier: Apache-2.0
"""The layers of any model that can be cut, counted on the model itself, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from wavemare.errors import ModelError
from wavemare.models.disk_names import empty_model
from wavemare.models.families import family_of
from wavemare.models.layers import TiedHead
from wavemare.parallel.experts import FAMILIES as DIVIDED
from wavemare.parallel.experts import STACKED
from wavemare.parallel.planner.model import (
    LayerCost,
    Sizes,
    block_cost,
    embedding_cost,
    head_cost,
    small_cost,
)
from wavemare.parallel.tensor.plan import plan_of

_MATRIX = 2


def layers_of(config: Any, head: str, sizes: Sizes) -> tuple[list[LayerCost], bool, int]:
    """Return the layers of a model, whether it can be split, and its experts that can be divided.

    Args:
        config: A transformers configuration, or the content of its ``config.json``.
        head: Class of the model; "" for the configuration's.
        sizes: Of the configuration.

    Raises:
        ModelError: transformers makes no model of it, or it cannot be cut.
    """
    import transformers

    config = as_config(config)
    try:
        model = empty_model(config, getattr(transformers, head, None) if head else None)
        family = family_of(model)
    except ModelError as error:
        raise ModelError("model_type", config.model_type, error.reason, error.remedy) from error
    chain = family.chain(model, family.declared(None))
    active = int(getattr(config, "num_experts_per_tok", 0) or 0)
    costs: list[LayerCost] = []
    for place, layer in enumerate(chain):
        own = list(layer.named_parameters())
        count = sum(weight.numel() for _, weight in own)
        if layer.is_block:
            costs.append(_block(sizes, own, count, active))
        elif place == 0:
            costs.append(replace(embedding_cost(sizes), parameters=count))
        elif place == len(chain) - 1:
            embedding: Any = layer.tied.embedding if isinstance(layer, TiedHead) else None
            tied = embedding.weight.numel() if embedding is not None else 0
            costs.append(replace(head_cost(sizes), parameters=count, tied_parameters=tied))
        else:
            costs.append(small_cost(f"layer {place}", sizes, count))
    try:
        plan_of(model)
        splits = True
    except ModelError:
        splits = False
    experts = _experts(model) if config.model_type in DIVIDED else 0
    return costs, splits, experts


def as_config(config: Any) -> Any:
    """Return the configuration of transformers that a mapping describes.

    Raises:
        ModelError: transformers makes none of it.
    """
    from transformers import AutoConfig

    if not isinstance(config, Mapping):
        return config
    values = dict(config)
    kind = values.pop("model_type", None)
    try:
        return AutoConfig.for_model(kind, **values)
    except Exception as error:  # of wrong values, too, for which transformers has its own
        said = " ".join(str(error).split())[:200]
        reason = f"transformers makes no configuration of it ({said})"
        raise ModelError("model_type", kind, reason, "Mend its config.json") from error


def _block(sizes: Sizes, own: list[tuple[str, Any]], count: int, active: int) -> LayerCost:
    """Return a block's costs: all matrices multiply a token, and those of its experts."""
    stacked = [w for name, w in own if name.rpartition(".")[2] in STACKED and w.dim() > _MATRIX]
    matrices = sum(weight.numel() for _, weight in own if weight.dim() == _MATRIX)
    if not stacked or not active:
        return block_cost(sizes, count, matrices)
    experts = stacked[0].shape[0]
    total = sum(weight.numel() for weight in stacked)
    inner = active * total // experts // (3 * sizes.width)  # gate, up and down
    return block_cost(
        sizes,
        count,
        matrices + active * total // experts,
        inner=max(inner, 1),
        expert_parameters=total,
        routed=float(active),
    )


def _experts(model: Any) -> int:
    """Return how many experts each layer with experts has."""
    counts = {
        weight.shape[0]
        for name, weight in model.named_parameters()
        if name.rpartition(".")[2] in STACKED and weight.dim() > _MATRIX
    }
    return min(counts, default=0)
