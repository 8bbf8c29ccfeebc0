# SPDX-License-Identifier: Apache-2.0
"""What of a configuration the sparse collective cannot go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.errors import ConfigError

__all__ = ["check_sparse_collective"]

_ZERO_WEIGHTS = 3
_LEAVE = 'set wavemare.sparse_collective.mode to "off"'


def check_sparse_collective(
    config: Mapping[str, Any], zero: Mapping[str, Any], *, compresses: bool
) -> None:
    """Check a configuration whose ``wavemare.sparse_collective.mode`` is not ``off``.

    Args:
        config: DeepSpeed configuration.
        zero: Its ``zero_optimization`` section.
        compresses: Whether there is a compressor.

    Raises:
        ConfigError: Naming the key that cannot go with it.
    """
    if zero.get("stage", 0) == _ZERO_WEIGHTS:
        raise ConfigError(
            "zero_optimization.stage",
            _ZERO_WEIGHTS,
            "ZeRO 3 scatters gradients layer by layer, which the sparse collective does not do",
            f"Use 0, 1 or 2, or {_LEAVE}",
        )
    for name in ("offload_optimizer", "zenflow"):
        section = _section(zero, name)
        if section and section.get("device") != "none":
            reason = "gradients leave for the host as soon as they are gathered"
            raise _refusal(f"zero_optimization.{name}", dict(section), reason)
    tensor_parallel = _section(config, "tensor_parallel").get("autotp_size", 1)
    if tensor_parallel != 1:
        reason = "its ranks hold parts of the weights"
        raise _refusal("tensor_parallel.autotp_size", tensor_parallel, reason)
    sequence_parallel = config.get("sequence_parallel_size", 1)
    if sequence_parallel != 1:
        reason = "its ranks share samples and average otherwise"
        raise _refusal("sequence_parallel_size", sequence_parallel, reason)
    for name, key, reason in (
        ("expert_parallel", "enabled", "gradients of experts belong to groups of their own"),
        ("compile", "deepcompile", "compiled graphs reduce gradients by themselves"),
        ("hybrid_engine", "enabled", "DeepSpeed's hybrid engine reduces gradients by itself"),
    ):
        if _section(config, name).get(key) is True:
            raise _refusal(f"{name}.{key}", True, reason)
    half = _section(config, "fp16")
    if compresses and half.get("enabled") is True:
        raise ConfigError(
            "fp16.enabled",
            True,
            "a step that overflows is skipped, and what a compressor has sent in it would be lost",
            'Use "bf16": {"enabled": true}, or no compressor',
        )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def _refusal(key: str, value: object, reason: str) -> ConfigError:
    reason = f"{reason}, which the sparse collective does not know"
    return ConfigError(key, value, reason, f"Remove the key, or {_LEAVE}")
