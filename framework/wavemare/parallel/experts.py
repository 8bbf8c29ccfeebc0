# SPDX-License-Identifier: Apache-2.0
"""Experts of a transformers model, divided over a group of ranks.

Every row (a token and one of its experts) travels to the rank of that expert and back: one
all-to-all each way, and again in the backward pass. In between the model's own code computes the
rank's experts. The sender applies the routing weights.

Ranks that split the other layers have the same tokens. Each of them sends a part of these, and an
all-gather gives all of them the results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch import distributed as dist
from transformers import PreTrainedModel

from wavemare.engine.launch.group import group_for
from wavemare.engine.waves.passes import wait
from wavemare.errors import ModelError
from wavemare.models.deferred import deferred, keep_rows, lacks_weights
from wavemare.parallel.tensor.layers import GroupMap
from wavemare.parallel.tensor.partition import check_equal_weights

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Types of models that are tested."""

STACKED = {"gate_up_proj", "down_proj"}
"""Parameters of a module of experts: of all of them, in dimension 0."""
_KEY = "wavemare.expert_parallel.size"


def split_experts(model: Any, group: Any, tensor_group: Any = None) -> Any:
    """Keep this rank's share of the experts of every layer, in place.

    Parameters keep their identity and their names, and lose rows of dimension 0. They get the marks
    by which DeepSpeed reduces and clips experts. Routers and shared experts stay whole. The loss of
    a rank is the one that the whole model computes for its batch, with the auxiliary loss.

    Args:
        model: A transformers model of `FAMILIES`, or a LoRA model of one, with equal weights on
            all ranks. `split_model` may have split the rest of it.
        group: The ranks, in the order of their experts; all call this.
        tensor_group: Those of them that have the same batches, as they split the other layers: all
            ranks of ``group``, or consecutive ones. None if each rank has batches of its own.

    Returns:
        The model.

    Raises:
        ModelError: It cannot be split so; the same on all ranks, before it changes.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    layers = check_experts(model, size)
    check_equal_weights(model)
    for layer in layers:
        count = layer.num_experts = layer.num_experts // size
        for parameter in layer.parameters():
            whole_numel = parameter.numel()
            first, last = rank * count, (rank + 1) * count
            if deferred(parameter) is None:
                parameter.data = parameter.data[first:last].clone()
            else:
                keep_rows(parameter, first, last)
            marks = {"whole_numel": whole_numel, "model_parallel": True, "expert_group": group}
            vars(parameter).update(marks, allreduce=False, group_name=f"ep_size_{size}")
        exchange = partial(_forward, layer, layer.forward, group)
        if tensor_group is not None:
            exchange = partial(_forward_of_parts, exchange, tensor_group)
        layer.forward = exchange
    return model


def check_experts(model: Any, size: int) -> list[Any]:
    """Return the layers of a model whose experts `split_experts` can divide.

    Args:
        model: See `split_experts`.
        size: Number of ranks.

    Raises:
        ModelError: They cannot be divided.
    """
    from wavemare.models.adapters import base_of  # which imports this module

    base = base_of(model)
    layers = [
        m for m in base.modules() if STACKED == dict(m.named_parameters(recurse=False)).keys()
    ]
    _check(base, layers, size)
    return layers


def _forward_of_parts(
    exchange: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute tokens that the ranks of a group have in common: each takes a part, perhaps none."""
    whole = partial(_all_rows, rows=len(hidden_states))
    states = GroupMap.apply(hidden_states, group, _own_rows, whole)
    weights = GroupMap.apply(top_k_weights, group, _own_rows, whole)
    part = exchange(states, _own_rows(top_k_index, group), weights)
    return GroupMap.apply(part, group, whole, _own_rows)


