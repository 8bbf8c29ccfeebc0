# SPDX-License-Identifier: Apache-2.0
"""Finds numbers that are not finite in the activations and gradients of a pipeline stage.

A stage checks each micro-batch: its outputs or loss after the forward pass, the gradients of its
inputs after the backward pass. An accelerator answers when it gets there, and nothing waits; until
then the stage keeps what a second pass needs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.engine.context import StageContext
from wavemare.engine.health.nonfinite_trace import (
    Finding,
    are_finite,
    explained,
    tensors_of,
    trace,
)
from wavemare.engine.health.numbers import Fault, NumericsGuard
from wavemare.engine.pipe.micro_batch import as_tuple


@dataclass
class _Held:
    """What a second pass over a micro-batch needs."""

    stage: int
    number: int
    place: int
    random: dict[str, Any]
    inputs: Any = ()
    labels: Any = None


@dataclass
class _Look:
    """A pending check on the device, and how a bad result is explained."""

    number: int
    finite: Tensor
    event: Any
    explain: Callable[[], Fault]


class StageWatch:
    """Checks the micro-batches of a rank's stages; calls are about the active one."""

    def __init__(self, engine: StageContext, guard: NumericsGuard) -> None:
        self._engine = engine
        self._guard = guard
        self._held: dict[tuple[int, int], _Held] = {}
        self._looks: deque[_Look] = deque()
        guard.before_decision = self._drain

    def begin(self, number: int, first: int = 0) -> None:
        """Note the random state just before a forward pass.

        Args:
            number: Of the micro-batch, in the plan.
            first: Number of the first micro-batch of its optimizer step.
        """
        stage = self._engine.active_stage
        self._held[stage, number] = _Held(stage, number, number - first, random_state())

    def end_forward(self, number: int, inputs: Any, outputs: Any, labels: Any = None) -> None:
        """Check the results of a forward pass."""
        held = self._held[self._engine.active_stage, number]
        held.inputs, held.labels = inputs, labels
        tensors = [tensor for tensor in as_tuple(outputs) if tensor.requires_grad]
        self._look(held, tensors, partial(self._explain, held, [], backward=False))

    def end_backward(self, number: int, gradients: Sequence[Tensor]) -> None:
        """Check the results of a backward pass from the gradients of the outputs, if any."""
        held = self._held.pop((self._engine.active_stage, number))
        made = [t.grad for t in as_tuple(held.inputs) if t.is_leaf and t.grad is not None]
        explain = partial(self._explain, held, list(gradients), backward=True)
        self._look(held, made or gradients, explain)

    def discard(self) -> None:
        """Discard the open micro-batches, which will be run again."""
        self._held.clear()
        self._looks.clear()
        self._guard.discard()

    def _look(self, held: _Held, tensors: Iterable[Tensor], explain: Callable[[], Fault]) -> None:
        finite, event = are_finite(tensors), None
        if finite.device.type != "cpu":
            finite, event = finite.to("cpu", non_blocking=True), get_accelerator().Event()
            event.record()
        self._looks.append(_Look(held.number, finite, event, explain))
        while self._looks and (self._looks[0].event is None or self._looks[0].event.query()):
            self._answer(self._looks.popleft())

    def _drain(self) -> None:
        while self._looks:
            self._answer(self._looks.popleft())

    def _answer(self, look: _Look) -> None:
        if look.event is not None:
            look.event.synchronize()
        if not bool(look.finite):
            self._guard.note(look.number, look.explain())

    def _explain(self, held: _Held, gradients: list[Tensor], *, backward: bool) -> Fault:
        # Those forwarded ahead of a step count from the start of their own.
        place = held.place % self._engine.micro_batches + 1
        here = Fault(dist.get_rank(), held.stage, place)
        inputs = [tensor for tensor in tensors_of(held.inputs) if tensor.requires_grad]
        if not bool(are_finite(inputs)):
            return replace(here, arrived=True, finding=Finding("activation", ""))
        if not bool(are_finite(gradients)):
            return replace(here, arrived=True, finding=Finding("gradient", ""))
        return replace(here, finding=self._second_pass(held, gradients, backward=backward))

    def _second_pass(
        self, held: _Held, gradients: list[Tensor], *, backward: bool
    ) -> Finding | None:
        engine = self._engine
        shared = engine.grid.get_slice_parallel_world_size(), engine.settings.expert_parallel.size
        if max(shared) > 1:
            # Its collectives would need the other ranks.
            return Finding("gradient" if backward else "activation", "")
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in as_tuple(held.inputs)]

        def run() -> Any:
            restore_random_state(held.random)
            single = isinstance(held.inputs, Tensor)
            return engine.module(given[0].clone() if single else tuple(t.clone() for t in given))

        def roots(output: Any) -> tuple[list[Tensor], list[Tensor] | None]:
            if engine.is_last_stage():
                loss_fn = engine.module.loss_fn
                # `alone` stands for one that has to be called once, or on all ranks.
                loss_fn = getattr(loss_fn, "alone", loss_fn)
                return [output if loss_fn is None else loss_fn(output, held.labels)], None
            if not backward:
                return [], None
            outputs = [tensor for tensor in as_tuple(output) if tensor.is_floating_point()]
            pairs = zip(outputs, gradients, strict=True)
            used = [(output, gradient) for output, gradient in pairs if output.requires_grad]
            return [output for output, _ in used], [gradient for _, gradient in used]

        leaves = [tensor for tensor in given if tensor.requires_grad]
        with engine.whole_passes(held.stage):
            found = trace(engine.module, run, roots, leaves=leaves, backward=backward)
        return explained(found, held.labels)
