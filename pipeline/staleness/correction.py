# SPDX-License-Identifier: Apache-2.0
"""Weights for the backward passes of stale micro-batches: copies, or PipeMare's estimate (T2).

A correction gives ``p.data`` another tensor for the time of a backward pass; nothing is copied for
it. By itself autograd would go on with the newest weights for some operators and take the others
for some, as it keeps a parameter itself for the ones and a view of its memory for the others. So
the forward pass of a micro-batch that will be stale keeps neither, but only which part of which
parameter it was (`Correction.forward`), and its backward pass looks there.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import CheckpointError, ModelError, PlanError
from wavemare.pipeline.staleness.storage import (
    References,
    distinct,
    resolve,
    same_layout,
    size_bytes,
)

__all__ = [
    "Correction",
    "EmaCorrection",
    "ExactCorrection",
    "NoCorrection",
    "check_shapes",
]


class Correction(ABC):
    """Gives the backward passes of one stage the weights that the forward passes used.

    Args:
        parameters: Of the stage. Frozen ones are left out; those that lie in the memory of another
            one follow it. Their ``.data`` is looked up at each call.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode: str

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        trainable = [p for p in parameters if p.requires_grad and p.numel()]
        self._parameters = distinct(trainable)
        apart = set(map(id, self._parameters))
        self._aliases = [p for p in trainable if id(p) not in apart]
        self._references = References(self._parameters)
        self._newest: list[Tensor] | None = None

    def before_step(self) -> None:
        """Note the newest weights just before an optimizer step changes them.

        Raises:
            PlanError: The weights are corrected ones.
        """
        self._check_newest("step")
        self._before_step(self._weights())

    def after_step(self) -> None:
        """Note the weights that an optimizer step made."""
        self._after_step(self._weights())

    def forward(self, staleness: int) -> AbstractContextManager[None]:
        """Return a context for a forward pass.

        Args:
            staleness: Optimizer steps until the micro-batch's backward pass.
        """
        return self._references.kept() if staleness else nullcontext()

    def correct(self, staleness: int) -> None:
        """Put the weights of some versions ago, or their estimate, in place of the newest.

        Args:
            staleness: Optimizer steps since the forward pass; nothing is done at 0.

        Raises:
            PlanError: The weights are corrected already, or those asked for are not held.
            ModelError: A parameter was given another memory format.
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
        """Put the newest weights back; nothing is done if they are in place."""
        if self._newest is not None:
            _point([*self._parameters, *self._aliases], self._newest)
            self._newest = None

    @abstractmethod
    def forget(self) -> None:
        """Note that the pipeline is empty: no backward pass needs versions up to now."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` needs; the tensors are not copied."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            CheckpointError: It is of another mode or of other parameters.
        """

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """Memory held beside the weights."""

    @property
    def copies(self) -> float:
        """Memory held beside the weights, in units of the weights."""
        return self.memory_bytes / max(1, size_bytes(self._parameters))

    def update_gap(self) -> float:
        """Return ``||w_newest - w_oldest|| / ||w_newest||`` for the oldest version in use.

        The estimate's own, where older weights are not held; nan where nothing is known of them.
        """
        self._check_newest("measure")
        weights = self._weights()
        differences = self._differences(weights)
        if not differences:
            return math.nan
        return _norm(differences) / max(_norm(weights), sys.float_info.min)

    @abstractmethod
    def _differences(self, weights: list[Tensor]) -> list[Tensor]: ...

    @abstractmethod
    def _before_step(self, weights: list[Tensor]) -> None: ...

    @abstractmethod
    def _after_step(self, weights: list[Tensor]) -> None: ...

    @abstractmethod
    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor] | None: ...

    def _weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self._parameters]

    def _check_newest(self, what: str) -> None:
        if self._newest is not None:
            reason = "corrected weights are in place"
            raise PlanError("correction", what, reason, "Restore the newest weights first")

    def _check_mode(self, state: Mapping[str, Any]) -> None:
        if state.get("mode") != self.mode:
            reason = f"the state is not of this correction, {self.mode!r}"
            remedy = f"Set the correction to {state.get('mode')!r}"
            raise CheckpointError("correction", state.get("mode"), reason, remedy)


class NoCorrection(Correction):
    """Backward passes use the newest weights, whatever their forward passes used."""

    mode = "off"

    def forward(self, staleness: int) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def forget(self) -> None:
        """Do nothing: nothing is held."""

    def state_dict(self) -> dict[str, Any]:
        """Return the mode alone."""
        return {"mode": self.mode}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check the mode.

        Raises:
            CheckpointError: It is of another mode.
        """
        self._check_mode(state)

    @property
    def memory_bytes(self) -> int:
        """0."""
        return 0

    def _differences(self, weights: list[Tensor]) -> list[Tensor]:
        return []

    def _before_step(self, weights: list[Tensor]) -> None:
        pass

    def _after_step(self, weights: list[Tensor]) -> None:
        pass

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor] | None:
        return None


