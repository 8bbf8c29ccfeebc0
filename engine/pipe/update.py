# SPDX-License-Identifier: Apache-2.0
"""What a pipeline's step does beside passes and messages: see `Flush` and `PipeMare`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from wavemare.engine.pipe.micro_batch import MicroBatch
from wavemare.engine.same_batches import UNKNOWN
from wavemare.pipeline.plan.plan import Action, Kind

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine

Handlers = Mapping[Kind, Callable[[Action], None]]
"""What does each kind of action."""


class Update:
    """Reads the data, adds up losses, and steps the optimizer; the engine calls it in a step.

    Args:
        engine: Its DeepSpeed part is built; its messages are not yet.

    Attributes:
        activation_numbers: Length of an activation's header.
        in_each_activation: Whether every activation has that header, or only the first of a step.
        grad_numbers: Length of a gradient's header.
        trains_short_steps: Whether a step may have fewer micro-batches than the others.
        clips_alone: Whether it clips without DeepSpeed.
        feeds_back: Whether this stage's steps correct the ones before.
    """

    activation_numbers = 1 + len(UNKNOWN)  # whether the data has ended, and the batch's marks
    in_each_activation = trains_short_steps = clips_alone = feeds_back = False
    grad_numbers = 0

    def __init__(self, engine: PipelineEngine) -> None:
        self._engine = engine

    @property
    def handlers(self) -> Handlers:
        """What does the kinds of action that only its own plans have."""
        return {}

    @property
    def lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        return 0

    # --- a step -----------------------------------------------------------------------------------

    def train(self) -> None:
        """Train until this rank has made its next optimizer step.

        Raises:
            DataEndedError: The data had ended before the step; on all ranks.
        """
        raise NotImplementedError

    def next_batch(self, action: Action) -> Any:
        """Return the batch of a micro-batch; None if the data has ended before it."""
        raise NotImplementedError

    def forward_context(self, action: Action) -> AbstractContextManager[None] | None:
        """Return the context of a forward pass; None for none."""
        return None

    def note_forward(self, action: Action, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """See the result of a forward pass."""
        raise NotImplementedError

    def note_backward(self, action: Action, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """See the result of a backward pass."""

    def activation_header(self, action: Action, micro_batch: MicroBatch) -> list[Any]:
        """Return the numbers that go with an activation, the marks of its batch last."""
        raise NotImplementedError

    def read_activation_header(self, action: Action, header: list[float]) -> bool:
        """Take these numbers; return whether the data has ended."""
        raise NotImplementedError

    def grads_to_send(self, action: Action, grads: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Return the header and the tensors of a message of gradients."""
        raise NotImplementedError

    def grads_received(
        self, action: Action, header: list[float], grads: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of a message."""
        raise NotImplementedError

    def grads_expected(self, action: Action, outputs: list[Tensor]) -> list[Tensor]:
        """Return tensors of the shapes and types that the message of gradients will have."""
        return outputs

    def reduce(self, action: Action) -> None:
        """Average the gradients over the ranks that have the same weights."""
        raise NotImplementedError

    def step(self, action: Action) -> None:
        """Step the optimizer."""
        raise NotImplementedError

    def mean_loss(self) -> Tensor:
        """Return the step's mean loss over micro-batches and data ranks: scalar, fp32."""
        raise NotImplementedError

    # --- between steps ----------------------------------------------------------------------------

    def drain(self) -> None:
        """Empty the pipeline, where it is not empty between two steps."""

    def reset(self) -> None:
        """Discard what outlives a step: other weights have been loaded."""

    def sizes_changed(self) -> None:
        """Begin again with another number of micro-batches, or after a step that failed."""

    def metrics(self) -> dict[str, float]:
        """Return what was measured of the last step, by name."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return what the next step needs beside weights and optimizer."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`."""
