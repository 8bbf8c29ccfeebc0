# SPDX-License-Identifier: Apache-2.0
"""Where DeepSpeed's optimizers keep gradients, fp32 master weights and partitions.

No other module reads these attributes of the optimizers. Tested with the version of DeepSpeed that
`wavemare.engine.seams` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import (
    combine_grad_norm_groups,
    get_global_norm_of_tensors,
)
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID, DeepSpeedZeroOptimizer
from torch import Tensor

from wavemare.engine.experts import expert_group
from wavemare.engine.optim.gradients import squared_norm
from wavemare.engine.optim.held import Held, Stepped
from wavemare.engine.optim.whole import OptimizerAdapter, overlap, sum_over
from wavemare.engine.seams import replaced
from wavemare.pipeline.optim.matrix_optimizer import Partition

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin


def adapt(engine: EngineMixin) -> OptimizerAdapter:
    """Return the adapter of an engine's optimizer.

    Args:
        engine: A DeepSpeed engine, complete.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        return ZeroAdapter(engine)
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        return _Zero3Adapter(engine)
    if isinstance(optimizer, BF16_Optimizer):
        return _Bf16Adapter(engine)
    return OptimizerAdapter(engine)


class _PartitionedMasters(OptimizerAdapter):
    """Optimizers of which each rank steps its partition of flat fp32 masters."""

    def trained(self) -> list[Any]:
        """Return none: a partition has the same parameters from the beginning to the end."""
        return []

    def masters(self) -> list[tuple[int, Tensor]]:
        """Return of each parameter its size and this rank's part of its fp32 master."""
        found = []
        for flat, partition in self.partitions():
            own = range(partition.begin, partition.begin + partition.size)
            for shape, offset in zip(partition.shapes, partition.offsets, strict=True):
                part, size = overlap(own, offset, math.prod(shape)), math.prod(shape)
                shift = offset - partition.begin
                found.append((size, flat.detach()[part.start + shift : part.stop + shift]))
        return found

    def held(self) -> list[Any]:
        """Return the model's parameters whose masters are `masters`, in their order."""
        return [tensor for group in self._groups for tensor in group]

    @property
    def _groups(self) -> Sequence[Sequence[Any]]:
        """The parameters of each flat master, in the order in which it holds them."""
        raise NotImplementedError

    def publish_masters(self) -> None:
        """Give the ranks of this replica the masters that their owners have changed."""
        self._optimizer.update_lp_params()

    def stepped(self) -> Iterator[Stepped]:
        """Yield each flat tensor that the basic optimizer steps."""
        optimizer = self._optimizer
        rows = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
        for number, (flat, partition) in enumerate(self.partitions()):
            parts, row = partition.parts(lambda shape: False), rows[number]
            held = [Held(row[n], part.start, part.first, part.count) for n, part in parts]
            yield Stepped(flat, number, row, held)

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take over the basic optimizer's states, by the ``id`` of each tensor of `stepped`."""
        super().load_states(states)
        self._optimizer._link_all_hp_params()
        self.publish_masters()


