# SPDX-License-Identifier: Apache-2.0
"""What ZeRO's flat partitions are made of, for optimizers that step matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from wavemare.engine.config.shape import ZERO_WEIGHTS
from wavemare.errors import ConfigError
from wavemare.pipeline.optim.matrix_optimizer import MatrixOptimizer, Partition

__all__ = ["check_matrix_optimizer", "describe_partitions", "is_added"]


def is_added(optimizer: Any) -> bool:
    """Return whether we add an optimizer to those that DeepSpeed knows.

    They are right under ZeRO 1 and 2, and have states that universal checkpoints do not keep.
    """
    return isinstance(optimizer, (MatrixOptimizer, torch.optim.NAdam))


def check_matrix_optimizer(engine: Any, optimizer: Any) -> None:
    """Refuse what an optimizer of matrices cannot go with, before DeepSpeed wraps it.

    Raises:
        ConfigError: ZeRO cuts weights, keeps states elsewhere, or the type is
            fp16.
    """
    if not isinstance(optimizer, MatrixOptimizer):
        return
    name = type(optimizer).__name__

    def refuse(key: str, value: Any, reason: str, remedy: str) -> ConfigError:
        return ConfigError(key, value, f"{name} {reason}", remedy)

    stage = engine.zero_optimization_stage()
    if stage == ZERO_WEIGHTS:
        reason = "steps whole matrices, which ZeRO 3 leaves on no rank"
        raise refuse("zero_optimization.stage", stage, reason, "Use 0, 1 or 2, or AdamW")
    if engine.zero_use_cpu_optimizer():
        device = engine.zero_offload_optimizer().device
        reason = "steps on the device of the weights, and offloading needs DeepSpeed's CPUAdam"
        remedy = "Leave out offload_optimizer, or use AdamW"
        raise refuse("zero_optimization.offload_optimizer.device", device, reason, remedy)
    if engine.fp16_enabled():
        reason = "is made for fp32 and bf16, whose gradients need no loss scale"
        raise refuse("fp16.enabled", True, reason, 'Use "bf16": {"enabled": true}, or AdamW')


def describe_partitions(engine: Any) -> None:
    """Tell an optimizer of matrices what lies in the partitions that DeepSpeed gave it."""
    basic = getattr(engine, "basic_optimizer", None)  # an engine that only evaluates has none
    if isinstance(basic, MatrixOptimizer):
        for flat, partition in _partitions(engine.optimizer):
            basic.set_partition(flat, partition)


def _partitions(optimizer: Any) -> Iterator[tuple[Tensor, Partition]]:
    groups = getattr(optimizer, "real_dp_process_group", ())
    for index, group in enumerate(groups):
        if isinstance(optimizer, BF16_Optimizer):
            flat, tensors = (
                optimizer.fp32_groups_flat_partition[index],
                optimizer.bf16_groups[index],
            )
            offsets = [0, *accumulate(t.numel() for t in tensors)][:-1]
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            flat = optimizer.single_partition_of_fp32_groups[index]
            # In the order in which they lie, which round_robin_gradients changes.
            tensors = optimizer.round_robin_bit16_groups[index]
            offsets = optimizer.round_robin_bit16_offsets[index]
        else:
            return
        yield flat, _partition(flat, tensors, offsets, group)


def _partition(
    flat: Tensor, tensors: Sequence[Tensor], offsets: Sequence[int], group: Any
) -> Partition:
    size = flat.numel()
    return Partition(
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        offsets=tuple(int(offset) for offset in offsets),
        begin=int(dist.get_rank(group=group)) * size,
        size=size,
        group=group,
    )
