# SPDX-License-Identifier: Apache-2.0
"""What of a configuration waves cannot go with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.engine.config_shape import is_enabled, refuse_idle
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.wave_config import WaveletConfig

__all__ = ["check_wavelet"]

_MODE = "wavemare.wavelet.mode"
_LINEAR = ("sgd", "torchsgd")


def check_wavelet(
    config: Mapping[str, Any],
    wavelet: WaveletConfig,
    pipeline: PipelineConfig,
    zero: Mapping[str, Any],
) -> None:
    """Check a configuration for what its wave mode cannot go with.

    Args:
        config: DeepSpeed configuration.
        wavelet: The section ``wavemare.wavelet``.
        pipeline: The section ``wavemare.pipeline``.
        zero: The section ``zero_optimization``.

    Raises:
        ConfigError: Naming the key that cannot go with it.
    """
    mode = wavelet.mode
    if mode == "off":
        refuse_idle(wavelet, "wavemare.wavelet", "sync")
        return
    if pipeline.stages > 1:
        reason = f"the micro-batches of {pipeline.stages} pipeline stages are in turns already"
        raise ConfigError(_MODE, mode, reason, 'Use one stage, or mode "off"')
    for name in ("curriculum_learning", "progressive_layer_drop", "flops_profiler"):
        if is_enabled(config, name):
            reason = "it changes or watches whole forward passes, and waves run segments"
            raise ConfigError(
                f"{name}.enabled", True, reason, f'Leave it out, or set {_MODE} "off"'
            )
    if mode not in ("async", "replica"):
        if wavelet.warmup_steps:
            reason = f"it has no effect on the mode {mode!r}"
            key = "wavemare.wavelet.warmup_steps"
            raise ConfigError(
                key, wavelet.warmup_steps, reason, f'Remove it, or set {_MODE} "async"'
            )
        return
    stage = zero.get("stage", 0)
    if stage:
        reason = f"mode {mode!r} keeps two versions of all weights, and ZeRO parts them"
        raise ConfigError("zero_optimization.stage", stage, reason, 'Use 0, or mode "sync"')
    for name in ("fp16", "bf16", "amp", "torch_autocast"):
        if is_enabled(config, name):
            reason = f"mode {mode!r} updates the weights that it computes with, in fp32"
            raise ConfigError(f"{name}.enabled", True, reason, 'Leave it out, or use mode "sync"')
    if mode == "replica":
        _check_linear(config)


def _check_linear(config: Mapping[str, Any]) -> None:
    optimizer = config.get("optimizer")
    kind = optimizer.get("type") if isinstance(optimizer, Mapping) else None
    if kind is not None and str(kind).lower() not in _LINEAR:
        raise ConfigError(
            "optimizer.type",
            kind,
            "the replicas stay half a step apart only where a step is linear in the gradients, and "
            "would drift apart here",
            'Use "SGD", with or without momentum, or mode "async"',
        )