class ZeroAdapter(_PartitionedMasters):
    """DeepSpeed's optimizer of ZeRO 1 and 2: each rank keeps the gradients of its partition."""

    _can_detach_stage = partitions_gradients = True

    def gradients(self) -> list[Tensor]:
        """Return this rank's shares of the reduced gradients."""
        if self._optimizer.cpu_offload:
            return _present(p.grad for p in self._optimizer.single_partition_of_fp32_groups)
        return _present(self._optimizer.averaged_gradients.values())

    def gradients_by_parameter(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the parameters of this rank's partition with their gradients."""
        for group, gradients in self._optimizer.averaged_gradients.items():
            if gradients is not None:
                parameters = self._optimizer.params_in_partition[group]
                yield from zip(parameters, gradients, strict=False)

    def discard_gradients(self) -> None:
        """Drop the gradients that no optimizer step has taken."""
        super().discard_gradients()
        for gradients in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            gradients.update(dict.fromkeys(gradients))
        self._optimizer.micro_step_id = INITIAL_MICRO_STEP_ID

    def skip_overrides(self) -> dict[str, Any]:
        """Return the attributes that make the optimizer skip its next step, as on overflow."""
        return {"check_grad_overflow": True, "has_overflow": lambda *args, **kwargs: True}

    def partitions(self) -> Iterator[tuple[Tensor, Partition]]:
        """Yield each flat parameter that the basic optimizer steps, and which tensors it holds."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.real_dp_process_group):
            tensors = self._groups[index]
            offsets = optimizer.round_robin_bit16_offsets[index]
            flat = optimizer.single_partition_of_fp32_groups[index]
            yield flat, _partition(flat, tensors, offsets, group)

    @property
    def _groups(self) -> Sequence[Sequence[Any]]:
        # Sorted as in memory, also under round_robin_gradients.
        return self._optimizer.round_robin_bit16_groups

    def detach_stage(self, group: Any, rank: int) -> None:
        """Make the optimizer's steps reduce norms and overflow flags within one stage."""
        self._optimizer.model_parallel_group = group
        self._optimizer.model_parallel_rank = rank

    @property
    def measures_alone(self) -> bool:
        """Whether only DeepSpeed's optimizer can measure the norm of all gradients, in its step."""
        optimizer = self._optimizer
        others = type(optimizer) is not DeepSpeedZeroOptimizer  # ZenFlow's steps are other ones
        return others or optimizer.cpu_offload or not optimizer.compute_grad_norm

    def step_norm(self) -> Tensor:
        """Return the norm that the optimizer's step would compute."""
        return self._optimizer.scaled_global_norm()

    def norm_overrides(self, norm: Tensor) -> dict[str, Any]:
        """Return the attributes that make the optimizer's next step take this norm."""
        return {"scaled_global_norm": lambda *args, **kwargs: norm}

    def norm_squared(self, group: Any, rank: int) -> Tensor:
        """Return the squared norm of one stage's gradients."""
        return self._optimizer.scaled_global_norm().double().square()

    # --- where reduced gradients go ---------------------------------------------------------------

    def grouped_parameters(self) -> Iterator[tuple[int, Any]]:
        """Yield the trainable parameters with the numbers of their groups."""
        for number, group in enumerate(self._optimizer.bit16_groups):
            yield from ((number, p) for p in group if p.requires_grad and p.numel())

    def parameter(self, entry: tuple[int, int, int]) -> Any:
        """Return the parameter of an entry in the ``params`` of DeepSpeed's bucket."""
        group, number, _ = entry
        return self._optimizer.bit16_groups[group][number]

    def owned_ranges(self, group: int, parameter: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield the owners of a parameter's elements: rank, first element, and end.

        Args:
            group: Number of the parameter's group.
            parameter: One of the group.
        """
        optimizer = self._optimizer
        number = optimizer.get_param_id(parameter)
        starts = sorted(
            (int(optimizer.grad_start_offset[group][owner][number]), owner)
            for owner in optimizer.param_to_partition_ids[group][number]
        )
        for (start, owner), (stop, _) in pairwise([*starts, (parameter.numel(), -1)]):
            yield owner, start, stop

    def store_reduced(
        self, group: int, parameter: Any, owned: tuple[int, int, int], reduced: Tensor, here: bool
    ) -> None:
        """Put a reduced range of a gradient where the optimizer's step reads it.

        Args:
            group: Number of the parameter's group.
            parameter: Whose gradient it is.
            owned: One of `owned_ranges`, of this rank.
            reduced: (stop - start,).
            here: Whether this rank computed a gradient of the parameter.
        """
        optimizer, (owner, start, stop) = self._optimizer, owned
        number = optimizer.get_param_id(parameter)
        held = optimizer._get_compact_grad_partition_slice(group, owner, number, stop - start)
        if held is not None:
            held.add_(reduced.to(held.dtype))
            return
        gradient = optimizer.get_gradient_for_reduction(parameter)
        if gradient is None and not here and not reduced.any():
            return
        if gradient is None:  # another rank computed one
            gradient = self._new_gradient(parameter)
        gradient.view(-1)[start:stop].copy_(reduced)

    def _new_gradient(self, parameter: Any) -> Tensor:
        if self._optimizer.use_grad_accum_attribute:
            dtype = self._optimizer.gradient_accumulation_dtype
            parameter.grad_accum = torch.zeros_like(parameter, dtype=dtype)
            return parameter.grad_accum
        parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


class _Zero3Adapter(OptimizerAdapter):
    """DeepSpeed's optimizer of ZeRO 3."""

    def stepped(self) -> Iterator[Stepped]:
        """Yield each flat tensor that the basic optimizer steps."""
        rank = dist.get_rank(group=self._optimizer.dp_process_group)
        groups = self._optimizer.sub_group_to_group_id
        flats = self._optimizer.fp32_partitioned_groups_flat
        for index, (flat, weights) in enumerate(
            zip(flats, self._optimizer.fp16_groups, strict=True)
        ):
            held, start = [], 0
            for weight in weights:
                size = int(weight.ds_tensor.ds_numel)
                first = min(rank * size, int(weight.ds_numel))
                count = min(size, int(weight.ds_numel) - first)
                held.append(Held(weight, start, first, count))
                start += size
            yield Stepped(flat, groups[index], weights, held)

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take over the basic optimizer's states, by the ``id`` of each tensor of `stepped`."""
        optimizer = self._optimizer
        own = optimizer.state_dict()
        flats = enumerate(optimizer.fp32_partitioned_groups_flat)
        found = {number: states[id(p)] for number, p in flats if states.get(id(p))}
        own["optimizer_state_dict"]["state"] = found
        ranks = dist.get_world_size(group=optimizer.dp_process_group)
        optimizer.load_state_dict([own] * ranks)

    def gradients(self) -> list[Tensor]:
        """Return this rank's shares of the reduced gradients."""
        if self._optimizer.offload_optimizer:
            return _present(p.grad for p in self._optimizer.fp32_partitioned_groups_flat)
        return _present(self._optimizer.averaged_gradients.values())

    def skip_overrides(self) -> dict[str, Any]:
        """Return the attributes that make the optimizer skip its next step, as on overflow."""
        return {"_get_norm_groups": lambda: [torch.tensor(-1.0)]}

    @property
    def measures_alone(self) -> bool:
        """Whether only DeepSpeed's optimizer can measure the norm of all gradients, in its step."""
        optimizer = self._optimizer
        others = type(optimizer) is not DeepSpeedZeroOptimizer_Stage3
        return others or optimizer.offload_optimizer or optimizer.use_muon

    def step_norm(self) -> Tensor:
        """Return the norm that the optimizer's step would compute."""
        return combine_grad_norm_groups(self._optimizer._get_norm_groups())

    def norm_overrides(self, norm: Tensor) -> dict[str, Any]:
        """Return the attributes that make the optimizer's next step take this norm."""
        return {"_get_norm_groups": lambda: [norm]}


class _Bf16Adapter(_PartitionedMasters):
    """DeepSpeed's ``BF16_Optimizer`` of pipelines: backward passes add to fp32 gradients."""

    accumulates_in_fp32 = True
    _can_detach_stage = True

    def accumulated_gradients(self) -> list[Tensor]:
        """Return the fp32 gradients, one flat tensor for each group."""
        return list(self._optimizer.fp32_groups_gradients_flat)

    def gradients_by_parameter(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the model's parameters with their fp32 gradients."""
        held: dict[int, Tensor] = {}
        groups = self._optimizer.bf16_groups, self._optimizer.fp32_groups_gradients
        for parameters, gradients in zip(*groups, strict=True):
            held.update(zip(map(id, parameters), gradients, strict=True))
        for parameter in self._parameters():
            yield parameter, held.get(id(parameter))

    def partitions(self) -> Iterator[tuple[Tensor, Partition]]:
        """Yield each flat parameter that the basic optimizer steps, and which tensors it holds."""
        optimizer = self._optimizer
        for index, group in enumerate(optimizer.real_dp_process_group):
            tensors = self._groups[index]
            flat = optimizer.fp32_groups_flat_partition[index]
            offsets = [0, *accumulate(tensor.numel() for tensor in tensors)][:-1]
            yield flat, _partition(flat, tensors, offsets, group)

    @property
    def _groups(self) -> Sequence[Sequence[Any]]:
        return self._optimizer.bf16_groups

    def detach_stage(self, group: Any, rank: int) -> None:
        """Make the optimizer's steps reduce norms and overflow flags within one stage."""
        self._optimizer.mpu = None

    @property
    def measures_alone(self) -> bool:
        """Whether only DeepSpeed's optimizer can measure the norm of all gradients, in its step."""
        engine = self._engine
        ours = engine.pipeline_parallelism and engine.settings.expert_parallel.size > 1
        return self._optimizer.has_moe_layers and not ours

    def step_norm(self) -> Tensor:
        """Return the norm that the optimizer's step would compute."""
        return self._counted_norm(self._optimizer.mpu)

    def norm_overrides(self, norm: Tensor) -> dict[str, Any]:
        """Return the attributes that make the optimizer's next step take this norm."""
        all_of_rank = self._optimizer.get_grads_for_norm

        def grads_for_norm(for_clipping: bool = False) -> Any:
            return all_of_rank(for_clipping=True) if for_clipping else ([norm], {})

        return {"get_grads_for_norm": grads_for_norm, "mpu": None}  # else ranks would add it up

    def norm_squared(self, group: Any, rank: int) -> Tensor:
        """Return the squared norm of one stage's gradients."""
        # The mpu says which weights this rank counts. In a step, DeepSpeed would reduce over it.
        with replaced(self._optimizer, {"mpu": self._engine.grid}):
            norm = self._counted_norm(None)
        return sum_over(group, norm.double().square()) + self._experts_squared()

    def clipped_norm(self, own: float, group: Any) -> float:
        """Return the norm that the optimizer's step compares with its ``clip_grad``."""
        if group is None:
            return own
        counted = self._counted_norm(None).double().square()
        return math.sqrt(float(counted + self._experts_squared()))

    def _experts_squared(self) -> Tensor:
        """Return the squares of divided experts' gradients, over the ranks that share them."""
        _, experts = self._optimizer.get_grads_for_norm()
        own = squared_norm((g for each in experts.values() for g in each), self._engine.device)
        return sum_over(expert_group(self._parameters()), own)

    def _counted_norm(self, mpu: Any) -> Tensor:
        gradients, _ = self._optimizer.get_grads_for_norm()
        none = [torch.zeros(1, device=self._engine.device)]  # a stage may have none
        norm = get_global_norm_of_tensors(gradients or none, mpu=mpu)
        return torch.where(norm < 0, math.inf, norm)  # DeepSpeed returns -1 if it is not finite


def _present(parts: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor | None] = []
    for part in parts:
        found += [part] if isinstance(part, Tensor) else (part or [])
    return [gradient for gradient in found if gradient is not None]


def _partition(flat: Tensor, tensors: Any, offsets: Iterable[int], group: Any) -> Partition:
    size = flat.numel()
    return Partition(
        shapes=tuple(tuple(tensor.shape) for tensor in tensors),
        offsets=tuple(int(offset) for offset in offsets),
        begin=int(dist.get_rank(group=group)) * size,
        size=size,
        group=group,
    )
