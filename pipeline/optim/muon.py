# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for the rest, over ZeRO's flat partitions too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import ConfigError, did_you_mean
from wavemare.pipeline.optim.matrix_optimizer import (
    SIDES,
    MatrixOptimizer,
    Shape,
    State,
    adam_update,
    check_betas,
    check_number,
)

__all__ = ["Muon"]

_ADJUSTMENTS = ("original", "match_rms_adamw")


class Muon(MatrixOptimizer):
    """``torch.optim.Muon`` for matrices, AdamW for other tensors.

    DeepSpeed's own Muon is not used for pipelines: it refuses them in bf16, its ZeRO 1 clips the
    orthogonal updates rather than the gradients, and it compiles its iteration.

    A parameter group with ``use_muon`` false is stepped by AdamW: for embeddings and output heads.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        momentum: Decay of the average of gradients of matrices.
        nesterov: Whether the update is of that average a step ahead.
        weight_decay: Decoupled, times the learning rate.
        ns_steps: Steps of the Newton-Schulz iteration, in bf16 as in torch.
        adjust_lr_fn: Factor of the update of a matrix of m rows and n columns: ``original`` is
            ``sqrt(max(1, m / n))``, ``match_rms_adamw`` ``0.2 sqrt(max(m, n))``, at which AdamW's
            learning rates do.
        betas: AdamW's.
        eps: AdamW's.

    Raises:
        ConfigError: A number is out of range, or there is no such adjustment.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: str = "original",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        check_number("lr", lr, 0)
        check_number("momentum", momentum, 0, 1)
        check_number("weight_decay", weight_decay, 0)
        check_number("ns_steps", ns_steps, 1, 100, whole=True)
        check_betas("betas", betas)
        check_number("eps", eps, 0)
        if adjust_lr_fn not in _ADJUSTMENTS:
            remedy = did_you_mean(str(adjust_lr_fn), _ADJUSTMENTS)
            raise ConfigError("adjust_lr_fn", adjust_lr_fn, "there is no such adjustment", remedy)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": bool(nesterov),
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": tuple(betas),
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def is_matrix(self, group: Mapping[str, Any], shape: Shape) -> bool:
        """Return whether a tensor has two sides, in a group that is stepped by Muon."""
        return len(shape) == SIDES and bool(group["use_muon"])

    def update(self, group: Mapping[str, Any], state: State, grad: Tensor) -> Tensor | None:
        """See `MatrixOptimizer.update`."""
        if not self.is_matrix(group, tuple(grad.shape)):
            return adam_update(state, grad, group["betas"], group["eps"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        # torch's Muon steps a matrix of zeros at learning rate 1, which gives the update. It cannot
        # step ZeRO's flat partitions itself.
        matrix = torch.zeros_like(grad)
        matrix.grad = grad
        inner = torch.optim.Muon(
            [matrix],
            lr=1.0,
            weight_decay=0.0,
            **{key: group[key] for key in ("momentum", "nesterov", "ns_steps", "adjust_lr_fn")},
        )
        inner.state[matrix]["momentum_buffer"] = state["momentum_buffer"]
        inner.step()
        return matrix.neg_()
