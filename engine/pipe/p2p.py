# SPDX-License-Identifier: Apache-2.0
"""Messages between neighbouring stages, received ahead and sent without waiting.

A message is one flat buffer: a header of numbers followed by tensors. The header carries all other
information between stages (the loss, gradient norms, the end of the data), so that no rank waits
for anything but activations and gradients.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, distributed

from wavemare.engine.pipe.micro_batch import Tensors
from wavemare.errors import CommError, ModelError
from wavemare.pipeline.plan.plan import SENDS, Action, Kind, Plan

_ALIGNMENT = 64  # bytes; a view of another type must begin at a multiple of its size
_NUMBER = 8  # bytes of a float64
_EXIT_S = 60.0  # for pending sends when the process ends
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_FROM_PREVIOUS = (Kind.RECV_ACTIVATION, Kind.RECV_TOTAL)
_FROM_NEXT = (Kind.RECV_GRAD, Kind.RECV_NORM)


@dataclass(frozen=True)
class MessageLayout:
    """The content of a message.

    Args:
        numbers: Length of the header, in float64.
        shapes: Shape of each tensor.
        dtypes: Type of each tensor.
        single: Whether the sender had one bare tensor rather than a tuple.
    """

    numbers: int
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    single: bool = False

    @classmethod
    def of(cls, numbers: int, tensors: Tensor | Sequence[Tensor]) -> MessageLayout:
        """Describe a header and tensors."""
        single = isinstance(tensors, Tensor)
        listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in listed)
        return cls(numbers, shapes, tuple(tensor.dtype for tensor in listed), single)

    @cached_property
    def offsets(self) -> list[int]:
        """Where each tensor begins, then the message's length; in bytes."""
        offsets = [_aligned(self.numbers * _NUMBER)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            offsets.append(offsets[-1] + _aligned(torch.Size(shape).numel() * dtype.itemsize))
        return offsets

    @property
    def size(self) -> int:
        """Length of the message in bytes."""
        return self.offsets[-1]

    def pack(
        self, header: Sequence[float | Tensor], tensors: Sequence[Tensor], device: torch.device
    ) -> Tensor:
        """Return a message, (bytes,) uint8 on ``device``; missing tensors leave their space.

        The host does not wait for numbers that are scalars on the device.
        """
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        known = [0.0 if isinstance(number, Tensor) else number for number in header]
        numbers = message[: len(known) * _NUMBER].view(torch.float64)
        numbers.copy_(torch.tensor(known, dtype=torch.float64), non_blocking=True)
        for place, number in enumerate(header):
            if isinstance(number, Tensor):
                numbers[place] = number
        for space, tensor in zip(self.tensors(message), tensors, strict=False):
            space.copy_(tensor)
        return message

    def header(self, message: Tensor) -> list[float]:
        """Return the numbers of a message."""
        numbers: list[float] = message[: self.numbers * _NUMBER].view(torch.float64).tolist()
        return numbers

    def tensors(self, message: Tensor) -> list[Tensor]:
        """Return the tensors of a message, as views of it."""
        views = []
        for start, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=False):
            length = torch.Size(shape).numel() * dtype.itemsize
            views.append(message[start : start + length].view(dtype).view(shape))
        return views

    def describe(self) -> list[float]:
        """Return the layout as numbers, for a message of its own; see `DESCRIPTION`.

        Raises:
            ModelError: There are more tensors or dimensions than such a message holds.
        """
        numbers: list[float] = [len(self.shapes), float(self.single)]
        for shape, dtype in zip(self.shapes, self.dtypes, strict=True):
            if dtype not in _DTYPES:
                reason = "stages cannot send each other this type"
                raise ModelError("activations", dtype, reason, "Cast it")
            numbers += [_DTYPES.index(dtype), len(shape), *shape]
        if len(numbers) > DESCRIPTION.numbers:
            reason = f"their shapes take {len(numbers)} numbers to describe"
            remedy = f"Send fewer tensors; there is room for {DESCRIPTION.numbers} numbers"
            raise ModelError("activations", self.shapes, reason, remedy)
        return numbers

    @classmethod
    def described(cls, description: Sequence[float], numbers: int) -> MessageLayout:
        """Return the layout that `describe` turned into numbers."""
        values = iter(int(number) for number in description)
        count, single = next(values), bool(next(values))
        shapes, dtypes = [], []
        for _ in range(count):
            dtypes.append(_DTYPES[next(values)])
            shapes.append(tuple(next(values) for _ in range(next(values))))
        return cls(numbers, tuple(shapes), tuple(dtypes), single)


