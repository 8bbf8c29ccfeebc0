# SPDX-License-Identifier: Apache-2.0
"""What an engine asks of its features.

Engines subclass DeepSpeed's and keep a list of `Feature` objects: the guard, the sparse collective,
weights of losses. They call each method of all features at fixed points of a step, in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Feature:
    """What an engine does beside DeepSpeed's work. A subclass overrides the methods it needs.

    Attributes:
        key: Name of its state in checkpoints; empty if it has none.
    """

    key = ""

    def join(self) -> int:
        """Be ready for a step; return how many samples the data are to leave out."""
        return 0

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """See what the whole model gets in a forward pass of training."""

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return the loss that the backward pass begins with; scalar."""
        return loss

    def before_step(self) -> bool:
        """Return whether the optimizer may step; all ranks get the same answer."""
        return True

    def after_step(self) -> None:
        """See the weights that an optimizer step has left; ``global_steps`` counts it."""

    def synchronize(self) -> None:
        """Bring the weights of all ranks to the same bits; all ranks call it."""

    @property
    def is_common(self) -> bool:
        """Whether the weights of all ranks are as `synchronize` leaves them."""
        return True

    def metrics(self) -> Mapping[str, float]:
        """Return what was measured of the last optimizer step, by name."""
        return {}

    def extra_state(self) -> dict[str, Any]:
        """Return what the next step needs beside weights, optimizer and random state."""
        return {}

    def load_extra_state(self, state: Mapping[str, Any] | None) -> None:
        """Load a state of `extra_state`; None if the checkpoint has none for this rank."""

    def reset(self) -> None:
        """Discard what belongs to the weights before a load."""

    def close(self) -> None:
        """Release resources."""
