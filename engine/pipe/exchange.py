# SPDX-License-Identifier: Apache-2.0
"""What a stage exchanges with its neighbours, in the order of its plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from wavemare.engine.pipe.channels import Channels
from wavemare.engine.pipe.messages import (
    DESCRIPTION,
    Inbox,
    Layout,
    Outbox,
    read_header,
    write_message,
)
from wavemare.errors import ModelError
from wavemare.pipeline.plan.action import Action, Kind

__all__ = ["Exchange"]

_Box = TypeVar("_Box", Inbox, Outbox)
_DOWN = (Kind.RECV_ACTIVATION, Kind.RECV_TOTAL)
_UP = (Kind.RECV_GRAD, Kind.RECV_NORM)


class Exchange:
    """Activations, gradients and numbers of one stage, as flat messages received ahead.

    The first activation tells its layout in a message before it, and so does each one with
    ``dynamic``, which then cannot be received ahead.

    Args:
        channels: To the neighbours.
        down_header: Numbers that travel with an activation.
        up_header: Numbers that travel with a gradient.
        dynamic: Whether micro-batches differ in shape.
    """

    def __init__(
        self,
        channels: Channels,
        *,
        down_header: int,
        up_header: int,
        dynamic: bool,
    ) -> None:
        self._channels = channels
        self._down_header = down_header
        self._up_header = up_header
        self._number = Layout(1)
        self._dynamic = dynamic
        self._down: deque[Action] = deque()
        self._up: deque[Action] = deque()
        self._sent: Layout | None = None
        self._received: Layout | None = None
        self._grads: dict[int, Layout] = {}
        self._beyond = 0

    def begin(self, window: Sequence[Action], beyond: int) -> None:
        """Take note of what will be received, and post the first receives.

        Args:
            window: What this stage does next.
            beyond: How many activations more will be on their way to it at the end.
        """
        down = [action for action in window if action.kind in _DOWN]
        down += [Action(Kind.RECV_ACTIVATION, 0, 0)] * beyond
        # The first of these have been noted before, as being on their way beyond the last window.
        self._down.extend(down[self._beyond :])
        self._up.extend(action for action in window if action.kind in _UP)
        self._beyond = beyond
        self.post_ahead()

    def discard(self, device: torch.device) -> None:
        """Receive the activations that are on their way beyond the last window; drop them."""
        for _ in range(self._beyond):
            self.receive_activation(device)
        self._beyond = 0
        self._grads.clear()

    def post_ahead(self) -> None:
        """Post the receives of the next messages, as far as their size is known."""
        slots = self._channels.slots
        _post(self._channels.from_previous, self._down, self._down_size, slots)
        _post(self._channels.from_next, self._up, self._up_size, slots)

    def _down_size(self, action: Action) -> int | None:
        if action.kind is Kind.RECV_TOTAL:
            return self._number.size
        return self._received.size if self._received is not None else None

    def _up_size(self, action: Action) -> int | None:
        if action.kind is Kind.RECV_NORM:
            return self._number.size
        layout = self._grads.get(action.micro_batch)
        return layout.size if layout is not None else None

    def send_activation(
        self, header: Sequence[float], outputs: Tensor | tuple[Tensor, ...]
    ) -> None:
        """Send a micro-batch's outputs to the next stage; an empty tuple when the data ended."""
        outbox = _there(self._channels.to_next)
        tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        layout = Layout.of(self._down_header, outputs) if tensors or not self._sent else self._sent
        if self._dynamic or self._sent is None:
            self._write(outbox, DESCRIPTION, layout.describe(), [])
        if tensors and not self._dynamic:
            if self._sent not in (None, layout):
                raise ModelError(
                    "activations",
                    layout.shapes,
                    f"the micro-batches before had the shapes {self._sent.shapes}, and the next "
                    "stage expects them again",
                    'Set "dynamic_shape": true in wavemare.pipeline',
                )
            self._sent = layout
        self._write(outbox, layout, header, tensors)

    def receive_activation(
        self, device: torch.device
    ) -> tuple[list[float], Tensor | tuple[Tensor, ...]]:
        """Return the header and the tensors of the next activation; the tensors are leaves.

        Args:
            device: Where the tensors are put.
        """
        inbox = _there(self._channels.from_previous)
        layout = self._received
        if layout is None:
            layout = self._receive_description(inbox)
        message = inbox.take()
        if layout.shapes and not self._dynamic:
            self._received = layout
        self.post_ahead()
        tensors = tuple(
            tensor.to(device).detach().requires_grad_(tensor.is_floating_point())
            for tensor in layout.tensors(message)
        )
        header = read_header(layout, message)
        return header, tensors[0] if layout.single else tensors

    def _receive_description(self, inbox: Inbox) -> Layout:
        inbox.post(DESCRIPTION.size)
        description = read_header(DESCRIPTION, inbox.take())
        layout = Layout.described(description, self._down_header)
        inbox.post(layout.size)
        self._down.popleft()
        return layout

    def expect_grad(self, micro_batch: int, outputs: Sequence[Tensor]) -> None:
        """Take note of what a micro-batch's gradient will look like: as these outputs."""
        self._grads[micro_batch] = Layout.of(self._up_header, tuple(outputs))
        self.post_ahead()

    def send_grad(self, header: Sequence[float], grads: Sequence[Tensor]) -> None:
        """Send the gradients of a micro-batch's inputs to the stage before."""
        layout = Layout.of(self._up_header, tuple(grads))
        self._write(_there(self._channels.to_previous), layout, header, grads)

    def receive_grad(
        self, micro_batch: int, device: torch.device
    ) -> tuple[list[float], list[Tensor]]:
        """Return the header and the gradients of a micro-batch's outputs."""
        self.post_ahead()
        layout = self._grads.pop(micro_batch)
        message = _there(self._channels.from_next).take()
        self.post_ahead()
        tensors = [tensor.to(device) for tensor in layout.tensors(message)]
        return read_header(layout, message), tensors

    def send_number(self, kind: Kind, number: float) -> None:
        """Send a norm: `SEND_NORM` to the stage before, `SEND_TOTAL` to the next."""
        to_next = kind is Kind.SEND_TOTAL
        outbox = self._channels.to_next if to_next else self._channels.to_previous
        self._write(_there(outbox), self._number, [number], [])

    def receive_number(self, kind: Kind) -> float:
        """Receive a norm: `RECV_NORM` from the next stage, `RECV_TOTAL` from the one before."""
        from_next = kind is Kind.RECV_NORM
        self.post_ahead()
        inbox = self._channels.from_next if from_next else self._channels.from_previous
        message = _there(inbox).take()
        self.post_ahead()
        return read_header(self._number, message)[0]

    def _write(
        self, outbox: Outbox, layout: Layout, header: Sequence[float], tensors: Sequence[Tensor]
    ) -> None:
        outbox.send(write_message(layout, header, tensors, self._channels.device))

    def forget_shapes(self) -> None:
        """Tell the next activation's layout anew; nothing may be under way."""
        self._sent = self._received = None


def _post(
    inbox: Inbox | None,
    queue: deque[Action],
    size_of: Callable[[Action], int | None],
    slots: int,
) -> None:
    while inbox is not None and queue and inbox.posted < slots:
        size = size_of(queue[0])
        if size is None:
            return
        inbox.post(size)
        queue.popleft()


def _there(neighbour: _Box | None) -> _Box:
    assert neighbour is not None  # the plan has no message beyond the first and last stage
    return neighbour
