# SPDX-License-Identifier: Apache-2.0
"""Options that exclude each other: a check raises a `ConfigError` with key and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavemare.comm.config import HALVES, LOOSE_MODES, SparseCollectiveConfig
from wavemare.engine.config.sections import BalanceConfig, CheckpointConfig, GuardConfig
from wavemare.engine.config.shape import (
    SECTION,
    ZERO_WEIGHTS,
    is_enabled,
    offloads,
    refuse_idle,
    section_of,
)
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.wave.config import WaveletConfig

__all__ = [
    "check_balance",
    "check_checkpoint",
    "check_guard",
    "check_shares",
    "check_sparse_collective",
    "check_wavelet",
]

_BALANCE = "wavemare.balance"
_GUARD = "wavemare.guard"
_LEAVE = 'set wavemare.sparse_collective.mode to "off"'
_MODE = "wavemare.wavelet.mode"
_LINEAR = ("sgd", "torchsgd")


def check_balance(balance: BalanceConfig, wavelet: WaveletConfig) -> None:
    """Check what unequal work goes with.

    Raises:
        ConfigError: Waves are on, with which it does not go.
    """
    if wavelet.mode != "off" and balance.is_active:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        raise ConfigError(
            "wavemare.wavelet.mode", wavelet.mode, reason, f'Set it "off", or leave out {_BALANCE}'
        )


def check_shares(balance: BalanceConfig, sizes: Mapping[str, int], data_ranks: int) -> None:
    """Check the numbers against the batch sizes.

    Args:
        balance: The section.
        sizes: The three batch sizes of DeepSpeed by their keys.
        data_ranks: Number of data-parallel ranks.

    Raises:
        ConfigError: They are not one for each rank, or do not sum to what the sizes say.
    """
    given, size_key = balance.shares, "train_micro_batch_size_per_gpu"
    if given is None or size_key not in sizes:
        return
    key, wanted = f"{_BALANCE}.shares", sizes[size_key] * data_ranks
    if len(given) != data_ranks:
        reason = f"there are {len(given)} numbers for {data_ranks} data-parallel ranks"
        raise ConfigError(key, given, reason, f"Give {data_ranks} numbers")
    if min(given) < 1:
        reason = "each rank takes part with one or more"
        raise ConfigError(key, given, reason, "Give positive numbers, or start fewer ranks")
    if sum(given) != wanted:
        reason = (
            f"they sum to {sum(given)}, and {size_key} x data-parallel ranks = "
            f"{sizes[size_key]} x {data_ranks} = {wanted}"
        )
        remedy = f"Give numbers that sum to {wanted}, or change {size_key}, which is their mean"
        raise ConfigError(key, given, reason, remedy)


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
            raise ConfigError(f"{_GUARD}.nonfinite", guard.nonfinite, reason, "Leave it out")
    if "max_skips" in guard.model_fields_set and guard.nonfinite != "skip":
        reason = f"it has no effect on nonfinite {guard.nonfinite!r}"
        remedy = f'Set {_GUARD}.nonfinite to "skip", or remove the key'
        raise ConfigError(f"{_GUARD}.max_skips", guard.max_skips, reason, remedy)


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
