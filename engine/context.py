# SPDX-License-Identifier: Apache-2.0
"""The two contracts inside an engine: what its features may read, and what it asks of them.

Engines subclass DeepSpeed's and keep a list of `Feature` objects: the guard, the sparse collective,
weights of losses. They call each method of all features at fixed points of a step, in order.
Features and other parts see the engine as an `EngineContext` or a `StageContext`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wavemare.engine.config.resolve import WavemareConfig


class Feature:
    """What an engine does beside DeepSpeed's work. A subclass overrides the methods it needs.

    Attributes:
        key: Name of its state in checkpoints; empty if it has none.
    """

    key = ""

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """See what the whole model gets in a forward pass of training."""

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins with; scalar."""
        return loss

    def before_step(self) -> bool:
        """Return whether the optimizer may step; all ranks get the same answer."""
        return True

    def after_step(self) -> None:
        """See the weights that an optimizer step has left; ``global_steps`` counts it."""

    def synchronize(self) -> None:
        """Bring the weights of all ranks to the same bits; all ranks call it."""

    def metrics(self) -> Mapping[str, float]:
        """Return what was measured of the last optimizer step, by name."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """Return what the next step needs beside weights, optimizer and random state."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state of `extra_state`; None if the checkpoint has none for this rank."""

    def reset(self) -> None:
        """Discard what belongs to the weights before a load."""

    def close(self) -> None:
        """Release resources."""


class EngineContext(Protocol):
    """The attributes and methods of a complete DeepSpeed engine that its parts use.

    Attributes:
        settings: The section ``wavemare``.
        config: The whole configuration.
        optimizer: A torch optimizer, or DeepSpeed's wrapper of one; None if nothing is trained.
        basic_optimizer: The torch optimizer itself.
        data_parallel_group: Process group of the ranks that train the same weights: with
            ``local_steps`` those of one replica.
        mpu: The process grid that DeepSpeed was given; None without one.
        expert_data_parallel_group: Those of the ranks that hold the same experts, by name.
        layout: The layout of the model; None if the configuration alone determines it.
        grid: With ``pipeline_parallelism``: process groups, and stages by rank.
        stage_id: With ``pipeline_parallelism``: from 0.
    """

    settings: WavemareConfig
    config: Mapping[str, Any]
    module: Any
    optimizer: Any
    basic_optimizer: Any
    device: torch.device
    data_parallel_group: Any
    mpu: Any
    expert_data_parallel_group: Mapping[str, Any]
    dp_world_size: int
    mp_world_size: int
    global_rank: int
    global_steps: int
    micro_steps: int
    pipeline_parallelism: bool
    grid: Any
    stage_id: int
    layout: Any

    # Of DeepSpeed's engine: configuration.
    local_rank: int
    sequence_parallel_size: int
    has_moe_layers: bool
    gradient_average: bool
    communication_data_type: torch.dtype
    torch_autocast_z0_gradscaler: Any
    train_micro_batch_size_per_gpu: Callable[[], int]
    gradient_accumulation_steps: Callable[[], int]
    bfloat16_enabled: Callable[[], bool]
    fp16_enabled: Callable[[], bool]
    zero_offload_optimizer: Callable[[], Any]
    zero_optimization_partition_gradients: Callable[[], bool]
    zero_optimization_partition_weights: Callable[[], bool]
    zero_optimization_stage: Callable[[], int]
    zero_use_cpu_optimizer: Callable[[], bool]
    use_node_local_storage: Callable[[], bool]

    # Of DeepSpeed's engine: a step.
    lr_scheduler: Any
    timers: Any
    inside_no_sync_ctxt: bool
    is_gradient_accumulation_boundary: Callable[[], bool]
    was_step_applied: Callable[[], bool]
    zero_grad: Callable[[], None]
    _backward_epilogue: Callable[[], None]
    _backward_prologue: Callable[[], None]
    _running_engine_backward: bool
    _running_engine_backward_count: int
    _running_engine_backward_lock: Any
    _running_engine_step: bool
    _unmanaged_backward_count: int

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins with."""

    def end_micro_batch(self, *, last: bool) -> None:
        """Step, unless each step is a whole one and this micro-batch is not the last."""


class StageContext(EngineContext, Protocol):
    """A pipeline engine: one stage of a model.

    Attributes:
        active_stage: The one whose action runs.
        micro_batches: Of an optimizer step.
    """

    active_stage: int
    num_stages: int
    micro_batches: int
    is_last_stage: Callable[[], bool]

    def whole_passes(self, stage: int) -> AbstractContextManager[None]:
        """Return the context of passes that are not the plan's."""
