# SPDX-License-Identifier: Apache-2.0
"""Device-like compute: passes of a known length in which the processors are free.

On the host of a GPU the processors do nothing while a pass runs. On CPUs a pass takes the cores
that messages, hooks and copies need. So benchmarks can replace passes by sleeps: all parameters
and gradients are real, and a part's gradients are handed out when its backward pass would end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.request import Waits

# Linux may wake a sleeper so late by default.
_TIMER_SLACK_S = 50e-6


def sleep(seconds: float) -> None:
    """Sleep; the last moment is spent awake, to end in time."""
    end = time.perf_counter() + seconds
    time.sleep(max(seconds - _TIMER_SLACK_S, 0))
    while time.perf_counter() < end:
        pass


def sleeping(
    function: Callable[..., Tensor], weight: Tensor, waits: Waits
) -> Callable[..., Tensor]:
    """Return a layer's function (inputs, ...) that also sleeps, in all passes.

    Hooks on the two gradients sleep, so that a split backward pass sleeps in the same parts.

    Args:
        function: Of the inputs.
        weight: Which it reads.
        waits: How long.
    """
    weight.register_hook(lambda _: sleep(waits.weight_s))

    def run(inputs: Tensor, *rest: Any) -> Tensor:
        # A first layer's input needs no gradient, and sleeps for it as others do.
        own = inputs.view_as(inputs) if inputs.requires_grad else inputs.detach().requires_grad_()
        own.register_hook(lambda _: sleep(waits.input_s))
        output = function(own, *rest)
        sleep(waits.forward_s)
        return output

    return run


@dataclass(frozen=True)
class Part:
    """Layers of a model that run one after the other.

    Args:
        module: An embedding, which is looked up and takes no time, or layers that sleep.
        ids: For an embedding: the name of its ids in the batch.
    """

    module: nn.Module
    ids: str | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """What the part trains."""
        return [weight for weight in self.module.parameters() if weight.requires_grad]


@dataclass
class Output:
    """What a model returns, as those of transformers do.

    Args:
        loss: (), with the gradients of all parts.
    """

    loss: Tensor


class SleepingPass(torch.autograd.Function):
    """Layers that sleep in both passes: (value, ...) to the value, unchanged."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, waits: Waits, factor: float, *weights: Tensor) -> Tensor:
        """Sleep, and return the value; its backward pass gives weights the gradient ``factor``."""
        ctx.waits, ctx.factor = waits, factor
        ctx.save_for_backward(*weights)
        sleep(waits.forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep; return the gradient of the value unchanged, and those of the weights."""
        sleep(ctx.waits.input_s + ctx.waits.weight_s)
        given = [torch.full_like(weight, ctx.factor) for weight in ctx.saved_tensors]
        return gradients[0], None, None, *given


def put_to_sleep(
    model: nn.Module, parts: Sequence[Part], waits: Waits, *, factor: float = 1.0
) -> None:
    """Replace a model's forward pass by one whose passes sleep.

    The model then takes a batch by name and returns an `Output`. Every weight of a part that sleeps
    has the gradient ``factor``. A row of an embedding has it times the row's occurrences.

    Args:
        model: Keeps its modules and its weights.
        parts: In the order of the forward pass.
        waits: Of the whole model; parts share them by their numbers of weights.
        factor: Other ranks may have another one.
    """
    total = sum(w.numel() for part in parts if part.ids is None for w in part.weights)

    def run(part: Part, value: Tensor, batch: dict[str, Tensor]) -> Tensor:
        if part.ids is not None:
            return value + factor * part.module(batch[part.ids]).sum()
        share = sum(weight.numel() for weight in part.weights) / total
        passed: Tensor = SleepingPass.apply(value, waits.share(share), factor, *part.weights)
        return passed

    def forward(**batch: Tensor) -> Output:
        value = torch.zeros((), requires_grad=True)
        for part in parts:
            value = run(part, value, batch)
        return Output(value)

    model.forward = forward


class SleepingOptimizer(torch.optim.Optimizer):
    """Leaves the weights as they are: a device would update them while the processors are free.

    Args:
        parameters: Of the model.

    Attributes:
        kept: The gradients of each step, if it is a list.
    """

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.0})
        self.kept: list[list[Tensor]] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Keep copies of the gradients, where they are asked for."""
        if self.kept is not None:
            gradients = [p.grad for group in self.param_groups for p in group["params"]]
            self.kept.append([g.to_dense().clone() for g in gradients if g is not None])
