# SPDX-License-Identifier: Apache-2.0
"""Corrections of the weight discrepancy between a micro-batch's forward and backward pass.

`WeightStashing` (PipeDream) and `VelocityCorrection` (PipeMare's T2) change the weights of backward
passes. They replace ``p.data`` during the pass and copy nothing. Autograd saves a parameter itself
for some operators and a view of its memory for others. The forward pass of a stale micro-batch
therefore saves parameter and offset (`Correction.forward`), and its backward pass looks up
``p.data`` there.

`WeightPrediction` (SpecTrain) changes the weights of forward passes instead, in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError, ModelError, PlanError
from wavemare.pipeline.staleness.staleness import ema_decay, resolve_mode
from wavemare.pipeline.staleness.storage import (
    References,
    distinct,
    resolve,
    same_layout,
)


def make_correction(
    mode: str,
    parameters: Iterable[Tensor],
    max_staleness: int,
    decay_base: float | None = None,
) -> Correction:
    """Return the correction of one stage.

    Args:
        mode: One of `staleness.MODES`; "auto" is "exact" up to a staleness of 2, else "ema".
        parameters: See `Correction`; without trainable ones there is nothing to correct.
        max_staleness: Largest staleness of the stage, in optimizer steps; 0 needs no correction.
        decay_base: PipeMare's D for "ema"; the decay is that of `ema_decay` if omitted.

    Raises:
        PlanError: There is no such mode.
        ModelError: Parameters share a part of their memory.
    """
    parameters = [p for p in parameters if p.requires_grad and p.numel()]
    resolved = resolve_mode(mode, max_staleness if parameters else 0)
    if resolved == "exact":
        return WeightStashing(parameters, max_staleness)
    if resolved == "ema":
        return VelocityCorrection(parameters, ema_decay(max_staleness, decay_base))
    if resolved == "predict":
        return WeightPrediction(parameters, max_staleness)
    return Correction(parameters)


class Correction:
    """No correction: backward passes use the newest weights. Base of the others.

    Args:
        parameters: Of the stage. Frozen ones are ignored. Those in the memory of another one follow
            it. Their ``.data`` is looked up at each call.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode = "off"
    _state_key: str | None = None
    """Name of `_state` in checkpoints."""
    _corrects_backward = False
    """Whether stale backward passes look weights up, to which autograd saves references."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trainable = [p for p in parameters if p.requires_grad and p.numel()]
        self._parameters = distinct(trainable)
        apart = set(map(id, self._parameters))
        self._aliases = [p for p in trainable if id(p) not in apart]
        self._references = References(self._parameters)
        self._newest: list[Tensor] | None = None
        self._state: list[Tensor] = []

    def before_step(self) -> None:
        """Record the weights just before an optimizer step.

        Raises:
            PlanError: Corrected weights are in place.
        """
        self._check_newest("step")
        self._before_step(self._weights())

    def after_step(self) -> None:
        """Record the weights just after an optimizer step."""
        self._after_step(self._weights())

    def forward(self, staleness: int) -> AbstractContextManager[None]:
        """Return the context of a forward pass.

        Args:
            staleness: Optimizer steps until the micro-batch's backward pass.
        """
        return self._references.kept() if staleness and self._corrects_backward else nullcontext()

    def correct(self, staleness: int) -> None:
        """Replace the newest weights by those of the forward pass, or their estimate.

        Args:
            staleness: Optimizer steps since the forward pass; 0 does nothing.

        Raises:
            PlanError: The weights are corrected already, or that version is not kept.
            ModelError: A parameter has a new memory format.
        """
        if staleness == 0:
            return
        self._check_newest("correct")
        weights = self._weights()
        former = self._former(weights, staleness)
        if former is None:
            return
        for weight, tensor in zip(weights, former, strict=True):
            if not same_layout(weight, tensor):
                reason = f"a parameter of this shape now has the strides {weight.stride()}"
                remedy = "Choose the memory format before the engine is made"
                raise ModelError("parameters", tuple(weight.shape), reason, remedy)
        if self._aliases:
            self._references.find()
        parts = [self._references.of(alias) for alias in self._aliases]
        self._newest = [*weights, *(alias.data for alias in self._aliases)]
        _point(self._parameters, former)
        _point(self._aliases, map(resolve, parts))

    def restore(self) -> None:
        """Put the newest weights back, if others are in place."""
        if self._newest is not None:
            _point([*self._parameters, *self._aliases], self._newest)
            self._newest = None

    def discard_versions(self) -> None:
        """Drop older versions: the pipeline is empty, so no backward pass needs them."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state; its tensors are not copied."""
        return {"mode": self.mode, **({self._state_key: self._state} if self._state_key else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a `state_dict` of this mode.

        Raises:
            CheckpointError: A stage of other parameters saved it.
        """
        loaded = state[self._state_key] if self._state_key else []
        shapes, own = ([tuple(tensor.shape) for tensor in each] for each in (loaded, self._state))
        if shapes != own:
            reason = f"the state is of other parameters than the stage's {len(own)}"
            remedy = "Resume with the stages that the checkpoint was saved with"
            raise CheckpointError("correction", f"{len(loaded)} tensors", reason, remedy)
        for held, value in zip(self._state, loaded, strict=True):
            held.copy_(value)

    def go_on_from(self, former: Correction) -> None:
        """Take the state of another correction over, of the parameters that both have."""
        if former.mode == self.mode:
            held = dict(zip(map(id, former._parameters), former._state, strict=False))
            for parameter, own in zip(self._parameters, self._state, strict=False):
                if id(parameter) in held:
                    own.copy_(held[id(parameter)])

    def _before_step(self, weights: list[Tensor]) -> None:
        pass

    def _after_step(self, weights: list[Tensor]) -> None:
        pass

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor] | None:
        return None

    def _weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self._parameters]

    def _check_newest(self, what: str) -> None:
        if self._newest is not None:
            reason = "corrected weights are in place"
            raise PlanError("correction", what, reason, "Restore the newest weights first")


class WeightStashing(Correction):
    """PipeDream's weight stashing: backward passes use the forward pass's weights, from copies.

    Args:
        parameters: See `Correction`.
        depth: Number of older versions kept: the largest staleness.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode = "exact"
    _corrects_backward = True

    def __init__(self, parameters: Iterable[Tensor], depth: int) -> None:
        super().__init__(parameters)
        self._ring = [[_unfilled(w) for w in self._weights()] for _ in range(depth)]
        self._latest = 0
        self._held = 0

    def discard_versions(self) -> None:
        """Drop all older versions."""
        self._held = 0

    def _slot(self, age: int) -> int:
        return (self._latest - age + 1) % len(self._ring)

    def _before_step(self, weights: list[Tensor]) -> None:
        self._latest = (self._latest + 1) % len(self._ring)
        self._held = min(self._held + 1, len(self._ring))
        torch._foreach_copy_(self._ring[self._latest], weights)

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor]:
        if not 0 < staleness <= self._held:
            reason = f"the {self._held} newest of the older versions are held"
            remedy = f"Give at most that, and a depth (now {len(self._ring)}) that is large enough"
            raise PlanError("staleness", staleness, reason, remedy)
        return self._ring[self._slot(staleness)]


class VelocityCorrection(Correction):
    """PipeMare's discrepancy correction (T2): estimates the forward pass's weights.

    After each step ``delta <- decay * delta + (1 - decay) * (w_new - w_old)``. The estimate for a
    micro-batch is ``w - staleness * delta``, computed in fp32 at least and rounded once. Any
    optimizer works, as the changes are measured.

    Args:
        parameters: See `Correction`.
        decay: Of the moving average, from 0 to below 1.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode = "ema"
    _state_key = "deltas"
    _corrects_backward = True

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        super().__init__(parameters)
        self._decay = decay
        self._estimate = [_unfilled(w) for w in self._weights()]
        self._state = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in self._weights()
        ]

    def _before_step(self, weights: list[Tensor]) -> None:
        # No estimate is in place during a step, so its memory is free.
        torch._foreach_copy_(self._estimate, weights)

    def _after_step(self, weights: list[Tensor]) -> None:
        # Subtract first: adding the weights in two halves would round the change away.
        torch._foreach_sub_(self._estimate, weights)
        torch._foreach_mul_(self._state, self._decay)
        torch._foreach_add_(self._state, self._estimate, alpha=self._decay - 1.0)

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor]:
        # An addition to half precision is computed in the wider of the two types.
        torch._foreach_copy_(self._estimate, weights)
        torch._foreach_add_(self._estimate, self._state, alpha=-staleness)
        return self._estimate


class WeightPrediction(Correction):
    """SpecTrain's weight prediction: forward passes use the weights expected at the backward pass.

    A micro-batch with a staleness of ``s`` steps sees ``w + s * (w - w_old)`` forward, where
    ``w_old`` is the version before the newest, and ``w`` backward. The last change of the
    weights stands for the next one, so no optimizer state is read (PipeOptim, arXiv 2312.00839).

    Between two steps it holds the last change. Whatever else changes the weights there, they are
    predicted from what they are then. At a staleness of one step, the first such pass of a step
    adds the weights to the change, in its memory, and passes exchange them with the newest. Beyond,
    a second copy holds the newest weights during a pass.

    Args:
        parameters: See `Correction`.
        depth: The largest staleness.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode = "predict"
    _state_key: str = "changes"

    def __init__(self, parameters: Iterable[Tensor], depth: int) -> None:
        super().__init__(parameters)
        self._state = [torch.zeros_like(weight) for weight in self._weights()]
        self._is_added = False  # whether the state is the predicted weights, not the change
        self._exchanges = depth == 1
        self._saved = [] if self._exchanges else [torch.empty_like(w) for w in self._weights()]

    def forward(self, staleness: int) -> AbstractContextManager[None]:
        """Return a context in which the predicted weights are in place."""
        return self._predicted(staleness) if staleness else nullcontext()

    @contextmanager
    def _predicted(self, staleness: int) -> Iterator[None]:
        # In place: autograd saves the memory of a weight, where the backward pass then finds the
        # newest weights. Through .data, its version counters do not change.
        self._check_newest("forward")
        weights = self._weights()
        if not self._exchanges:
            torch._foreach_copy_(self._saved, weights)
            torch._foreach_add_(weights, self._state, alpha=staleness)
        elif staleness == 1:
            if not self._is_added:
                torch._foreach_add_(self._state, weights)
                self._is_added = True
            _exchange(weights, self._state)
        else:
            remedy = "Make the correction for the largest staleness"
            raise PlanError("staleness", staleness, "it predicts one step", remedy)
        try:
            yield
        finally:
            if self._exchanges:
                _exchange(weights, self._state)
            else:
                torch._foreach_copy_(weights, self._saved)

    def discard_versions(self) -> None:
        """Hold the last change again, as after a step."""
        if self._is_added:
            torch._foreach_sub_(self._state, self._weights())
            self._is_added = False

    def state_dict(self) -> dict[str, Any]:
        """See `Correction.state_dict`."""
        self.discard_versions()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Correction.load_state_dict`; the newest weights are loaded already.

        Older versions may have saved predicted weights, or nothing before the first step.
        """
        if (predicted := state.get("predicted")) is not None:
            super().load_state_dict({self._state_key: predicted})
            torch._foreach_sub_(self._state, self._weights())
        elif self._state_key in state:
            super().load_state_dict(state)
        self._is_added = False

    def go_on_from(self, former: Correction) -> None:
        """See `Correction.go_on_from`."""
        former.discard_versions()
        super().go_on_from(former)

    def _before_step(self, weights: list[Tensor]) -> None:
        torch._foreach_copy_(self._state, weights)
        self._is_added = False

    def _after_step(self, weights: list[Tensor]) -> None:
        torch._foreach_sub_(self._state, weights)
        torch._foreach_neg_(self._state)

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor] | None:
        raise PlanError(
            "correction",
            self.mode,
            "its backward passes use the newest weights",
            "Make the plan without corrections of backward passes",
        )


def _point(parameters: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


_AT_ONCE = 2**20
"""Elements that are exchanged together: the copy of so many stays in a processor's cache."""


def _exchange(lefts: Iterable[Tensor], rights: Iterable[Tensor]) -> None:
    """Exchange the contents of tensors of equal shapes, part by part."""
    for left, right in zip(lefts, rights, strict=True):
        pair = [left, right]
        if same_layout(left, right):  # as they lie in memory
            pair = [t.as_strided((t.numel(),), (1,), t.storage_offset()) for t in pair]
        for mine, other in zip(*(tensor.split(_AT_ONCE) for tensor in pair), strict=True):
            held = mine.clone()
            mine.copy_(other)
            other.copy_(held)


def _unfilled(weight: Tensor) -> Tensor:
    """Return memory with a weight's layout, so that references to parts fit both."""
    size, stride = weight.size(), weight.stride()
    return torch.empty_strided(size, stride, dtype=weight.dtype, device=weight.device)
