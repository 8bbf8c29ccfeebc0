# SPDX-License-Identifier: Apache-2.0
"""The weight versions of two waves, of which one is updated while the other computes."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from wavemare.errors import ConfigError
from wavemare.pipeline.staleness.correction import WeightStashing
from wavemare.pipeline.staleness.storage import References


class Versions(ABC):
    """Lets a micro-batch go backward with the weights of its forward pass after an update.

    Args:
        parameters: Those that are trained.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Return the context for a forward pass whose backward pass may come after `advance`."""

    @abstractmethod
    def advance(self, step: int, *, updates: bool) -> None:
        """Put the weights of an optimizer step in place, just before those are updated.

        Args:
            step: Counted from 0.
            updates: Whether an update follows.
        """

    @abstractmethod
    def former(self) -> AbstractContextManager[Any]:
        """Return the context in which the weights from before `advance` are in place."""

    @abstractmethod
    def smooth(self) -> None:
        """Turn the gradients of a step into the gradients of its update."""

    @abstractmethod
    def begin(self) -> None:
        """Start from the weights and optimizer state in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state besides the weights while no micro-batch is in flight."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state of `state_dict`."""
        assert not state, "only replicas keep one"


class DelayedVersions(Versions):
    """One copy of the weights from before the last update: PipeDream-2BW at depth one."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self._correction = WeightStashing(parameters, 1)
        self._changed = False

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which autograd keeps references to weights."""
        return self._correction.forward(1)

    def advance(self, step: int, *, updates: bool) -> None:
        """Copy the weights, if they are going to change."""
        self._changed = updates
        if updates:
            self._correction.before_step()

    @contextmanager
    def former(self) -> Iterator[None]:
        """Put the copy in place."""
        self._correction.correct(int(self._changed))
        try:
            yield
        finally:
            self._correction.restore()

    def smooth(self) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing: the copy is made before each update."""


class Replicas(Versions):
    """Two replicas of weights and momentum, updated in turns (Wavelet, MLSys 2021, figure 9).

    The gradient of step n goes to replica ``n % 2``, as the mean of its own and that of step
    ``n - 1``. With a step that is linear in the gradients the replicas stay half a step apart.

    Args:
        parameters: Those that are trained; they are replica 0 at first.
        optimizer: Of the parameters; linear in the gradients.

    Raises:
        ConfigError: It is another one than torch's SGD.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        super().__init__(parameters)
        if not isinstance(optimizer, torch.optim.SGD):
            raise ConfigError(
                "wavemare.wavelet.mode",
                "replica",
                f"a step of {type(optimizer).__name__} is not linear in the gradients, so that the "
                "replicas would drift apart",
                'Use SGD, with or without momentum, or mode "async"',
            )
        self._optimizer = optimizer
        self._references = References(parameters)
        self._weights = [
            [p.data for p in self.parameters],
            [p.data.clone() for p in self.parameters],
        ]
        self._momentum: list[dict[nn.Parameter, Any]] = [{}, {}]
        self._current = 0
        self._last: list[Tensor] | None = None

    def forward(self) -> AbstractContextManager[Any]:
        """Return the context in which autograd keeps references to weights."""
        return self._references.kept()

    def advance(self, step: int, *, updates: bool) -> None:
        """Put the step's replica in place, with its momentum."""
        if step % 2 != self._current:
            state = self._optimizer.state
            self._momentum[self._current] = {p: state.pop(p) for p in self.parameters if p in state}
            self._current = step % 2
            for parameter, held in self._momentum[self._current].items():
                state[parameter] = held
            self._point(self._current)

    @contextmanager
    def former(self) -> Iterator[None]:
        """Put the other replica in place."""
        self._point(1 - self._current)
        try:
            yield
        finally:
            self._point(self._current)

    @torch.no_grad()
    def smooth(self) -> None:
        """Average this step's gradient with that of the step before."""
        fresh = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        last = fresh if self._last is None else self._last
        for parameter, new, old in zip(self.parameters, fresh, last, strict=True):
            parameter.grad = (new + old) / 2
        self._last = fresh

    @torch.no_grad()
    def begin(self) -> None:
        """Copy weights and momentum in place to the other replica."""
        own, other = self._current, 1 - self._current
        for weights, p in zip(self._weights[other], self.parameters, strict=True):
            weights.copy_(p)
        self._weights[own] = [p.data for p in self.parameters]
        self._momentum[other] = {
            p: copy.deepcopy(dict(self._optimizer.state[p]))
            for p in self.parameters
            if p in self._optimizer.state
        }
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the other replica, its momentum, and this rank's last gradient."""
        other = 1 - self._current
        momentum = self._momentum[other]
        return {
            "current": self._current,
            "other": self._weights[other],
            "momentum": [momentum.get(p, {}) for p in self.parameters],
            "last": self._last,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; the weights in place are the saved current replica."""
        self._current = state["current"]
        self._weights[self._current] = [p.data for p in self.parameters]
        other = 1 - self._current
        self._weights[other] = [
            value.to(p.device) for p, value in zip(self.parameters, state["other"], strict=True)
        ]
        self._momentum[other] = {
            p: {k: v.to(p.device) if isinstance(v, Tensor) else v for k, v in held.items()}
            for p, held in zip(self.parameters, state["momentum"], strict=True)
            if held
        }
        last = state["last"]
        if last is not None:
            last = [value.to(p.device) for p, value in zip(self.parameters, last, strict=True)]
        self._last = last

    def _point(self, replica: int) -> None:
        for parameter, weight in zip(self.parameters, self._weights[replica], strict=True):
            parameter.data = weight