DESCRIPTION = MessageLayout(256)
"""MessageLayout of the message that describes another message's layout."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


_pending: list[deque[tuple[Tensor, Any, bool]]] = []
"""The pending sends of every queue of this process. gloo drops a message whose sender no longer
holds it, and the receiver would wait for it forever."""


@atexit.register
def _flush_at_exit() -> None:
    """Give slow receivers the time to take what was sent, unless they have gone."""
    until = time.monotonic() + _EXIT_S
    for sends in _pending:
        with contextlib.suppress(RuntimeError):  # the receiver has gone, or does not take it
            for _, work, _ in sends:
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


class SendQueue:
    """Sends to one rank without waiting.

    Pending sends complete even after the queue is garbage-collected, or while the interpreter
    exits, which waits up to a minute for them.

    Args:
        rank: The receiver's global rank.
        group: A group of the two ranks, for this direction alone.
        slots: How many messages may be pending; a further one waits for the oldest.
    """

    def __init__(self, rank: int, group: Any, slots: int) -> None:
        self._rank = rank
        self._group = group
        self.slots = slots
        self._sends: deque[tuple[Tensor, Any, bool]] = deque()
        _pending.append(self._sends)

    def send(self, message: Tensor, *, extra: bool = False) -> None:
        """Send a message; nobody may change it afterwards. An extra one takes no slot."""
        while not extra and sum(not each for *_, each in self._sends) >= self.slots:
            self._sends.popleft()[1].wait()
        work = distributed.isend(message, self._rank, group=self._group)
        self._sends.append((message, work, extra))

    def flush(self) -> None:
        """Wait until all messages are sent."""
        while self._sends:
            self._sends.popleft()[1].wait()


class RecvQueue:
    """Receives from one rank, on the CPU with the next receives posted before they are needed.

    On a GPU a receive is posted when it is taken. The host does not wait there, and goes on; but
    while a posted receive waits for its sender, allocating memory or loading a kernel may wait for
    it, and two stages for each other.

    Args:
        rank: The sender's global rank.
        group: A group of the two ranks, for this direction alone.
        device: Where messages are put.

    Attributes:
        expected: Receives of the plan that are not posted yet.
    """

    def __init__(self, rank: int, group: Any, device: torch.device) -> None:
        self._rank = rank
        self._group = group
        self._device = device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._posted: deque[tuple[Tensor, Any]] = deque()
        self.expected: deque[Action] = deque()

    @property
    def posted(self) -> int:
        """How many receives are posted."""
        return len(self._posted)

    def expect(self, actions: Sequence[Action]) -> None:
        """Note the next receives of the plan, of which the first may be posted already."""
        self.expected = deque(actions[self.posted :])

    def may_post(self, slots: int, *, now: bool) -> bool:
        """Return whether to post the next expected receive; ``now``: it is about to be taken."""
        limit = slots if self._beside is None else int(now)
        return bool(self.expected) and self.posted < limit

    def post_expected(
        self, size_of: Callable[[Action], int | None], slots: int, *, now: bool = False
    ) -> None:
        """Post the next expected receives, up to ``slots`` or the first of unknown size."""
        while self.may_post(slots, now=now):
            size = size_of(self.expected[0])
            if size is None:
                return
            self.post(size)
            self.expected.popleft()

    def post(self, size: int) -> None:
        """Post the receive of a further message of ``size`` bytes."""
        message = torch.empty(size, dtype=torch.uint8, device=self._device)
        work = distributed.irecv(message, self._rank, group=self._group)
        self._posted.append((message, work))

    def take(self, layout: MessageLayout) -> tuple[list[float], Tensor]:
        """Wait for the message whose receive was posted first; return its header and all of it.

        Where it has a header, a GPU's host waits for the message, but for no pass queued before.
        """
        message, work = self._posted.popleft()
        if self._beside is None or not layout.numbers:
            work.wait()
            return layout.header(message), message
        with torch.cuda.stream(self._beside):
            work.wait()
            header = layout.header(message)
        work.wait()
        return header, message


class PeerLink:
    """The messages of one stage with its neighbours, in the order of its plan.

    All ranks make theirs together. Each direction between two stages has its own group, and so its
    own communicator: in one NCCL communicator a receive posted ahead would hold up later sends.
    NCCL splits its communicator by all ranks, so every rank makes every group. Over gloo a rank
    outside of a group does not touch the store for it (1,024 ranks, 16 stages: 1,920 groups in
    0.05 s).

    A message before the first activation describes its layout. With ``dynamic`` one comes before
    each activation, which then cannot be received ahead.

    Args:
        grid: DeepSpeed's grid of the pipeline.
        device: The stage's device. Messages over gloo, which takes nothing else, are on the CPU.
        slots: Messages that may be pending in one direction.
        activation_numbers: Length of an activation's header.
        grad_numbers: Length of a gradient's header.
        dynamic: Whether micro-batches differ in shape.
    """

    def __init__(
        self,
        grid: Any,
        device: torch.device,
        slots: int,
        *,
        activation_numbers: int = 0,
        grad_numbers: int = 0,
        dynamic: bool = False,
    ) -> None:
        self._stage_device = device
        self._device = torch.device("cpu") if distributed.get_backend() == "gloo" else device
        self._slots = slots
        self._activation_numbers = activation_numbers
        self._grad_numbers = grad_numbers
        self._number = MessageLayout(1)
        self._dynamic = dynamic
        self._sent: MessageLayout | None = None
        self._received: MessageLayout | None = None
        self._grads: dict[int, MessageLayout] = {}
        self._beyond = 0
        # The first stage has no previous one and the last no next one; their plans know it.
        self._from_previous = self._from_next = RecvQueue(-1, None, self._device)
        self._to_previous = self._to_next = SendQueue(-1, None, slots)
        me = dist.get_rank()
        for before, after in (pair for ranks in grid.pipe_groups for pair in pairwise(ranks)):
            down, up = dist.new_group([before, after]), dist.new_group([before, after])
            if me == before:
                self._to_next = SendQueue(after, down, slots)
                self._from_next = RecvQueue(after, up, self._device)
            elif me == after:
                self._from_previous = RecvQueue(before, down, self._device)
                self._to_previous = SendQueue(before, up, slots)

    def begin(self, actions: Sequence[Action], beyond: int = 0) -> None:
        """Note the receives of a step, and post the first of them.

        Args:
            actions: The stage's step.
            beyond: Activations that are still in flight to this stage when the step ends.
        """
        expected = [action for action in actions if action.kind in _FROM_PREVIOUS]
        expected += [Action(Kind.RECV_ACTIVATION, 0, 0)] * beyond
        # Some are posted: of activations in flight, or where a step failed at its first load.
        self._from_previous.expect(expected)
        self._from_next.expect([action for action in actions if action.kind in _FROM_NEXT])
        self._beyond = beyond
        self._post()

    def discard(self) -> None:
        """Receive and drop the activations beyond the last step, and send all that is pending."""
        for _ in range(self._beyond):
            self.receive_activation()
        self._beyond = 0
        self._grads.clear()
        self.flush()

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._to_next.flush()
        self._to_previous.flush()

    def reset_shapes(self) -> None:
        """Describe the next activation's layout again; nothing may be pending."""
        self._sent = self._received = None

    def _post(self, now: RecvQueue | None = None) -> None:
        before, after = self._from_previous, self._from_next
        before.post_expected(self._size_from_previous, self._slots, now=now is before)
        after.post_expected(self._size_from_next, self._slots, now=now is after)

    def _size_from_previous(self, action: Action) -> int | None:
        layout = self._number if action.kind is Kind.RECV_TOTAL else self._received
        return layout.size if layout is not None else None

    def _size_from_next(self, action: Action) -> int | None:
        if action.kind is Kind.RECV_NORM:
            return self._number.size
        layout = self._grads.get(action.micro_batch)
        return layout.size if layout is not None else None

    def send_activation(self, outputs: Tensors, header: Sequence[float | Tensor] = ()) -> None:
        """Send a micro-batch's outputs to the next stage; an empty tuple when the data ended."""
        tensors = [outputs] if isinstance(outputs, Tensor) else list(outputs)
        layout = self._sent
        if tensors or layout is None:
            layout = MessageLayout.of(self._activation_numbers, outputs)
        if self._dynamic or self._sent is None:
            self._to_next.send(DESCRIPTION.pack(layout.describe(), [], self._device))
        if tensors and not self._dynamic:
            if self._sent is not None and self._sent != layout:
                raise _other_shapes(layout, self._sent)
            self._sent = layout
        self._to_next.send(layout.pack(header, tensors, self._device))

    def receive_activation(self) -> tuple[list[float], Tensors]:
        """Return the next activation's header and its tensors, which are leaves."""
        queue, layout = self._from_previous, self._received
        if layout is None:
            queue.post(DESCRIPTION.size)
            description, _ = queue.take(DESCRIPTION)
            layout = MessageLayout.described(description, self._activation_numbers)
            queue.post(layout.size)
            queue.expected.popleft()
        header, message = self._take(queue, layout)
        if layout.shapes and not self._dynamic:
            self._received = layout
            self._post()
        return header, _leaves(layout, message, self._stage_device)

    def expect_grad(self, micro_batch: int, outputs: Iterable[Tensor]) -> None:
        """Note that a micro-batch's gradients will have the shapes of these outputs."""
        self._grads[micro_batch] = MessageLayout.of(self._grad_numbers, tuple(outputs))
        self._post()

    def send_grad(self, grads: Sequence[Tensor], header: Sequence[float | Tensor] = ()) -> None:
        """Send the gradients of a micro-batch's inputs to the previous stage."""
        layout = MessageLayout.of(self._grad_numbers, tuple(grads))
        self._to_previous.send(layout.pack(header, grads, self._device))

    def receive_grad(self, micro_batch: int) -> tuple[list[float], list[Tensor]]:
        """Return the header and the gradients of a micro-batch's outputs."""
        layout = self._grads[micro_batch]
        header, message = self._take(self._from_next, layout)
        del self._grads[micro_batch]
        return header, [tensor.to(self._stage_device) for tensor in layout.tensors(message)]

    def send_number(self, kind: Kind, number: float) -> None:
        """Send a norm: `SEND_NORM` to the previous stage, `SEND_TOTAL` to the next."""
        queue = self._to_next if kind is Kind.SEND_TOTAL else self._to_previous
        queue.send(self._number.pack([number], [], self._device))

    def receive_number(self, kind: Kind) -> float:
        """Receive a norm: `RECV_NORM` from the next stage, `RECV_TOTAL` from the previous."""
        queue = self._from_next if kind is Kind.RECV_NORM else self._from_previous
        return self._take(queue, self._number)[0][0]

    def _take(self, queue: RecvQueue, layout: MessageLayout) -> tuple[list[float], Tensor]:
        self._post(queue)
        taken = queue.take(layout)
        self._post()
        return taken


