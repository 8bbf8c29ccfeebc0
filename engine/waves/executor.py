# SPDX-License-Identifier: Apache-2.0
"""Runs a plan of waves: segments forward and backward, collectives overlapped with the other wave.

Every segment is differentiated by itself (Wavelet, MLSys 2021, with one weight copy and one compute
stream). Its inputs are detached and share the memory of the previous outputs. Gradients add up in
micro-batch order, so sums equal plain gradient accumulation bit for bit.

Autograd adds a weight's gradients of one backward pass up and then adds the sum to ``.grad``. So
all but the first segment that uses a shared weight get an alias, a leaf of the same memory. The
alias's gradient joins the backward pass of the first segment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wavemare.engine.waves.segments import Activations, SegmentProfile, Segments, cut, detached
from wavemare.pipeline.plan.plan import COMPUTE, Action, Kind

_Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the owner of weights and optimizer around the passes.

    Args:
        forward: Context of a forward pass; gets the micro-batch.
        backward: Context of a backward pass; gets the micro-batch.
        begin_backward: Called before a micro-batch's first backward pass.
        scale: Scales a micro-batch's loss before differentiation.
        end_backward: Called after a micro-batch's last backward pass.
        record: Context of each pass, and of each wait for a collective.
    """

    forward: Callable[[int], AbstractContextManager[Any]] = lambda micro_batch: nullcontext()
    backward: Callable[[int], AbstractContextManager[Any]] = lambda micro_batch: nullcontext()
    begin_backward: Callable[[int], None] = lambda micro_batch: None
    scale: Callable[[Tensor], Tensor] = lambda loss: loss
    end_backward: Callable[[int], None] = lambda micro_batch: None
    record: Callable[[Action], AbstractContextManager[Any]] = lambda action: nullcontext()


@dataclass
class _Pass:
    """What a segment saves for its backward pass."""

    inputs: Activations
    outputs: Activations
    aliases: Aliases


@dataclass
class _Wave:
    """A micro-batch in flight.

    Attributes:
        activations: Inputs of the next segment; empty after the head. After a stage's last segment,
            the input of the next stage.
        labels: For the head.
        passes: Of the segments that have not gone backward.
        gradients: Of the inputs of the last segment that went backward; before that, of the last
            activations.
        returned: Gradients of aliases, for the segment that owns the weight.
        loss: Detached; None before the head.
        sum: The last collective.
        work: Its handle, until the next pass has waited for it.
    """

    activations: Activations
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
        profile: Of the segments. Gradients of a shared weight are added up within a micro-batch
            before they are added to other micro-batches, as autograd does without segments.
        hooks: See `Hooks`.
    """

    def __init__(
        self,
        segments: Segments,
        module: nn.Module,
        profile: SegmentProfile,
        hooks: Hooks | None = None,
    ) -> None:
        self._segments = segments
        self._module = module
        self._profile = profile
        self._hooks = hooks or Hooks()
        self._head = len(segments.body)
        self._last = len(segments.names) - 1
        self._sums_gradient = segments.sums_gradient
        self._waves: dict[int, _Wave] = {}

    def run(self, actions: Iterable[Action], batches: Iterator[Any]) -> list[Tensor]:
        """Run the passes among the actions; the next call can continue unfinished micro-batches.

        Args:
            actions: Of a plan with one stage per segment; actions of other kinds are ignored.
            batches: A batch is taken at its first forward pass.

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
            self.discard()
            raise
        return [losses[micro_batch] for micro_batch in sorted(losses)]

    def outputs(self, micro_batch: int) -> Activations:
        """Return a stage's outputs of a micro-batch, detached; for stages without head."""
        wave = self._waves[micro_batch]
        self._wait(wave)
        activations, wave.activations = wave.activations, ()
        return activations

    def take_gradients(self, micro_batch: int, gradients: Sequence[Tensor | None]) -> None:
        """Set the gradients of `outputs`, before the first backward pass."""
        self._waves[micro_batch].gradients = tuple(gradients)

    def input_gradients(self, micro_batch: int) -> tuple[Tensor | None, ...]:
        """Return the gradients of a stage's inputs, after the last backward pass; once."""
        wave = self._waves.pop(micro_batch)
        self._wait(wave)
        return wave.gradients

    def _wait(self, wave: _Wave) -> None:
        if wave.work is not None:
            assert wave.sum is not None
            with self._hooks.record(wave.sum):
                wave.wait()

    def discard(self) -> None:
        """Wait for the collectives of all micro-batches in flight, and drop them."""
        waves, self._waves = self._waves, {}
        for wave in waves.values():
            with suppress(RuntimeError):  # of a lost peer: the first error says more
                wave.wait()

    def _forward(self, action: Action, wave: _Wave) -> None:
        inputs = cut(wave.activations)
        aliases: Aliases = {}
        head = action.stage == self._head
        with (
            self._hooks.forward(action.micro_batch),
            torch.enable_grad(),
            aliased(self._module, self._profile.aliased[action.stage], aliases),
        ):
            if head:
                assert self._segments.head is not None
                outputs: Activations = (self._segments.head(inputs, wave.labels),)
            else:
                outputs = self._segments.body[action.stage].run(inputs)
        wave.passes.append(_Pass(inputs, outputs, aliases))
        wave.activations = detached(outputs)
        if head:
            (wave.loss,), wave.activations, wave.labels = wave.activations, (), None
        elif self._segments.body[action.stage].sums_output:
            # In place: the next segment reads the sum from the stored boundary.
            self._sum(action._replace(kind=Kind.SUM_OUTPUT), wave, wave.activations[0])

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
            for weight in self._profile.owned[action.stage]
            if weight in wave.returned
        }
        # A checkpointed segment runs again.
        again = aliased(self._module, list(kept.aliases), kept.aliases)
        with self._hooks.backward(action.micro_batch), adding_gradients(returned), again:
            torch.autograd.backward([output for output, _ in roots], [g for _, g in roots])
        for weight, alias in kept.aliases.items():
            if alias.grad is not None:
                before = wave.returned.get(weight)
                wave.returned[weight] = alias.grad if before is None else before + alias.grad
        wave.gradients = tuple(tensor.grad for tensor in kept.inputs)
        follows = action.stage > 0 or self._segments.continues
        if self._sums_gradient[action.stage] and follows:
            self._sum(action._replace(kind=Kind.SUM_GRADIENT), wave, wave.gradients[0])

    def _sum(self, action: Action, wave: _Wave, tensor: Tensor | None) -> None:
        assert tensor is not None
        wave.sum = action
        wave.work = dist.all_reduce(tensor, group=self._segments.group, async_op=True)


