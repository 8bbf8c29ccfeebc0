# SPDX-License-Identifier: Apache-2.0
"""Linear layers of which each rank holds a part, and the sums over the ranks between them.

The sums are functions that autograd knows (Shoeybi et al. 2019, section 3). Tensors are summed in
their own type: gloo and NCCL both add bfloat16 and float16, and round after each addition.

Outside a split region the ranks draw the same random numbers, from generators in the same state, so
that what is replicated stays equal. A region's own numbers follow from one that all draw at its
beginning. So there is no second state: whoever saves and restores the generators of torch, such as
activation checkpointing, restores the regions too.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from wavemare.engine.waves.passes import default_generators, wait


def copy_to_group(value: Tensor, group: Any) -> Tensor:
    """Return a tensor, equal on all ranks, that each uses in its own way: its gradients add up.

    Identity in the forward pass, all-reduce in the backward pass (Megatron-LM's f).
    """
    return _CopyToGroup.apply(value, group)


def reduce_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the sum over the ranks, which all go on with in the same way.

    All-reduce in the forward pass, identity in the backward pass (Megatron-LM's g).
    """
    return _ReduceFromGroup.apply(value, group)


def gather_from_group(value: Tensor, group: Any) -> Tensor:
    """Return the ranks' tensors side by side in the last dimension.

    All ranks must go on in the same way: in the backward pass each takes its part of the gradient.
    """
    return _GatherFromGroup.apply(value, group)


def _summed(value: Tensor, group: Any) -> Tensor:
    total = value.clone(memory_format=torch.contiguous_format)
    wait(dist.all_reduce(total, group=group, async_op=True))
    return total


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        return _summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.width = dist.get_rank(group), value.shape[-1]
        value = value.contiguous()
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
        wait(dist.all_gather(parts, value, group=group, async_op=True))
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.narrow(-1, ctx.rank * ctx.width, ctx.width), None


def split_parameter(
    part: Tensor, dim: int, requires_grad: bool = True, *, whole_numel: int | None = None
) -> nn.Parameter:
    """Return a rank's part of a parameter, with the marks that Megatron-LM and DeepSpeed look for.

    Without them DeepSpeed would count it in the gradient's norm on the first rank alone.

    Args:
        part: The rank's values.
        dim: The dimension that is split.
        requires_grad: Whether it is trained.
        whole_numel: Number of elements of the whole, for counts of a model's parameters.
    """
    parameter: Any = nn.Parameter(part, requires_grad=requires_grad)
    if whole_numel is not None:
        parameter.whole_numel = whole_numel
    parameter.tensor_model_parallel = True
    parameter.model_parallel = True
    parameter.partition_dim = dim
    return parameter


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs.

    Args:
        weight: The rank's part, (outputs / ranks, inputs).
        bias: The rank's part, (outputs / ranks,).
        group: The ranks.
        transposed: The weight is (inputs, outputs / ranks), as in GPT-2's ``Conv1D``.
        copies_input: Whether the gradient of the input is summed here; else the caller does so,
            once for all layers that read the same input.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: Any,
        *,
        transposed: bool = False,
        copies_input: bool = True,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group
        self.transposed = transposed
        self.copies_input = copies_input

    def forward(self, value: Tensor) -> Tensor:
        """Map (..., inputs), equal on all ranks, to this rank's (..., outputs / ranks)."""
        if self.copies_input:
            value = copy_to_group(value, self.group)
        return F.linear(value, self.weight.t() if self.transposed else self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank reads some of the inputs; the ranks' results are summed.

    Args:
        weight: The rank's part, (outputs, inputs / ranks).
        bias: The whole bias, (outputs,), which all ranks hold.
        group: The ranks.
        transposed: The weight is (inputs / ranks, outputs), as in GPT-2's ``Conv1D``.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, group: Any, *, transposed: bool
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.group = group
        self.transposed = transposed

    def forward(self, value: Tensor) -> Tensor:
        """Map this rank's (..., inputs / ranks) to (..., outputs), equal on all ranks."""
        part = F.linear(value, self.weight.t() if self.transposed else self.weight)
        total = reduce_from_group(part, self.group)
        return total if self.bias is None else total + self.bias


_SEEDS = 2**32  # torch's generator of the CPU looks at no more bits than these
_SPACING = 2654435769  # odd, so that ranks never share a seed; the golden ratio of 2**32


class SplitRandom:
    """Gives a rank numbers of its own between :meth:`enter` and :meth:`leave`.

    Each of two passes that take turns has its own regions.

    Args:
        rank: The rank in its group.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: dict[int, tuple[torch.Generator, Tensor]] = {}  # by thread

    def enter(self, device: torch.device) -> None:
        """Begin a region of a device, unless one is open."""
        if threading.get_ident() in self._outside:
            return
        common = int(torch.randint(_SEEDS, ()))
        generator = default_generators(device)[-1]
        self._outside[threading.get_ident()] = generator, generator.get_state()
        generator.manual_seed((common + self._rank * _SPACING) % _SEEDS)

    def leave(self) -> None:
        """End the region, if one is open: go on with the numbers that all ranks draw."""
        if threading.get_ident() in self._outside:
            generator, state = self._outside.pop(threading.get_ident())
            generator.set_state(state)

    def surround(self, module: nn.Module, dropout: nn.Dropout) -> None:
        """Make the forward pass of a module a region as long as its dropout draws anything."""

        def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if module.training and dropout.p > 0:
                self.enter(inputs[0].device)

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(lambda *_: self.leave(), always_call=True)


class DropoutAfterSum(nn.Dropout):
    """Dropout of what all ranks have in common, at the end of a split region.

    Args:
        p: Probability of a zero.
        random: The region's numbers.
    """

    def __init__(self, p: float, random: SplitRandom) -> None:
        super().__init__(p)
        self.random = random

    def forward(self, input: Tensor) -> Tensor:
        """Drop elements, the same ones on all ranks."""
        self.random.leave()
        return super().forward(input)


def align_generators(device: torch.device, group: Any) -> None:
    """Give all ranks the state of the first one's generators: of the CPU, and of a device."""
    for generator in default_generators(device):
        # A state is in the memory of the host, and NCCL sends only that of a device.
        shared = generator.get_state().to(device)
        dist.broadcast(shared, group_src=0, group=group)
        generator.set_state(shared.cpu())
