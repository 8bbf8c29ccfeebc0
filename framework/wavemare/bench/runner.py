# SPDX-License-Identifier: Apache-2.0
"""What a measured system looks like to the rounds, and the bound that needs no messages."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from wavemare.bench.recorder import EventSource, Recorder
from wavemare.bench.workload import Batch, Workload
from wavemare.pipeline.plan.action import Kind

__all__ = ["ADAMW", "BoundRunner", "Place", "Runner", "bench_device", "build_optimizer"]

ADAMW = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""The optimizer of all systems: AdamW in fp32."""


@dataclass(frozen=True)
class Place:
    """Where a system runs and how much of a step it is given.

    Args:
        rank: Of this process; it is the stage as well.
        stages: Number of processes and of stages.
        micro_batches: Per optimizer step.
    """

    rank: int
    stages: int
    micro_batches: int

    @property
    def is_last(self) -> bool:
        """Whether this process holds the end of the model (where a rank holds one part)."""
        return self.rank == self.stages - 1


class Runner(ABC):
    """A system, built and ready to train.

    Attributes:
        recorder: Notes when each action ran; None where they cannot be told apart.
    """

    recorder: EventSource | None = None

    @abstractmethod
    def step(self) -> None:
        """Train one optimizer step (in steady state: one step's worth of micro-batches)."""

    def settle(self) -> None:
        """Finish what is under way, so that another system may use the same channels."""
        return None


class BoundRunner(Runner):
    """A stage's compute and optimizer steps, without any message.

    With every rank at it at once, this is the best that the machine's cores do side by side.

    Args:
        workload: What is trained.
        place: Which stage of it.
    """

    def __init__(self, workload: Workload, place: Place) -> None:
        device = bench_device()
        self._part = workload.parts(place.stages)[place.rank].to(device)
        self._optimizer = build_optimizer(self._part)
        self._loss = workload.loss if place.is_last else None
        self._count = place.micro_batches
        self._batches = self._fake_batches(workload, place, device)
        self.recorder = recorder = Recorder(place.micro_batches)
        self._timed_forward = recorder.timed(Kind.FORWARD, place.rank, self._forward)
        self._timed_backward = recorder.timed(Kind.BACKWARD, place.rank, self._backward)
        self._timed_update = recorder.timed(Kind.STEP, place.rank, self._update)

    def step(self) -> None:
        """Do the stage's share of a step."""
        for _ in range(self._count):
            inputs, target = next(self._batches)
            self._timed_backward(self._timed_forward(inputs, target), target)
        self._timed_update()

    @staticmethod
    def _fake_batches(workload: Workload, place: Place, device: torch.device) -> Iterator[Batch]:
        """Repeat inputs, and labels or gradients of the output, of the right shapes."""

        def carry() -> Tensor:
            return torch.randn(workload.carry_shape, device=device)

        pairs = []
        for inputs, labels in workload.batches:
            first = inputs.to(device) if place.rank == 0 else carry().requires_grad_()
            pairs.append((first, labels.to(device) if place.is_last else carry()))
        return itertools.cycle(pairs)

    def _forward(self, inputs: Tensor, target: Tensor) -> Tensor:
        if inputs.requires_grad:
            inputs.grad = None
        output: Tensor = self._part(inputs)
        return self._loss(output, target) / self._count if self._loss else output

    def _backward(self, output: Tensor, target: Tensor) -> None:
        output.backward(None if self._loss else target)

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def bench_device() -> torch.device:
    """Return the device that DeepSpeed gives to this process."""
    return torch.device(get_accelerator().current_device_name())


def build_optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of some modules' parameters."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    return make(parameters, **ADAMW)