Aliases = dict[nn.Parameter, nn.Parameter]
"""For each shared weight its alias, a leaf of the same memory."""


@contextmanager
def aliased(module: nn.Module, weights: Sequence[nn.Parameter], aliases: Aliases) -> Iterator[None]:
    """Replace weights by aliases in all parts of a module.

    Args:
        module: Owns the weights.
        weights: The shared weights.
        aliases: Filled in; aliases that it contains are used again.
    """
    with ExitStack() as stack:
        for weight in weights:
            for part in module.modules():
                for name, held in part._parameters.items():
                    if held is weight:
                        alias = _alias_gathered if hasattr(weight, "ds_id") else _alias
                        stack.enter_context(alias(part, name, weight, aliases))
        yield


@contextmanager
def _alias(part: nn.Module, name: str, weight: nn.Parameter, aliases: Aliases) -> Iterator[None]:
    if weight not in aliases:
        aliases[weight] = nn.Parameter(weight.detach())
    part._parameters[name] = aliases[weight]
    try:
        yield
    finally:
        part._parameters[name] = weight


@contextmanager
def _alias_gathered(
    part: nn.Module, name: str, weight: nn.Parameter, aliases: Aliases
) -> Iterator[None]:
    """Alias a weight of ZeRO-3, which is gathered only while its module runs."""

    def begin(*_: Any) -> None:
        aliases[weight] = nn.Parameter(weight.detach())
        part._parameters[name] = aliases[weight]

    def end(*_: Any) -> None:
        part._parameters[name] = weight

    # Run within DeepSpeed's hooks: after the gather, before the release.
    hooks = [
        part.register_forward_pre_hook(begin),
        part.register_forward_hook(end, prepend=True, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def adding_gradients(gradients: Mapping[nn.Parameter, Tensor]) -> Iterator[None]:
    """Add gradients of aliases to the gradients of the backward pass inside."""
    hooks = [
        weight.register_hook(lambda own, other=gradient: other + own)
        for weight, gradient in gradients.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
