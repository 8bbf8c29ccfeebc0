# SPDX-License-Identifier: Apache-2.0
"""Where an optimizer that steps the model's own parameters keeps gradients and masters.

It is what the adapters of DeepSpeed's other optimizers extend, see `wavemare.engine.optim.adapter`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import Tensor

from wavemare.engine.experts import expert_group, is_divided, same_experts
from wavemare.engine.optim.gradients import gradient_values, is_tied_copy, squared_norm
from wavemare.engine.optim.held import Held, Stepped
from wavemare.pipeline.optim.matrix_optimizer import Partition

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

_GROUPS = "bit16_groups", "bf16_groups", "fp16_groups"
"""Where DeepSpeed's wrappers keep the model's parameters, in the order of their flat masters."""


class OptimizerAdapter:
    """Optimizers that read the gradients of the model's own parameters: ZeRO 0 and fp16.

    Args:
        engine: A DeepSpeed engine, complete.

    Attributes:
        steps_one_stage: Whether one stage of a pipeline can step without the others.
        accumulates_in_fp32: Whether backward passes add to fp32 gradients of the optimizer.
        partitions_gradients: Whether a rank keeps the gradients of a partition alone.
    """

    accumulates_in_fp32 = partitions_gradients = False
    _can_detach_stage = False

    def __init__(self, engine: EngineMixin) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        basic = getattr(engine, "basic_optimizer", None)
        self.steps_one_stage = self._can_detach_stage or self._optimizer is basic
        self._held = self.trained()

    def accumulated_gradients(self) -> list[Tensor]:
        """Return the gradients that backward passes add to, not yet reduced.

        Sparse gradients are coalesced in place; their values are returned.
        """
        return gradient_values(self._parameters())

    def gradients(self) -> list[Tensor]:
        """Return the reduced gradients, or this rank's shares of them."""
        return self.accumulated_gradients()

    def gradients_by_parameter(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the model's parameters with the gradients that this rank holds."""
        for parameter in self._parameters():
            yield parameter, parameter.grad

    def discard_gradients(self) -> None:
        """Drop the gradients that no optimizer step has taken."""
        self._engine.zero_grad()
        if hasattr(self._optimizer, "zero_grad"):  # DeepSpeed's DummyOptim has none
            self._optimizer.zero_grad()

    def skip_overrides(self) -> dict[str, Any]:
        """Return the attributes that make the optimizer skip its next step, as on overflow."""
        return {"step": lambda *args, **kwargs: None, "overflow": True}

    def partitions(self) -> Iterator[tuple[Tensor, Partition]]:
        """Yield each flat parameter that the basic optimizer steps, and which tensors it holds."""
        yield from ()

    def trained(self) -> list[Any]:
        """Return the parameters that are trained now; none if the optimizer's are fixed."""
        return list(self._parameters())

    @property
    def trains_others(self) -> bool:
        """Whether others are trained now than those of `masters`."""
        return [id(p) for p in self.trained()] != [id(p) for p in self._held]

    def hold_trained(self) -> None:
        """Have `masters` be those of the parameters that are trained now."""
        self._held = self.trained()

    def held(self) -> list[Any]:
        """Return the model's parameters whose masters are `masters`, in their order."""
        return self._held

    def masters(self) -> list[tuple[int, Tensor]]:
        """Return of each held parameter its size and this rank's part of its fp32 master.

        Held are those that were trained when this was made, or at the last `hold_trained`. Ranks of
        a replica that hold the same weights have different parts of their masters, flat and perhaps
        empty. Ranks at one place of several replicas have the same ones.
        """
        weights = [parameter.detach().view(-1) for parameter in self._held]
        parts = [weight[:0] for weight in weights]
        for group, places in self._owners():
            start, own = 0, self._share(sum(weights[place].numel() for place in places), group)
            for place in places:
                size = weights[place].numel()
                parts[place] = weights[place][overlap(own, start, size)]
                start += size
        return [(weight.numel(), part) for weight, part in zip(weights, parts, strict=True)]

    def publish_masters(self) -> None:
        """Give the ranks of this replica the masters that their owners have changed."""
        masters = self.masters()
        for group, places in self._owners():
            ranks, sizes = dist.get_world_size(group), [masters[place][0] for place in places]
            if ranks == 1 or not places:
                continue
            size = -(-sum(sizes) // ranks)
            own = torch.cat([masters[place][1] for place in places])
            whole = own.new_empty(size * ranks)
            padded = torch.nn.functional.pad(own, (0, size - own.numel()))
            dist.all_gather_into_tensor(whole, padded, group=group)
            for place, part in zip(places, whole[: sum(sizes)].split(sizes), strict=True):
                self._held[place].detach().view(-1).copy_(part)

    def _owners(self) -> Iterator[tuple[Any, list[int]]]:
        """Yield groups of ranks of a replica with the places of the held weights that they share.

        Experts that ranks have divided are the same on fewer ranks than other weights.
        """
        by_kind: dict[bool, list[int]] = {False: [], True: []}
        for place, weight in enumerate(self._held):
            by_kind[is_divided(weight)].append(place)
        divided = by_kind[True]
        yield self._engine.data_parallel_group, by_kind[False]
        if divided:
            yield same_experts(self._held[divided[0]]), divided

    def _share(self, total: int, group: Any) -> range:
        """Return the elements that this rank owns where each rank of a group has all."""
        size = -(-total // dist.get_world_size(group))
        rank = dist.get_rank(group)
        return range(min(rank * size, total), min((rank + 1) * size, total))

    def detach_stage(self, group: Any, rank: int) -> None:
        """Make the optimizer's steps reduce norms and overflow flags within one stage.

        Args:
            group: The ranks that share the stage's layers; None for this rank alone.
            rank: This rank's number in the group.
        """

    @property
    def measures_alone(self) -> bool:
        """Whether only DeepSpeed's optimizer can measure the norm of all gradients, in its step."""
        return self._optimizer is not self._engine.basic_optimizer

    def step_norm(self) -> Tensor:
        """Return the norm that the optimizer's step would compute: (), fp32, inf if not finite.

        All ranks must call it. Optimizers without a wrapper have none.
        """
        raise NotImplementedError

    def norm_overrides(self, norm: Tensor) -> dict[str, Any]:
        """Return the attributes that make the optimizer's next step take this norm, () fp32."""
        return {}

    def norm_squared(self, group: Any, rank: int) -> Tensor:
        """Return the squared norm of one stage's gradients; not finite if any of them is not.

        Args:
            group: As for `detach_stage`.
            rank: As for `detach_stage`.

        Returns:
            (), fp64.
        """
        own: dict[bool, list[Any]] = {False: [], True: []}  # by whether it is of divided experts
        for parameter in self._parameters():
            counts = rank == 0 or is_model_parallel_parameter(parameter)
            if counts and not is_tied_copy(parameter):
                own[is_divided(parameter)].append(parameter)
        device = self._engine.device
        share = squared_norm(gradient_values(own[True]), device)
        total = sum_over(group, squared_norm(gradient_values(own[False]), device))
        return total + sum_over(expert_group(self._parameters()), share)

    def clipped_norm(self, own: float, group: Any) -> float:
        """Return the norm that the optimizer's step compares with its ``clip_grad``.

        Args:
            own: Norm of the stage's gradients.
            group: As for `detach_stage`.
        """
        return own

    def held_names(self) -> list[list[str]]:
        """Return the names of the weights that the optimizer holds, by group and in its order."""
        groups = next((g for name in _GROUPS if (g := getattr(self._optimizer, name, None))), None)
        if groups is None:
            basic = getattr(self._engine, "basic_optimizer", None)
            groups = [group["params"] for group in getattr(basic, "param_groups", ())]
        names = {id(p): name for name, p in self._engine.module.named_parameters()}
        return [[names.get(id(p), "a weight outside the model") for p in group] for group in groups]

    def stepped(self) -> Iterator[Stepped]:
        """Yield each tensor that the basic optimizer steps; frozen weights are in none."""
        held = next((g for name in _GROUPS if (g := getattr(self._optimizer, name, None))), None)
        flats = getattr(self._optimizer, "fp32_groups_flat", None)
        basic = [group["params"] for group in self._engine.basic_optimizer.param_groups]
        for number, weights in enumerate(held or basic):
            if flats is None:
                for master, weight in zip(basic[number], weights, strict=True):
                    if weight.requires_grad:
                        own = Held(weight, 0, 0, weight.numel())
                        yield Stepped(master, number, [weight], [own])
                continue
            starts = [0, *accumulate(weight.numel() for weight in weights)]
            places = zip(weights, starts, strict=False)
            parts = [Held(weight, start, 0, weight.numel()) for weight, start in places]
            yield Stepped(flats[number], number, weights, parts)

    def load_states(self, states: Mapping[int, dict[str, Any]]) -> None:
        """Take over the basic optimizer's states, by the ``id`` of each tensor of `stepped`.

        The masters have been changed in place; the model's weights become theirs, rounded.
        """
        basic = self._engine.basic_optimizer
        tensors = enumerate(p for group in basic.param_groups for p in group["params"])
        found = {number: states[id(p)] for number, p in tensors if states.get(id(p))}
        groups = basic.state_dict()["param_groups"]
        basic.load_state_dict({"state": found, "param_groups": groups})

    def refresh_masters(self) -> None:
        """Take the model's weights as the fp32 masters: other weights have been loaded."""
        refresh = getattr(self._optimizer, "refresh_fp32_params", None)
        if refresh is not None:  # else the optimizer steps the model's weights themselves
            refresh()

    @torch.no_grad()
    def take_changed(self) -> None:
        """Take those elements of the model's weights that are not their masters' rounding.

        The other masters keep all their bits.
        """
        engine = self._engine
        kind = torch.float16 if engine.fp16_enabled() else torch.float32
        kind = torch.bfloat16 if engine.bfloat16_enabled() else kind
        groups = getattr(self._engine.basic_optimizer, "param_groups", ())
        masters = [master for group in groups for master in group["params"]]
        former = [master.detach().clone() for master in masters]
        self.refresh_masters()
        for master, before in zip(masters, former, strict=True):
            kept = before.to(kind) == master.to(kind)
            master.copy_(torch.where(kept, before, master))

    def _parameters(self) -> Iterator[Any]:
        return (p for p in self._engine.module.parameters() if p.requires_grad)


def overlap(own: range, start: int, size: int) -> slice:
    """Return which of ``size`` elements from ``start`` on are in a range, counted from 0."""
    first = min(max(own.start - start, 0), size)
    return slice(first, max(first, min(max(own.stop - start, 0), size)))


def sum_over(group: Any, squared: Tensor) -> Tensor:
    """Sum a tensor over a group of ranks, in place, and return it; a group of None is one rank."""
    if group is not None:
        dist.all_reduce(squared, group=group)
    return squared
