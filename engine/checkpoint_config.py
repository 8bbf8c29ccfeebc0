# SPDX-License-Identifier: Apache-2.0
"""Configuration of saving and loading: the ``"wavemare": {"checkpoint": ...}`` section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from wavemare.errors import ConfigError
from wavemare.section import Section

__all__ = ["CheckpointConfig", "check_checkpoint"]


class CheckpointConfig(Section):
    """How checkpoints are written, kept and verified."""

    keep: int | None = Field(default=None, ge=1)
    """How many complete checkpoints of this run stay when another one is complete; else all.
    The one that ``latest`` names always stays."""

    background: bool = False
    """Whether a thread writes while training goes on, from a copy in host memory of what the rank
    saves."""

    verify: Literal["checksums", "sizes"] = "checksums"
    """What is compared with the list of files before anything is loaded."""

    timeout_s: float = Field(default=1800.0, gt=0.0)
    """For how long a background save waits for the other ranks' files."""


def check_checkpoint(config: Mapping[str, Any], checkpoint: CheckpointConfig) -> None:
    """Check what background saves go with.

    Args:
        config: DeepSpeed configuration.
        checkpoint: The section.

    Raises:
        ConfigError: DeepSpeed is to write in a way of its own.
    """
    if not checkpoint.background:
        return
    stock = config.get("checkpoint")
    writer = stock.get("writer") if isinstance(stock, Mapping) else None
    for key, value in (
        ("checkpoint.writer", writer),
        ("datastates_ckpt", config.get("datastates_ckpt")),
    ):
        if value:
            reason = "DeepSpeed's writer and ours cannot both write in the background"
            remedy = "Leave it out, or wavemare.checkpoint.background"
            raise ConfigError(key, value, reason, remedy)
