# SPDX-License-Identifier: Apache-2.0
"""Configuration of the guards against wrong numbers: the section ``"wavemare": {"guard": ...}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from wavemare.errors import ConfigError
from wavemare.section import Section

__all__ = ["GuardConfig", "check_guard"]

_KEY = "wavemare.guard"


class GuardConfig(Section):
    """Numbers that are not finite: what follows from them."""

    nonfinite: Literal["off", "stop", "skip"] = "stop"
    """What a loss, a gradient or an activation that is not finite does to an optimizer step. With
    fp16 the default is ``off``: its loss scaler skips steps by itself."""

    max_skips: int = Field(default=10, ge=1)
    """Steps skipped one after the other at which ``skip`` stops the run, too."""


def check_guard(config: Mapping[str, Any], guard: GuardConfig) -> None:
    """Check that what is to be guarded is there.

    Args:
        config: DeepSpeed configuration.
        guard: Our section.

    Raises:
        ConfigError: Naming the key that would have no effect.
    """
    fp16 = config.get("fp16")
    if isinstance(fp16, Mapping) and fp16.get("enabled") and "nonfinite" in guard.model_fields_set:
        if guard.nonfinite != "off":
            reason = "with fp16 gradients overflow in a healthy run, and its loss scaler skips them"
            raise ConfigError(f"{_KEY}.nonfinite", guard.nonfinite, reason, "Leave it out")
    if "max_skips" in guard.model_fields_set and guard.nonfinite != "skip":
        reason = f"it has no effect on nonfinite {guard.nonfinite!r}"
        remedy = f'Set {_KEY}.nonfinite to "skip", or remove the key'
        raise ConfigError(f"{_KEY}.max_skips", guard.max_skips, reason, remedy)
