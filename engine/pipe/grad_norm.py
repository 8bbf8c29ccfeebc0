# SPDX-License-Identifier: Apache-2.0
"""A norm of all gradients whose bits do not depend on which rank has which layer."""

from __future__ import annotations

import torch
from deepspeed import comm as dist
from deepspeed.pipe import TiedLayerSpec
from torch import Tensor

from wavemare.engine.context import StageContext
from wavemare.engine.experts import expert_group, is_divided
from wavemare.engine.optim.adapter import adapt

_BLOCK = 1 << 20
"""Elements that are squared in fp64 at a time."""
_EPSILON = 1e-6  # DeepSpeed's own, in the denominator of the clipping coefficient


class LayerwiseNorm:
    """Adds squares in fp64: of each layer on its rank, then of all layers in their order.

    Tied copies count once, and so do the weights beside experts that data ranks share. Where ZeRO
    cuts a layer, the cut changes the last bits of fp64, which the rounding to fp32 drops. The
    optimizer takes this norm in place of DeepSpeed's.

    Args:
        engine: Complete, but for what follows the optimizer. Its ranks do not split layers.
    """

    def __init__(self, engine: StageContext) -> None:
        self._adapter, self._device = adapt(engine), engine.device
        experts = expert_group(engine.module.parameters())
        if self._adapter.partitions_gradients:
            experts = None  # the data ranks are added up, whatever they hold
            self._groups = [engine.data_parallel_group]
        else:
            self._groups = [] if experts is None else [experts]
        self._groups.append(engine.grid.get_pipe_parallel_group())
        counts_all = experts is None or dist.get_rank(experts) == 0
        layers = list(enumerate(engine.module._layer_specs))
        self._num_layers = len(layers)
        tied = {s.key: n for n, s in reversed(layers) if isinstance(s, TiedLayerSpec)}
        self._layer_of = {}
        for name, parameter in engine.module.named_parameters():
            if getattr(parameter, "ds_pipe_replicated", False):
                continue
            if not (counts_all or is_divided(parameter)):
                continue
            number, key, *_ = name.split(".")
            layer = tied[key] if number == "tied_modules" else len(layers) - 1  # that of a loss
            self._layer_of[id(parameter)] = int(number) if number.isdecimal() else layer
        self._adapter.clip_by(self)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the norm of this step's gradients: scalar, fp32. All ranks must call it."""
        layers: list[list[Tensor]] = [[] for _ in range(self._num_layers)]
        for parameter, gradient in self._adapter.gradients_by_parameter():
            layer = self._layer_of.get(id(parameter))
            if gradient is not None and layer is not None:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                layers[layer] += values.reshape(-1).split(_BLOCK)
        squares = torch.zeros(self._num_layers, dtype=torch.float64, device=self._device)
        for layer, blocks in enumerate(layers):
            if blocks:
                norms = torch._foreach_norm(blocks, 2, torch.float64)
                squares[layer] = torch.stack(norms).square().sum()
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sum().sqrt().float()

    def clip(self, limit: float) -> None:
        """Clip the gradients of an optimizer that no wrapper of DeepSpeed's holds."""
        coefficient = limit / (self() + _EPSILON)
        torch._foreach_mul_(self._adapter.gradients(), coefficient.clamp(max=1.0))
