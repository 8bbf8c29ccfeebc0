# SPDX-License-Identifier: Apache-2.0
"""Chooses how the sparse collective reduces an engine's gradients; and how under ZeRO 1 and 2.

There methods of DeepSpeed's optimizer are replaced: they hand over gathered gradients instead of
reducing them. The sums are stored where the optimizer's step reads its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.comm.gradient_rows import Slot
from wavemare.comm.masks import OwnedRange
from wavemare.engine.experts import is_divided
from wavemare.engine.observe.choices import tell_choice
from wavemare.engine.optim.adapter import ZeroAdapter
from wavemare.engine.sparse.buckets import Bucket, BucketReducer, embedding_weights
from wavemare.engine.sparse.gradients import ReplicatedGradients, SparseGradients
from wavemare.engine.sparse.weights import ChangedWeights, choose_weights
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


def attach_sparse_gradients(
    engine: EngineMixin, config: SparseCollectiveConfig, timeout_s: float
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


def _check_model(engine: EngineMixin, config: SparseCollectiveConfig) -> None:
    reason = None
    if engine.has_moe_layers and not any(map(is_divided, engine.module.parameters())):
        reason = "the model has experts, whose gradients belong to groups of their own"
    elif engine.sequence_parallel_size > 1:
        reason = "the ranks share samples (sequence parallelism), and average differently"
    if reason is not None:
        key = "wavemare.sparse_collective.mode"
        raise ConfigError(key, config.mode, reason, f'Set {key} to "off"')


def _check_tables(engine: EngineMixin) -> None:
    """Refuse sparse gradients for optimizers that flatten gradients."""
    tables = embedding_weights(engine.module.modules(), sparse=True)
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


class PartitionedGradients(SparseGradients):
    """Reduces the gradients of DeepSpeed's optimizer of ZeRO 1 and 2.

    Each range is summed on its owner; with ``reduce_scatter`` false on all ranks.

    Args:
        engine: See `SparseGradients`.
        config: See `SparseGradients`.
        timeout_s: See `SparseGradients`.
    """

    def __init__(
        self, engine: EngineMixin, config: SparseCollectiveConfig, timeout_s: float
    ) -> None:
        super().__init__(engine, config, timeout_s)
        optimizer = self._optimizer = engine.optimizer
        self._adapter = ZeroAdapter(engine)
        names = {id(p): name for name, p in engine.module.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self._group_of: dict[str, int] = {}
        for group, parameter in self._adapter.grouped_parameters():
            name = names[id(parameter)]
            self._parameters[name] = parameter
            self._group_of[name] = group
        self._names = {id(p): name for name, p in self._parameters.items()}
        registered = {n: self._parameters[n] for n in names.values() if n in self._parameters}
        buckets = self._buckets(registered, optimizer.get_param_comm_dtype, config)
        splits = optimizer.reduce_scatter and not any(
            getattr(p, "use_muon", False) for p in registered.values()
        )
        self.reducer = BucketReducer(
            self.comm,
            buckets,
            device=engine.device,
            write=self._write,
            ranges={b.key: self._ranges(b) for b in buckets} if splits else None,
            rows=self._gradient_rows(registered),
            keep=False,
            expert_comm=self.expert_comm,
        )
        # DeepSpeed gathers this much before it hands gradients over: smaller buckets start earlier.
        itemsize = max((bucket.dtype.itemsize for bucket in buckets), default=4)
        optimizer.reduce_bucket_size = min(
            optimizer.reduce_bucket_size, max(self._bucket_bytes // itemsize, 1)
        )
        self._changed_weights = self._gather_changed(config)
        self._stock_reduce = optimizer.reduce_ipg_grads
        optimizer.reduce_ipg_grads = self._reduce_ipg_grads
        optimizer.average_tensor = self._average_tensor
        optimizer.buffered_reduce_fallback = self._buffered_reduce_fallback
        optimizer._buffered_reduce_fallback_preserving_fp32 = self._buffered_reduce_preserving_fp32

    def _gather_changed(self, config: SparseCollectiveConfig) -> ChangedWeights | None:
        """Have steps gather the weights that have changed, where it is wanted."""
        optimizer = self._optimizer
        chosen: str = config.updated_weights
        if chosen == "auto":
            tables = embedding_weights(self._engine.module.modules())
            sizes = [(p.numel(), id(p) in tables) for p in self._parameters.values()]
            chosen, reason = choose_weights(
                optimizer.optimizer,
                sum(size for size, table in sizes if table),
                sum(size for size, _ in sizes),
            )
            if "updated_weights" in config.model_fields_set:
                tell_choice("wavemare.sparse_collective.updated_weights", chosen, reason)
        if chosen == "all" or optimizer.cpu_offload:
            return None
        comms = [
            self.expert_comm if self.expert_comm and is_divided(group[0]) else self.comm
            for group in optimizer.bit16_groups
        ]
        return ChangedWeights(optimizer, comms)

    def reset(self) -> None:
        """Drop what belongs to the weights before a load."""
        super().reset()
        if self._changed_weights is not None:
            self._changed_weights.forget()

    def reduce(self) -> None:
        """Reduce the buckets that the backward pass did not send, and wait for all.

        Raises:
            CommError: A peer was lost, or makes another call.
        """
        with self._stream():
            self._put_earlier()
            came = self.reducer.came
            self.reducer.end()
        self.record_metrics()
        self._arrange(came)

    def _put_earlier(self) -> None:
        """Put the gradients of ZeRO 1 to which only earlier micro-batches of the step have added.

        With ``overlap_comm`` DeepSpeed hands over those of the last backward pass alone.
        """
        if self._engine.zero_optimization_partition_gradients():
            return
        for name, parameter in self._parameters.items():
            gradient = self._optimizer.get_gradient_for_reduction(parameter)
            if gradient is not None and not self.reducer.has(name):
                self.reducer.put(name, gradient)

    # --- in place of the optimizer's methods --------------------------------------------------

    def _average_tensor(self, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        bucket = self._optimizer.ipg_buckets[communication_data_type]
        sizes = [self._adapter.parameter(entry).numel() for entry in bucket.params]
        self._put(bucket, tensor.split(sizes))

    def _buffered_reduce_fallback(
        self,
        rank: int | None,
        grads: Sequence[Tensor],
        communication_data_type: torch.dtype,
        **_: Any,
    ) -> None:
        self._put(self._optimizer.ipg_buckets[communication_data_type], grads)

    def _buffered_reduce_preserving_fp32(
        self,
        grads: Sequence[Tensor],
        grad_params: object,
        communication_data_type: torch.dtype,
        **_: Any,
    ) -> None:
        self._buffered_reduce_fallback(None, grads, communication_data_type)

    def _reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        self._stock_reduce(comm_dtype=comm_dtype)
        # Without a type it is the end of a backward pass; a pipeline calls it a second time.
        if comm_dtype is None and self.reducer.begun:
            self.reduce()

    # --- in and out -------------------------------------------------------------------------------

    def _put(self, bucket: Any, gradients: Sequence[Tensor]) -> None:
        with self._stream(bucket):
            for entry, gradient in zip(bucket.params, gradients, strict=True):
                self.reducer.put(self._names[id(self._adapter.parameter(entry))], gradient)
            self.reducer.send_complete()
            self.reducer.take_reduced()

    def _write(self, name: str, reduced: Tensor, here: bool) -> None:
        group, parameter = self._group_of[name], self._parameters[name]
        comm = self.expert_comm if is_divided(parameter) else self.comm
        for owned in self._adapter.owned_ranges(group, parameter):
            owner, start, stop = owned
            if owner == (comm or self.comm).rank:
                self._adapter.store_reduced(group, parameter, owned, reduced[start:stop], here)

    def _ranges(self, bucket: Bucket) -> list[OwnedRange]:
        return [owned for slot in bucket.slots for owned in self._ranges_of(slot)]

    def _ranges_of(self, slot: Slot) -> Iterator[OwnedRange]:
        group, parameter = self._group_of[slot.name], self._parameters[slot.name]
        for owner, start, stop in self._adapter.owned_ranges(group, parameter):
            yield OwnedRange(slot.start + start, slot.start + stop, owner)

    @contextmanager
    def _stream(self, bucket: Any = None) -> Iterator[None]:
        """Run the body on the optimizer's reduction stream, if it has one."""
        if not self._optimizer.overlap_comm:
            yield
            return
        accelerator = get_accelerator()
        stream = self._optimizer.reduction_stream
        if not accelerator.resolves_data_dependency():
            current = accelerator.current_stream()
            for producer in getattr(bucket, "copy_streams", None) or {current}:
                stream.wait_stream(producer)
            current.wait_stream(stream)
        with accelerator.stream(stream):
            yield
