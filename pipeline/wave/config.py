# SPDX-License-Identifier: Apache-2.0
"""Configuration of waves: the ``"wavemare": {"wavelet": ...}`` section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wavemare.section import Section

__all__ = ["WaveletConfig"]


class WaveletConfig(Section):
    """Two waves of micro-batches, half a cycle apart on the same device."""

    mode: Literal["off", "auto", "sync", "async", "replica", "model_parallel"] = "off"
    """``sync`` pairs the backward passes of a micro-batch with the forward passes of the next: the
    same sums as gradient accumulation. ``auto`` measures first and turns ``sync`` on where that
    pays. ``async`` never drains: gradients are those of the weights one step ago, and their
    reduction hides behind the next step. ``replica`` is the paper's rule with two replicas of the
    weights, for SGD. ``model_parallel``, the paper's other form, is done by ZeRO-3."""

    pair_order: Literal["bf", "fb"] = "bf"
    """Whether the backward or the forward pass comes first in a pair; ``fb`` keeps one more
    segment's activations."""

    budget: float | None = Field(default=None, ge=1)
    """Bytes that both waves may keep, as a multiple of what one micro-batch keeps: forward passes
    wait until there is room. If omitted, they advance segment by segment."""

    compile: bool = False
    """Whether each segment goes through ``torch.compile``."""

    warmup_steps: int = Field(default=0, ge=0)
    """With ``async`` and ``replica``, so many first optimizer steps are synchronous."""
