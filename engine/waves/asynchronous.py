# SPDX-License-Identifier: Apache-2.0
"""Waves that never drain: a step's gradients are reduced and applied during the next step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from wavemare.engine.context import EngineContext
from wavemare.engine.sparse.gradients import ReplicatedGradients
from wavemare.engine.waves.executor import Hooks, WaveExecutor
from wavemare.engine.waves.versions import DelayedVersions, Replicas, Versions
from wavemare.pipeline.wave.steps import OpenSteps

_Gradients = list[Tensor | None]


class AsyncWaves:
    """Trains steps whose last micro-batch goes backward during the next step's first forward pass.

    Step n is computed with the weights of step n - 1's beginning, which the gradients of step
    n - 2 have just updated: ``w_(n+1) = w_n - rate * g(w_(n-1); x_n)`` (mode ``async``), or with
    replica ``n % 2`` (mode ``replica``). Its gradients are complete, and are sent, when its last
    micro-batch has gone backward within step n + 1; step n + 2 begins with their update.

    Args:
        engine: A data-parallel engine without ZeRO, in fp32.
        mode: ``async`` or ``replica``.
    """

    def __init__(self, engine: EngineContext, mode: str) -> None:
        self._engine = engine
        self._parameters = [p for p in engine.module.parameters() if p.requires_grad]
        self._versions: Versions = (
            Replicas(self._parameters, engine.optimizer)
            if mode == "replica"
            else DelayedVersions(self._parameters)
        )
        sparse = engine.sparse
        self._reduction: ReplicatedGradients | _BackgroundReduction = (
            sparse
            if isinstance(sparse, ReplicatedGradients)
            else _BackgroundReduction(engine, self._parameters)
        )
        self._begin()

    def _begin(self) -> None:
        self._step = 0
        self._plan: OpenSteps | None = None
        self._open: int | None = None  # the unfinished micro-batch between two steps
        self._sent: int | None = None  # the step whose gradients are being reduced
        self._held: tuple[int, _Gradients] | None = None  # a step, and its reduced gradients
        self._advanced = False  # whether other weights than the open micro-batch's are in place

    def hooks(self) -> Hooks:
        """Return the executor's hooks."""
        return Hooks(
            forward=self._forward,
            backward=self._backward,
            scale=lambda loss: self._engine.before_backward(loss) / self._micro_batches,
            end_backward=self._end_backward,
        )

    def train(
        self, executor: WaveExecutor, batches: Iterator[Any], plan: OpenSteps
    ) -> list[Tensor]:
        """Train one step; its last micro-batch stays unfinished.

        Args:
            executor: Made with `hooks`.
            batches: This rank's micro-batches.
            plan: Of the executor's segments.

        Returns:
            The losses of the step's micro-batches, detached.
        """
        engine = self._engine
        # DeepSpeed must not reduce, step or count by itself.
        engine.set_gradient_accumulation_boundary(False)
        if self._step == 0:
            # Other steps or a load may have changed the weights.
            self._versions.begin()
        if self._sent is not None and self._sent <= self._step - 2:
            self._collect()
        self._advance(self._step)
        self._advanced = True
        self._plan = plan
        actions = plan.step(self._step, carries_on=self._open is not None)
        losses = executor.run(actions, batches)
        self._step += 1
        self._open = self._step * self._micro_batches - 1
        self._advanced = False
        engine.global_steps += 1
        engine.global_samples += engine.train_batch_size()
        engine.micro_steps += self._micro_batches
        return losses

    @property
    def is_drained(self) -> bool:
        """Whether all gradients have been applied."""
        return self._open is None and self._sent is None and self._held is None

    def synchronize(self, executor: WaveExecutor | None) -> None:
        """Finish the last micro-batch; its step's gradients stay reduced and not applied.

        Later steps do not change.

        Args:
            executor: That of `train`; None before the first step.
        """
        if self._sent is not None:
            self._collect()
        if self._open is not None:
            assert executor is not None
            assert self._plan is not None
            self._advance(self._step)
            self._advanced = True
            executor.run(self._plan.closing(self._step - 1), iter(()))
            self._open, self._advanced = None, False
            self._collect()

    def drain(self, executor: WaveExecutor | None) -> None:
        """Finish the last micro-batch and apply all gradients; `train` may continue."""
        self.synchronize(executor)
        if self._held is not None:
            self._advance(self._step + 1)
            self._versions.advance(self._step, updates=False)
        self._engine.set_gradient_accumulation_boundary(None)

    def reset(self) -> None:
        """Wait for the reduction, drop all micro-batches in flight, and start at step 0."""
        if self._sent is not None:
            self._collect()
        self.discard_gradients()
        self._begin()

    def discard_gradients(self) -> None:
        """Drop the gradients of the unfinished micro-batch, after an error."""
        self._open, self._advanced = None, False
        self._engine.zero_grad()
        self._engine.set_gradient_accumulation_boundary(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides weights and optimizer; after `synchronize`."""
        return {
            "step": self._step,
            "held": self._held,
            "versions": self._versions.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state."""
        self._step = state["step"]
        self._held = None
        if state["held"] is not None:
            step, gradients = state["held"]
            places = zip(gradients, self._parameters, strict=True)
            self._held = step, [None if g is None else g.to(p.device) for g, p in places]
        self._versions.load_state_dict(state["versions"])

    def _advance(self, step: int) -> None:
        """Put the weights of a step's beginning in place."""
        updates = self._held is not None and self._held[0] <= step - 2
        self._versions.advance(step, updates=updates)
        if not updates:
            return
        assert self._held is not None
        engine, (_, gradients), self._held = self._engine, self._held, None
        unfinished = self._exchange(gradients)
        counts = engine.global_steps, engine.global_samples, engine.micro_steps
        engine.set_gradient_accumulation_boundary(True)
        try:
            engine.step()
        finally:
            engine.set_gradient_accumulation_boundary(False)
            # Count trained steps; updates come later.
            engine.global_steps, engine.global_samples, engine.micro_steps = counts
            self._exchange(unfinished)

    def _collect(self) -> None:
        """Wait for the reduction, and keep its result."""
        assert self._sent is not None
        unfinished = self._exchange([None] * len(self._parameters))
        if isinstance(self._reduction, ReplicatedGradients):
            self._exchange([torch.zeros_like(p) for p in self._parameters])
        self._reduction.end()
        self._held, self._sent = (self._sent, self._exchange(unfinished)), None

    def _exchange(self, gradients: _Gradients) -> _Gradients:
        before = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        return before

    def _forward(self, micro_batch: int) -> AbstractContextManager[Any]:
        last = (micro_batch + 1) % self._micro_batches == 0
        return self._versions.forward() if last else nullcontext()

    def _backward(self, micro_batch: int) -> AbstractContextManager[Any]:
        stale = micro_batch == self._open and self._advanced
        return self._versions.former() if stale else nullcontext()

    def _end_backward(self, micro_batch: int) -> None:
        if (micro_batch + 1) % self._micro_batches == 0:
            self._versions.smooth()
            self._reduction.begin()
            self._sent = micro_batch // self._micro_batches
            self._exchange([None] * len(self._parameters))

    @property
    def _micro_batches(self) -> int:
        return int(self._engine.gradient_accumulation_steps())


class _BackgroundReduction:
    """Averages dense gradients over an engine's data ranks between `begin` and `end`."""

    def __init__(self, engine: EngineContext, parameters: Sequence[nn.Parameter]) -> None:
        self._group = engine.data_parallel_group
        self._divisor = engine.dp_world_size if engine.gradient_average else 1
        self._parameters = list(parameters)
        self._flat: Tensor | None = None
        self._work: Any = None

    def begin(self) -> None:
        """Start to reduce the gradients; they may be replaced, and missing ones count as zero."""
        self._flat = torch.cat(
            [
                (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                for p in self._parameters
            ]
        )
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def end(self) -> None:
        """Wait, and set the gradients to their means."""
        assert self._flat is not None
        if self._work is not None:  # none where there is one rank
            self._work.wait()
        self._flat.div_(self._divisor)
        parts = self._flat.split([p.numel() for p in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        self._flat = self._work = None
