# SPDX-License-Identifier: Apache-2.0
"""Error feedback on the level of updates: a stale step is made good when its gradient arrives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["UpdateFeedback"]

_KEY = "previous_update"


class UpdateFeedback:
    r"""Adds to each update of an optimizer what the one before it got wrong.

    At a delay of one step the update ``u_t`` is that of the weights before the last step: it is the
    one that step ``t - 1`` should have taken, where ``u_{t-1}`` was taken. The error ``u_t -
    u_{t-1}`` is added. A mean delay of ``tau`` steps takes it ``tau`` times, along the straight
    line through the two, and ``sqrt(tau)`` times beyond one step, as the noise in the difference of
    two updates does not shrink with their distance:

    .. math:: w_{t+1} = w_t + u_t + \min(\tau, \sqrt{\tau}) \, (u_t - u_{t-1})

    After the error feedback for pipelines of one step of delay (arXiv 2606.30634), whose formula
    was not at hand: this one is derived from what the update should have been. It knows nothing of
    the optimizer, costs one copy of the (master) weights for the update before, kept in the
    optimizer's state and so in its checkpoints, and one more for as long as a step takes.

    Args:
        optimizer: Steps the weights; under ZeRO its own partitions of them.
        delay: Returns the mean delay in optimizer steps of the next step; at 0 the update is the
            optimizer's own.
    """

    def __init__(self, optimizer: Optimizer, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._former: list[Tensor] = []
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @torch.no_grad()
    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._former = [p.detach().clone() for p in _stepped(optimizer)]

    @torch.no_grad()
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        delay = self._delay()
        extent = min(delay, math.sqrt(delay))
        for parameter, update in zip(_stepped(optimizer), self._former, strict=True):
            torch.sub(parameter, update, out=update)
            previous = optimizer.state[parameter].get(_KEY)
            # The optimizer's first update is no change of another one.
            if previous is None and _has_only_looked(optimizer):
                continue
            if previous is not None and extent:
                parameter.add_(update, alpha=extent).sub_(previous, alpha=extent)
            optimizer.state[parameter][_KEY] = update
        self._former = []


def _has_only_looked(optimizer: Any) -> bool:
    """Whether the optimizer has taken no step of some tensor: SOAP begins with a look at its axes.

    An update after that would count as a change of nothing, and be made twice.
    """
    states = [optimizer.state[p] for p in _stepped(optimizer)]
    cut = [part for state in states for part in state.get("tensors", {}).values()]  # by ZeRO
    return any("step" in state and not state["step"] for state in (*states, *cut))


def _stepped(optimizer: Any) -> list[Tensor]:
    """Return the parameters that a step changes: those that have a gradient."""
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]
