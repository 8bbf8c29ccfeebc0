# SPDX-License-Identifier: Apache-2.0
"""Forward passes with predicted weights: SpecTrain's and PipeOptim's answer to staleness."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from wavemare.errors import PlanError
from wavemare.pipeline.staleness.correction import Correction, check_shapes
from wavemare.pipeline.staleness.storage import size_bytes

__all__ = ["WeightPrediction"]


class WeightPrediction(Correction):
    """Forwards each micro-batch with the weights that are expected at its backward pass.

    A micro-batch whose backward pass comes ``s`` optimizer steps later sees ``w + s * (w - w_old)``
    forward and the newest weights backward, with ``w_old`` the version before the newest. The last
    change is what the optimizer itself would step by again: ``-lr * m / (sqrt(v) + eps)`` of
    AdamW, ``-lr * velocity`` of SGD, ``-lr`` times the orthogonalised momentum of Muon, with the
    weight decay. This is the prediction of PipeOptim (arXiv 2312.00839), and of
    SpecTrain for SGD, at the learning rate of the step before; and as it asks no optimizer for its
    state, it holds for all of them, and for states that ZeRO 1 has partitioned.

    It costs two copies of the weights, and two writes of them for each such forward pass.

    Args:
        parameters: See `Correction`.

    Raises:
        ModelError: Parameters share a part of their memory.
    """

    mode = "predict"

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters)
        self._changes = [torch.zeros_like(weight) for weight in self._weights()]
        self._saved = [torch.empty_like(weight) for weight in self._weights()]

    def forward(self, staleness: int) -> AbstractContextManager[None]:
        """Return a context in which the predicted weights are in place."""
        return self._predicted(staleness) if staleness and self._changes else nullcontext()

    @contextmanager
    def _predicted(self, staleness: int) -> Iterator[None]:
        # In place: what autograd keeps of a weight is its memory, in which the backward pass then
        # finds the newest weights. Through .data, its version counters see nothing of it.
        self._check_newest("forward")
        weights = self._weights()
        torch._foreach_copy_(self._saved, weights)
        torch._foreach_add_(weights, self._changes, alpha=staleness)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, self._saved)

    def forget(self) -> None:
        """Do nothing: the weights go on changing as they did."""

    def state_dict(self) -> dict[str, Any]:
        """Return the last changes."""
        return {"mode": self.mode, "changes": self._changes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the last changes.

        Raises:
            CheckpointError: It is of another mode or of other parameters.
        """
        self._check_mode(state)
        check_shapes(state["changes"], self._parameters)
        for change, loaded in zip(self._changes, state["changes"], strict=True):
            change.copy_(loaded)

    @property
    def memory_bytes(self) -> int:
        """The last changes, and the newest weights while predicted ones are in place."""
        return size_bytes(self._changes) + size_bytes(self._saved)

    def _differences(self, weights: list[Tensor]) -> list[Tensor]:
        return list(self._changes)

    def _before_step(self, weights: list[Tensor]) -> None:
        if weights:
            torch._foreach_copy_(self._changes, weights)

    def _after_step(self, weights: list[Tensor]) -> None:
        if weights:
            torch._foreach_sub_(self._changes, weights)
            torch._foreach_neg_(self._changes)

    def _former(self, weights: list[Tensor], staleness: int) -> list[Tensor] | None:
        raise PlanError(
            "correction",
            self.mode,
            "its backward passes use the newest weights",
            "Make the plan without corrections of backward passes",
        )
