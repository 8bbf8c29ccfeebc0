# SPDX-License-Identifier: Apache-2.0
"""Chooses how the sparse collective reduces an engine's gradients."""

from __future__ import annotations

from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.engine.context import EngineContext
from wavemare.engine.experts import is_divided
from wavemare.engine.sparse.buckets import row_tables
from wavemare.engine.sparse.gradients import ReplicatedGradients, SparseGradients
from wavemare.engine.sparse.zero import PartitionedGradients
from wavemare.errors import ConfigError


def attach_sparse_gradients(
    engine: EngineContext, config: SparseCollectiveConfig, timeout_s: float
) -> SparseGradients:
    """Reduce an engine's gradients by the sparse collective; collective over all ranks.

    Args:
        engine: A DeepSpeed engine, complete.
        config: How gradients are summed; a mode other than ``off``.
        timeout_s: Seconds after which a silent rank counts as lost.

    Raises:
        ConfigError: The model is not supported.
        CommError: The transport or a rank is missing.
    """
    _check_model(engine, config)
    _check_tables(engine)
    if isinstance(engine.optimizer, DeepSpeedZeroOptimizer):
        return PartitionedGradients(engine, config, timeout_s)
    # Without ZeRO DeepSpeed does not read overlap_comm.
    zero = engine.config.get("zero_optimization")
    early = not isinstance(zero, dict) or zero.get("overlap_comm") is not False
    return ReplicatedGradients(engine, config, timeout_s, early=early)


def _check_model(engine: EngineContext, config: SparseCollectiveConfig) -> None:
    reason = None
    if engine.has_moe_layers and not any(map(is_divided, engine.module.parameters())):
        reason = "the model has experts, whose gradients belong to groups of their own"
    elif engine.sequence_parallel_size > 1:
        reason = "the ranks share samples (sequence parallelism), and average differently"
    if reason is not None:
        key = "wavemare.sparse_collective.mode"
        raise ConfigError(key, config.mode, reason, f'Set {key} to "off"')


def _check_tables(engine: EngineContext) -> None:
    """Refuse sparse gradients for optimizers that flatten gradients."""
    tables = row_tables(engine.module.modules())
    named = [
        name
        for name, parameter in engine.module.named_parameters()
        if id(parameter) in tables and parameter.requires_grad
    ]
    flattening = {
        "zero_optimization.stage": engine.zero_optimization_stage(),
        "fp16.enabled": engine.fp16_enabled(),
        "bf16.enabled": engine.bfloat16_enabled(),
    }
    for key, value in flattening.items():
        if named and value:
            raise ConfigError(
                key,
                value,
                f"the gradient of {named[0]} is sparse (its embedding says sparse=True), and this "
                "optimizer flattens gradients",
                "Build the embedding with sparse=False: blocks of zeros are not sent anyway",
            )
