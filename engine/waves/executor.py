# SPDX-License-Identifier: Apache-2.0
"""Interprets a plan of waves: segments forward and backward, collectives behind the other wave.

Every segment is differentiated by itself (Wavelet, MLSys 2021, in the form of one weight copy and
one compute stream). Its inputs are detached from what computed them and share their memory, so
that boundaries are not stored twice. Per parameter the micro-batches add up in their order: sums
are those of plain gradient accumulation, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavemare.engine.waves.aliases import Loans, joining, lent
from wavemare.engine.waves.profile import Survey, cut, detached
from wavemare.engine.waves.segments import Carry, Segments
from wavemare.pipeline.plan.action import COMPUTE, Action, Kind

__all__ = ["Hooks", "WaveExecutor"]

_Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Hooks:
    """What whoever owns weights and optimizer does around the passes.

    Args:
        forward: Context of a forward pass; gets the micro-batch.
        backward: Context of a backward pass; gets the micro-batch.
        begin_backward: Called before a micro-batch's first backward pass.
        scale: From a micro-batch's loss to what is differentiated.
        end_backward: Called after its last one.
        record: Context of each pass, and of each wait for a collective: what of it is exposed.
    """

    forward: Callable[[int], AbstractContextManager[Any]] = lambda micro_batch: nullcontext()
    backward: Callable[[int], AbstractContextManager[Any]] = lambda micro_batch: nullcontext()
    begin_backward: Callable[[int], None] = lambda micro_batch: None
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    end_backward: Callable[[int], None] = lambda micro_batch: None
    record: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()


@dataclass
class _Pass:
    """What a segment keeps from its forward to its backward pass."""

    inputs: Carry
    outputs: Carry
    loans: Loans


@dataclass
class _Wave:
    """A micro-batch under way.

    Attributes:
        carry: Inputs of the next segment; after the head none, and after the last segment of a
            stage what the next stage gets.
        labels: For the head.
        passes: Of the segments that are not yet backwarded.
        gradients: Of the inputs of the last segment that was backwarded; before that, of the last
            carry.
        returned: Gradients of weights that were lent to segments, for the one that owns them.
        loss: Detached, once there is one.
        sum: The last collective.
        work: Its handle, while the next pass has it to wait for.
    """

    carry: Carry
    labels: Any
    passes: list[_Pass] = field(default_factory=list)
    gradients: _Gradients = (None,)
    returned: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    sum: Action | None = None
    work: Any = None

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class WaveExecutor:
    """Runs plans over a model's segments.

    Args:
        segments: The model.
        module: Owns the weights that the segments use.
        survey: What is known of the segments. A weight that it says several segments use gets its
            gradients added up before they meet those of other micro-batches, as autograd does
            without segments.
        hooks: See `Hooks`.
    """

    def __init__(
        self, segments: Segments, module: nn.Module, survey: Survey, hooks: Hooks | None = None
    ) -> None:
        self._segments = segments
        self._module = module
        self._survey = survey
        self._hooks = hooks or Hooks()
        self._head = len(segments.body)
        self._last = len(segments.names) - 1
        self._sums_gradient = segments.sums_gradient
        self._waves: dict[int, _Wave] = {}

    def run(self, actions: Iterable[Action], batches: Iterator[Any]) -> list[Tensor]:
        """Do the passes among the actions; what is left under way, the next call can go on with.

        Args:
            actions: Of a plan with one stage per segment; those of other kinds are passed over.
            batches: A batch is taken when its first forward pass comes.

        Returns:
            The losses of the heads that ran, in the order of their micro-batches, detached.
        """
        losses: dict[int, Tensor] = {}
        try:
            for action in actions:
                if action.kind not in COMPUTE:
                    continue
                if action.kind is Kind.FORWARD and action.stage == 0:
                    self._waves[action.micro_batch] = _Wave(*self._segments.split(next(batches)))
                wave = self._waves[action.micro_batch]
                self._wait(wave)
                with self._hooks.record(action):
                    if action.kind is Kind.FORWARD:
                        self._forward(action, wave)
                    else:
                        self._backward(action, wave)
                if action.kind is Kind.FORWARD and action.stage == self._head:
                    assert wave.loss is not None
                    losses[action.micro_batch] = wave.loss
                elif action.kind is Kind.BACKWARD and action.stage == 0:
                    if not self._segments.continues:
                        del self._waves[action.micro_batch]
                    self._hooks.end_backward(action.micro_batch)
        except BaseException:
            self.abandon()
            raise
        return [losses[micro_batch] for micro_batch in sorted(losses)]

    def outputs(self, micro_batch: int) -> Carry:
        """Return what a stage without head has made of a micro-batch, detached."""
        wave = self._waves[micro_batch]
        self._wait(wave)
        carry, wave.carry = wave.carry, ()
        return carry

    def take_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Take the gradients of what `outputs` returned, before the first backward pass."""
        self._waves[micro_batch].gradients = tuple(gradients)

    def input_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of a stage's first carry, after the last backward pass; once."""
        wave = self._waves.pop(micro_batch)
        self._wait(wave)
        return wave.gradients

    def _wait(self, wave: _Wave) -> None:
        if wave.work is not None:
            assert wave.sum is not None
            with self._hooks.record(wave.sum):
                wave.wait()

    def abandon(self) -> None:
        """Drop all micro-batches under way, once their collectives have ended, or failed."""
        waves, self._waves = self._waves, {}
        for wave in waves.values():
            with suppress(RuntimeError):  # of a peer that is lost: what led here says more
                wave.wait()

    def _forward(self, action: Action, wave: _Wave) -> None:
        inputs = cut(wave.carry)
        loans: Loans = {}
        head = action.stage == self._head
        with (
            self._hooks.forward(action.micro_batch),
            torch.enable_grad(),
            lent(self._module, self._survey.lent[action.stage], loans),
        ):
            if head:
                assert self._segments.head is not None
                outputs: Carry = (self._segments.head(inputs, wave.labels),)
            else:
                outputs = self._segments.body[action.stage].run(inputs)
        wave.passes.append(_Pass(inputs, outputs, loans))
        wave.carry = detached(outputs)
        if head:
            (wave.loss,), wave.carry, wave.labels = wave.carry, (), None
        elif self._segments.body[action.stage].sums_output:
            # In place: the segment after reads the sum where the boundary is stored anyway.
            self._sum(action._replace(kind=Kind.SUM_OUTPUT), wave, wave.carry[0])

    def _backward(self, action: Action, wave: _Wave) -> None:
        kept = wave.passes.pop()
        outputs: list[Tensor] = list(kept.outputs)
        if action.stage == self._last:
            self._hooks.begin_backward(action.micro_batch)
        if action.stage == self._head:
            with torch.enable_grad():
                outputs = [self._hooks.scale(outputs[0])]
            wave.gradients = (torch.ones_like(outputs[0]),)
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, wave.gradients, strict=True)
            if output.requires_grad and gradient is not None
        ]
        returned = {
            weight: wave.returned.pop(weight)
            for weight in self._survey.owned[action.stage]
            if weight in wave.returned
        }
        # A checkpointed segment runs again.
        again = lent(self._module, list(kept.loans), kept.loans)
        with self._hooks.backward(action.micro_batch), joining(returned), again:
            torch.autograd.backward([output for output, _ in roots], [g for _, g in roots])
        for weight, loan in kept.loans.items():
            if loan.grad is not None:
                before = wave.returned.get(weight)
                wave.returned[weight] = loan.grad if before is None else before + loan.grad
        wave.gradients = tuple(tensor.grad for tensor in kept.inputs)
        follows = action.stage > 0 or self._segments.continues
        if self._sums_gradient[action.stage] and follows:
            self._sum(action._replace(kind=Kind.SUM_GRADIENT), wave, wave.gradients[0])

    def _sum(self, action: Action, wave: _Wave, tensor: Tensor | None) -> None:
        assert tensor is not None
        wave.sum = action
        wave.work = dist.all_reduce(tensor, group=self._segments.group, async_op=True)
