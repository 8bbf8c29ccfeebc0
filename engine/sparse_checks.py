# SPDX-License-Identifier: Apache-2.0
"""What of a configuration the sparse collective cannot go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.comm.config import HALVES, LOOSE_MODES, SparseCollectiveConfig
from wavemare.engine.config_shape import (
    SECTION,
    ZERO_WEIGHTS,
    is_enabled,
    offloads,
    refuse_idle,
    section_of,
)
from wavemare.engine.guard_config import GuardConfig
from wavemare.errors import ConfigError

__all__ = ["check_sparse_collective"]

_LEAVE = 'set wavemare.sparse_collective.mode to "off"'


def check_sparse_collective(
    config: Mapping[str, Any],
    zero: Mapping[str, Any],
    sparse: SparseCollectiveConfig,
    guard: GuardConfig,
) -> None:
    """Check what a configuration says of the sparse collective, and what goes with it.

    Args:
        config: DeepSpeed configuration.
        zero: Its ``zero_optimization`` section.
        sparse: The section ``wavemare.sparse_collective``.
        guard: The section ``wavemare.guard``.

    Raises:
        ConfigError: Naming the key that has no effect or cannot go with it.
    """
    if sparse.mode == "off":
        refuse_idle(sparse, f"{SECTION}.sparse_collective", "auto")
        return
    _check_settings(zero, sparse)
    if zero.get("stage", 0) == ZERO_WEIGHTS:
        raise ConfigError(
            "zero_optimization.stage",
            ZERO_WEIGHTS,
            "ZeRO 3 scatters gradients layer by layer, which the sparse collective does not do",
            f"Use 0, 1 or 2, or {_LEAVE}",
        )
    for name in ("offload_optimizer", "zenflow"):
        if offloads(zero, name):
            reason = "gradients leave for the host as soon as they are gathered"
            raise _refusal(f"zero_optimization.{name}", zero.get(name, True), reason)
    tensor_parallel = section_of(config, "tensor_parallel").get("autotp_size", 1)
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
        if section_of(config, name).get(key):
            raise _refusal(f"{name}.{key}", True, reason)
    if sparse.compressor is not None and is_enabled(config, "fp16"):
        raise ConfigError(
            "fp16.enabled",
            True,
            "a step that overflows is skipped, and what a compressor has sent in it would be lost",
            'Use "bf16": {"enabled": true}, or no compressor',
        )
    if sparse.compressor is not None and guard.nonfinite == "skip":
        reason = "what a compressor has sent in a step that is skipped would be lost"
        raise ConfigError(f"{SECTION}.guard.nonfinite", "skip", reason, 'Use "stop"')


def _check_settings(zero: Mapping[str, Any], sparse: SparseCollectiveConfig) -> None:
    if sparse.deterministic and sparse.mode in LOOSE_MODES:
        raise ConfigError(
            f"{SECTION}.sparse_collective.mode",
            sparse.mode,
            "it does not sum in the order of the ranks, which deterministic asks for",
            "Set deterministic to false, or choose auto, ordered, pushpull or allgather",
        )
    stage = zero.get("stage", 0)
    scatters = stage and zero.get("reduce_scatter", True)
    if scatters and sparse.mode not in ("auto", *HALVES):
        reason = f"it has no reduce-scatters, which ZeRO {stage} makes"
        remedy = f"Choose auto, {' or '.join(HALVES)}, or use ZeRO 0"
        raise ConfigError(f"{SECTION}.sparse_collective.mode", sparse.mode, reason, remedy)
    if sparse.hierarchical and scatters:
        reason = f"it has no effect on the reduce-scatters of ZeRO {stage}"
        remedy = "Leave it out, or use ZeRO 0"
        raise ConfigError(f"{SECTION}.sparse_collective.hierarchical", True, reason, remedy)


def _refusal(key: str, value: object, reason: str) -> ConfigError:
    reason = f"{reason}, which the sparse collective does not know"
    return ConfigError(key, value, reason, f"Remove the key, or {_LEAVE}")