class PlanLink:
    """The messages of one rank by a plan, in which it may have several stages.

    All ranks make theirs together. There is one channel for each ordered pair of ranks whose stages
    are neighbours, with a group of its own (see `PeerLink`). Messages are received in the sender's
    order, which the plan tells, and taken in the receiver's, which may differ.

    The first activation of each stage comes behind a description of its layout; with ``dynamic``
    each one does.

    Args:
        grid: DeepSpeed's grid of the pipeline.
        device: The rank's device. Messages over gloo, which takes nothing else, are on the CPU.
        homes: For each stage its rank in the pipeline.
        dynamic: Whether micro-batches differ in shape.
    """

    def __init__(
        self, grid: Any, device: torch.device, homes: Sequence[int], *, dynamic: bool = False
    ) -> None:
        self._rank_device = device
        self._device = torch.device("cpu") if distributed.get_backend() == "gloo" else device
        self._homes = tuple(homes)
        self._rank = grid.get_stage_id()
        self._dynamic = dynamic
        self._slots = 1
        self._sent: dict[int, MessageLayout] = {}
        self._received: dict[int, MessageLayout] = {}
        self._grads: dict[tuple[int, int], MessageLayout] = {}
        self._to: dict[int, SendQueue] = {}
        self._from: dict[int, _Inbox] = {}
        neighbours = {(a, b) for a, b in pairwise(self._homes) if a != b}
        pairs = sorted(neighbours | {(b, a) for a, b in neighbours})
        me = dist.get_rank()
        for ranks in grid.pipe_groups:
            for sender, receiver in pairs:
                group = dist.new_group([ranks[sender], ranks[receiver]])
                if me == ranks[sender]:
                    self._to[receiver] = SendQueue(ranks[receiver], group, self._slots)
                elif me == ranks[receiver]:
                    self._from[sender] = _Inbox(ranks[sender], group, self._device)

    def begin(self, plan: Plan) -> None:
        """Note the messages that a plan of these stages sends to this rank, and their slots."""
        self._slots = plan.send_slots
        for queue in self._to.values():
            queue.slots = plan.send_slots
        for sender, inbox in self._from.items():
            sends = (action for action in plan.ranks[sender] if action.kind in SENDS)
            receives = map(_received_as, sends)
            inbox.expect([each for each in receives if self._homes[each.stage] == self._rank])
            inbox.post_next(self._layout_of, self._slots)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for queue in self._to.values():
            queue.flush()

    def reset_shapes(self) -> None:
        """Describe the layouts of activations again; nothing may be pending."""
        self._sent, self._received = {}, {}

    def send_activation(self, action: Action, outputs: Tensors) -> None:
        """Send a micro-batch's outputs to the next stage."""
        queue, stage = self._to[self._homes[action.stage + 1]], action.stage
        layout, known = MessageLayout.of(0, outputs), self._sent.get(stage)
        if known is None or self._dynamic:
            queue.send(DESCRIPTION.pack(layout.describe(), [], self._device), extra=True)
        elif known != layout:
            raise _other_shapes(layout, known)
        self._sent[stage] = layout
        tensors = [outputs] if isinstance(outputs, Tensor) else outputs
        queue.send(layout.pack([], tensors, self._device))

    def receive_activation(self, action: Action) -> Tensors:
        """Return a micro-batch's tensors from the stage before, which are leaves."""
        layout, message = self._take(action, self._homes[action.stage - 1])
        return _leaves(layout, message, self._rank_device)

    def expect_grad(self, action: Action, outputs: Iterable[Tensor]) -> None:
        """Note that the gradients of a micro-batch will have the shapes of these outputs."""
        self._grads[action.place] = MessageLayout.of(0, tuple(outputs))
        inbox = self._from[self._homes[action.stage + 1]]
        inbox.post_next(self._layout_of, self._slots)

    def send_grad(self, action: Action, grads: Sequence[Tensor]) -> None:
        """Send the gradients of a micro-batch's inputs to the stage before."""
        layout = MessageLayout.of(0, tuple(grads))
        queue = self._to[self._homes[action.stage - 1]]
        queue.send(layout.pack([], grads, self._device))

    def receive_grad(self, action: Action) -> list[Tensor]:
        """Return the gradients of a micro-batch's outputs."""
        layout, message = self._take(action, self._homes[action.stage + 1])
        del self._grads[action.place]
        return [tensor.to(self._rank_device) for tensor in layout.tensors(message)]

    def _layout_of(self, receive: Action) -> MessageLayout | None:
        """Return the layout of a message to come, if it is known."""
        if receive.kind is Kind.RECV_GRAD:
            return self._grads.get(receive.place)
        return None if self._dynamic else self._received.get(receive.stage)

    def _take(self, action: Action, sender: int) -> tuple[MessageLayout, Tensor]:
        inbox, wanted = self._from[sender], action._replace(version=-1)
        while wanted not in inbox.arrived:
            inbox.post_next(self._layout_of, self._slots, now=True)
            if not inbox.posted:  # the first activation of a stage
                inbox.post(DESCRIPTION.size)
                layout = MessageLayout.described(inbox.take(DESCRIPTION)[0], 0)
                self._received[inbox.expected[0].stage] = layout
                inbox.post_as(layout)
            inbox.take_next()
        inbox.post_next(self._layout_of, self._slots)
        return inbox.arrived.pop(wanted)


