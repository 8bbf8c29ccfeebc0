# SPDX-License-Identifier: Apache-2.0
"""Linear layers of which each rank holds a part."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from wavemare.parallel.tensor.collectives import (
    copy_to_group,
    reduce_from_group,
    sums_deferred,
)

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "split_parameter"]


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
        """Map this rank's (..., inputs / ranks) to (..., outputs), equal on all ranks.

        Within ``deferred_sums()`` it is this rank's part of the sum, without the bias.
        """
        part = F.linear(value, self.weight.t() if self.transposed else self.weight)
        return part if sums_deferred() else self.add_bias(reduce_from_group(part, self.group))

    def add_bias(self, total: Tensor) -> Tensor:
        """Add the bias to the sum over the ranks."""
        return total if self.bias is None else total + self.bias