def _own_rows(value: Tensor, group: Any) -> Tensor:
    size = -(-len(value) // dist.get_world_size(group))
    return value[dist.get_rank(group) * size :][:size]


def _all_rows(part: Tensor, group: Any, rows: int) -> Tensor:
    """Return (rows, width) of all ranks: `_own_rows` has given each its part."""
    ranks = dist.get_world_size(group)
    size = -(-rows // ranks)
    padded = F.pad(part, (0, 0, 0, size - len(part)))
    whole = part.new_empty(size * ranks, part.shape[1])
    group = group_for(part, group)
    wait(dist.all_gather_into_tensor(whole, padded, group=group, async_op=True))
    return whole[:rows]


def _forward(
    layer: Any,
    compute: Callable[[Tensor, Tensor, Tensor], Tensor],
    group: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Stand for the ``forward`` of transformers' experts, of which each rank has some."""
    size, chosen = dist.get_world_size(group), top_k_index.shape[-1]
    order = top_k_index.flatten().argsort(stable=True)
    # Copied before they are sorted: gradients of one row are then never added in random order.
    rows = hidden_states.repeat_interleave(chosen, dim=0).index_select(0, order)
    counts = top_k_index.flatten().bincount(minlength=size * layer.num_experts)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group_for(counts, group))
    sent, received = torch.stack([counts, arriving]).view(2, size, -1).sum(-1).tolist()
    there = partial(_exchanged, sent=sent, received=received)
    back = partial(_exchanged, sent=received, received=sent)
    rows = GroupMap.apply(rows, group, there, back)
    experts = torch.arange(layer.num_experts, device=rows.device).repeat(size)
    experts = experts.repeat_interleave(arriving, output_size=len(rows)).unsqueeze(1)
    if len(rows):
        rows = compute(rows, experts, torch.ones_like(experts, dtype=rows.dtype))
    else:
        rows = _zero_gradients(layer, rows)
    rows = GroupMap.apply(rows, group, back, there)
    rows = rows.index_select(0, order.argsort()).view(*top_k_index.shape, -1)
    return (rows * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


def _zero_gradients(layer: Any, rows: Tensor) -> Tensor:
    """Return no rows, whose backward pass gives the experts zero gradients.

    Without gradients the backward pass of this rank would miss an all-to-all, or a reduction.
    """
    inner = F.linear(rows, layer.gate_up_proj[0])[:, : layer.down_proj.shape[-1]]
    return F.linear(inner, layer.down_proj[0]).to(rows.dtype)


def _exchanged(rows: Tensor, group: Any, sent: list[int], received: list[int]) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    rows, group = rows.contiguous(), group_for(rows, group)
    wait(dist.all_to_all_single(arrived, rows, received, sent, group=group, async_op=True))
    return arrived


def _check(model: Any, layers: list[Any], size: int) -> None:
    name, others = type(model).__name__, "Leave wavemare.expert_parallel out; ZeRO shards experts"
    known = isinstance(model, PreTrainedModel) and model.config.base_model_ep_plan is not None
    kind = model.config.model_type if known else name
    if kind not in FAMILIES:
        reason = f"experts of {', '.join(FAMILIES)} are divided, and those of {kind} are not tested"
        raise ModelError("model", name, reason, others)
    if not layers:
        raise ModelError("model", name, "none of its layers has experts", others)
    experts = [p for layer in layers for p in layer.parameters()]
    if any("expert_group" in vars(p) for p in experts):
        raise ModelError("model", name, "its experts have been divided already", "Give a new one")
    if len({p.requires_grad for p in experts}) > 1:
        raise ModelError("model", name, "some of its experts are frozen, not all", others)
    if any(getattr(m, "base_layer", None) in layers for m in model.modules()):
        raise ModelError("model", name, "adapters change its experts", "Adapt other weights")
    if lacks_weights(model):
        reason = "its weights are not all here: they are on the meta device, or ZeRO-3 has cut them"
        raise ModelError("model", name, reason, "Load the weights, outside deepspeed.zero.Init")
    for layer in layers:
        if layer.num_experts % size:
            reason = f"the model's {layer.num_experts} experts cannot be divided by it"
            raise ModelError(_KEY, size, reason, "Use a divisor of the number of experts")