class ExactCorrection(Correction):
    """Holds the versions before the newest, so that backward passes use those of the forward pass.

    Args:
        parameters: See `Correction`.
        depth: How many versions are held: the largest staleness.

    Raises:
        PlanError: The depth is below 1.
        ModelError: Parameters share a part of their memory.
    """

    mode = "exact"

    def __init__(self, parameters: Iterable[Tensor], depth: int) -> None:
        if depth < 1:
            reason = "an exact correction holds at least one older version"
            raise PlanError("depth", depth, reason, "Give 1 or more")
        super().__init__(parameters)
        self._ring = [[_unfilled(w) for w in self._weights()] for _ in range(depth)]
        self._latest = 0
        self._held = 0

    def forget(self) -> None:
        """Drop all older versions."""
        self._held = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the held versions, the newest first; none after `forget`."""
        self._check_newest("save")
        versions = [self._ring[self._slot(age)] for age in range(1, self._held + 1)]
        return {"mode": self.mode, "versions": versions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the newest versions of a state, as many as are held here.

        Raises:
            CheckpointError: It is of another mode or of other parameters.
        """
        self._check_mode(state)
        self._check_newest("load")
        versions = state["versions"][: len(self._ring)]
        for version in versions:
            check_shapes(version, self._parameters)
        self._held = 0
        for version in reversed(versions):
            self._before_step(version)

    @property
    def memory_bytes(self) -> int:
        """As many times the weights' as there are versions."""
        return sum(map(size_bytes, self._ring))

    def _differences(self, weights: list[Tensor]) -> list[Tensor]:
        if not self._held or not weights:
            return []
        return list(torch._foreach_sub(weights, self._ring[self._slot(self._held)]))

    def _slot(self, age: int) -> int:
        return (self._latest - age + 1) % len(self._ring)

    def _before_step(self, weights: list[Tensor]) -> None:
        self._latest = (self._latest + 1) % len(self._ring)
        self._held = min(self._held + 1, len(self._ring))
        if weights:
            torch._foreach_copy_(self._ring[self._latest], weights)

    def _after_step(self, weights: list[Tensor]) -> None:
        pass

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor]:
        if not 0 < staleness <= self._held:
            reason = f"the {self._held} newest of the older versions are held"
            remedy = f"Give at most that, and a depth (now {len(self._ring)}) that is large enough"
            raise PlanError("staleness", staleness, reason, remedy)
        return self._ring[self._slot(staleness)]


class EmaCorrection(Correction):
    """Estimates the forward pass's weights from a moving average of the weight changes (T2).

    After each step ``delta <- decay * delta + (1 - decay) * (w_new - w_old)``, and the estimate for
    a micro-batch is ``w - staleness * delta``, computed in fp32 at least and rounded once. As the
    changes are those that took place, any optimizer will do.

    Args:
        parameters: See `Correction`.
        decay: Of the moving average, from 0 to below 1.
        depth: The largest staleness, for `update_gap`.

    Raises:
        PlanError: The decay is out of range.
        ModelError: Parameters share a part of their memory.
    """

    mode = "ema"

    def __init__(self, parameters: Iterable[Tensor], decay: float, depth: int = 1) -> None:
        if not 0 <= decay < 1:
            reason = "a moving average needs a decay from 0 to below 1"
            raise PlanError("decay", decay, reason, "Leave it to the staleness of the stage")
        super().__init__(parameters)
        self._decay = decay
        self._depth = depth
        self._estimate = [_unfilled(w) for w in self._weights()]
        self._deltas = [
            torch.zeros_like(w, dtype=torch.promote_types(w.dtype, torch.float32))
            for w in self._weights()
        ]

    def forget(self) -> None:
        """Do nothing: the weights go on changing as they did."""

    def state_dict(self) -> dict[str, Any]:
        """Return the moving averages."""
        return {"mode": self.mode, "deltas": self._deltas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the moving averages; they may have had another decay.

        Raises:
            CheckpointError: It is of another mode or of other parameters.
        """
        self._check_mode(state)
        check_shapes(state["deltas"], self._parameters)
        for delta, loaded in zip(self._deltas, state["deltas"], strict=True):
            delta.copy_(loaded)

    @property
    def memory_bytes(self) -> int:
        """The moving averages and the estimate."""
        return size_bytes(self._deltas) + size_bytes(self._estimate)

    def _differences(self, weights: list[Tensor]) -> list[Tensor]:
        return list(torch._foreach_mul(self._deltas, self._depth)) if weights else []

    def _before_step(self, weights: list[Tensor]) -> None:
        # No estimate is in place during a step, so its memory is free.
        if weights:
            torch._foreach_copy_(self._estimate, weights)

    def _after_step(self, weights: list[Tensor]) -> None:
        # The change goes first: added in two halves, weights would round it away.
        if weights:
            torch._foreach_sub_(self._estimate, weights)
            torch._foreach_mul_(self._deltas, self._decay)
            torch._foreach_add_(self._deltas, self._estimate, alpha=self._decay - 1.0)

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor]:
        if weights:
            # An addition to half precision is done in the wider of the two types.
            torch._foreach_copy_(self._estimate, weights)
            torch._foreach_add_(self._estimate, self._deltas, alpha=-staleness)
        return self._estimate


def _point(parameters: Iterable[Tensor], tensors: Iterable[Tensor]) -> None:
    for parameter, tensor in zip(parameters, tensors, strict=True):
        parameter.data = tensor


def _unfilled(weight: Tensor) -> Tensor:
    """Return memory of a weight's layout: references to parts of the one must fit the other."""
    size, stride = weight.size(), weight.stride()
    return torch.empty_strided(size, stride, dtype=weight.dtype, device=weight.device)


def _norm(tensors: Sequence[Tensor]) -> float:
    norms = torch._foreach_norm([tensor.detach() for tensor in tensors])
    return float(torch.stack([norm.float() for norm in norms]).norm())


def check_shapes(loaded: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
    """Check that tensors of a state are those of a stage's parameters.

    Raises:
        CheckpointError: Their number or shapes differ.
    """
    got = [tuple(tensor.shape) for tensor in loaded]
    if got != [tuple(parameter.shape) for parameter in parameters]:
        reason = f"the state is of other parameters than the stage's {len(parameters)}"
        remedy = "Resume with the stages that the checkpoint was saved with"
        raise CheckpointError("correction", f"{len(got)} tensors", reason, remedy)
