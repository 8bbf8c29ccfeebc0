# SPDX-License-Identifier: Apache-2.0
"""Error feedback: each update of an optimizer corrects the one before, which was stale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wavemare.pipeline.optim.matrix_optimizer import FEEDBACK
from wavemare.pipeline.optim.soap_muon import Muon


class UpdateFeedback:
    r"""Adds the error of the previous update to each update of an optimizer.

    At a delay of one step, the update ``u_t`` belongs to the weights before the last step: step
    ``t - 1`` should have taken it instead of ``u_{t-1}``. The error ``u_t - u_{t-1}`` is added. A
    mean staleness of ``tau`` steps adds it ``tau`` times, and beyond one step ``sqrt(tau)`` times,
    as the noise of the difference does not shrink with the distance:

    .. math:: w_{t+1} = w_t + u_t + \min(\tau, \sqrt{\tau}) \, (u_t - u_{t-1})

    Inspired by the error feedback for pipelines of one step of delay (arXiv 2606.30634). The
    formula is our own derivation. It works for any optimizer. It costs one copy of the (master)
    weights for the previous update, in the optimizer's state and checkpoints, and one more during a
    step.

    Args:
        optimizer: Steps the weights, or ZeRO's partitions of them.
        delay: Returns the mean staleness of the next step in optimizer steps; 0 adds nothing.
    """

    def __init__(self, optimizer: Optimizer, delay: Callable[[], float]) -> None:
        self._delay = delay
        self._former: list[Tensor] = []
        if isinstance(optimizer, Muon):  # which does it while it writes the weights
            optimizer.extent = self._extent
            return
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _extent(self) -> float:
        delay = self._delay()
        return min(delay, math.sqrt(delay))

    @torch.no_grad()
    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._former = [p.detach().clone() for p in _stepped(optimizer)]

    @torch.no_grad()
    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        extent = self._extent()
        for parameter, update in zip(_stepped(optimizer), self._former, strict=True):
            torch.sub(parameter, update, out=update)
            previous = optimizer.state[parameter].get(FEEDBACK)
            # The first update has no previous one.
            if previous is None and getattr(optimizer, "has_only_looked", False):
                continue  # SOAP's first step only computes its basis
            if previous is not None and extent:
                parameter.add_(update, alpha=extent).sub_(previous, alpha=extent)
            optimizer.state[parameter][FEEDBACK] = update
        self._former = []


def forget_updates(optimizer: Optimizer) -> None:
    """Drop the previous updates, which a checkpoint of a run with feedback has brought."""
    for state in optimizer.state.values():
        state.pop(FEEDBACK, None)


def _stepped(optimizer: Any) -> list[Tensor]:
    """Return the parameters that have a gradient."""
    groups = optimizer.param_groups
    return [p for group in groups for p in group["params"] if p.grad is not None]