class _Inbox(RecvQueue):
    """Receives from one rank in its order, and keeps what is not wanted yet.

    Attributes:
        arrived: What has come, by its receive.
    """

    def __init__(self, rank: int, group: Any, device: torch.device) -> None:
        super().__init__(rank, group, device)
        self.arrived: dict[Action, tuple[MessageLayout, Tensor]] = {}
        self._names: deque[tuple[Action, MessageLayout]] = deque()

    def expect(self, actions: Sequence[Action]) -> None:
        """As `RecvQueue.expect`; what is posted already must be the plan's first receives.

        Raises:
            CommError: It is not: a step that read no data was another plan's.
        """
        posted = [receive for receive, _ in self._names]
        if posted != list(actions[: len(posted)]):
            raise CommError(
                "receive",
                ", ".join(map(str, posted)),
                "it waits since a step that found no data, and other messages come now",
                "Train with as many micro-batches as before, or start all processes again",
            )
        super().expect(actions)

    def post_next(
        self, layout_of: Callable[[Action], MessageLayout | None], slots: int, *, now: bool = False
    ) -> None:
        """Post the next expected receives, up to ``slots`` or the first of unknown layout."""
        while self.may_post(slots, now=now):
            layout = layout_of(self.expected[0])
            if layout is None:
                return
            self.post_as(layout)

    def post_as(self, layout: MessageLayout) -> None:
        """Post the next expected receive."""
        self.post(layout.size)
        self._names.append((self.expected.popleft(), layout))

    def take_next(self) -> None:
        """Wait for the message whose receive was posted first."""
        receive, layout = self._names.popleft()
        self.arrived[receive] = layout, self.take(layout)[1]


def _received_as(send: Action) -> Action:
    kind, distance = SENDS[send.kind]
    return send._replace(kind=kind, stage=send.stage + distance, version=-1)


def _leaves(layout: MessageLayout, message: Tensor, device: torch.device) -> Tensors:
    tensors = tuple(
        tensor.to(device).detach().requires_grad_(tensor.is_floating_point())
        for tensor in layout.tensors(message)
    )
    return tensors[0] if layout.single else tensors


def _other_shapes(layout: MessageLayout, known: MessageLayout) -> ModelError:
    return ModelError(
        "activations",
        layout.shapes,
        f"the micro-batches before had the shapes {known.shapes}, and the next stage expects them "
        "again",
        'Set "dynamic_shape": true in wavemare.pipeline',
    )
