# SPDX-License-Identifier: Apache-2.0
"""Messages between the ranks of a pipeline, received ahead and sent without waiting.

See `wavemare.engine.pipe.message` for what a message holds.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor, distributed

from wavemare.comm.waits import failing
from wavemare.engine.pipe.message import DESCRIPTION, MessageLayout
from wavemare.engine.pipe.micro_batch import Tensors, as_leaves, as_tuple
from wavemare.engine.seams import await_connections, destroy_groups, fail_group
from wavemare.errors import CommError, ModelError
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action, Kind

_EXIT_S = 60.0  # for pending sends when the process ends
_NUMBER_ALONE = MessageLayout(1)
Receive = tuple[Kind, int, int]
"""An action's kind, stage and micro-batch."""

_pending: list[deque[tuple[Tensor, Any, bool]]] = []
"""The pending sends of every queue of this process. gloo drops a message whose sender no longer
holds it, and the receiver would wait for it forever."""
_awaited: list[deque[tuple[Receive | None, MessageLayout, Tensor, Any]]] = []
"""The posted receives of every queue of this process. gloo cannot take a message whose receive
nobody holds any longer: its thread would look at it again and again, and occupy a core."""
_links = itertools.count()
"""All ranks make their links together, and so count alike."""


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


@atexit.register
def _flush_at_exit() -> None:
    for sends in () if failing.is_set() else _pending:
        _flush(sends)


def _flush(sends: Iterable[tuple[Tensor, Any, bool]]) -> None:
    """Give slow receivers the time to take what was sent, unless they have gone."""
    until = time.monotonic() + _EXIT_S
    with contextlib.suppress(RuntimeError):  # the receiver has gone, or does not take it
        for _, work, _ in sends:
            work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


def _forget(messages: deque[Any], of_all: list[deque[Any]]) -> None:
    messages.clear()
    of_all[:] = [other for other in of_all if other is not messages]


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
        self.group: Any = group
        self.slots = slots
        self._taken = 0  # slots
        self._sends: deque[tuple[Tensor, Any, bool]] = deque()
        _pending.append(self._sends)

    def close(self) -> None:
        """Forget what is pending, and destroy the group."""
        _forget(self._sends, _pending)
        group, self.group = [self.group], None  # while anything refers to it, it stays open
        destroy_groups(group)

    @property
    def pending(self) -> Sequence[tuple[Tensor, Any, bool]]:
        """The messages that may not be sent yet."""
        return self._sends

    def send(self, message: Tensor, *, extra: bool = False) -> None:
        """Send a message; nobody may change it afterwards. An extra one takes no slot."""
        while not extra and self._taken >= self.slots:
            self._wait_for_oldest()
        work = distributed.isend(message, self._rank, group=self.group)
        self._sends.append((message, work, extra))
        self._taken += not extra

    def _wait_for_oldest(self) -> None:
        _, work, extra = self._sends.popleft()
        work.wait()
        self._taken -= not extra

    def flush(self) -> None:
        """Wait until all messages are sent."""
        while self._sends:
            self._wait_for_oldest()


class RecvQueue:
    """Receives from one rank, on the CPU with the next receives posted before they are needed.

    Messages come in the sender's order, and are kept until they are wanted. What is posted is
    received even after the queue is garbage-collected. On a GPU a receive is
    posted when it is needed. The host does not wait there, and goes on; but while a posted receive
    waits for its sender, allocating memory or loading a kernel may wait for it, and two stages for
    each other.

    Args:
        rank: The sender's global rank.
        group: A group of the two ranks, for this direction alone.
        device: Where messages are put.

    Attributes:
        expected: Receives of the plan that are not posted yet, in the sender's order.
        gates: Receives after which none is posted before they have arrived.
        has_ended: Whether one of them has said that nothing follows in this step.
        arrived: What has come and is not taken yet: its layout, header and message.
    """

    def __init__(self, rank: int, group: Any, device: torch.device) -> None:
        self._rank = rank
        self.group: Any = group
        self._device = device
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._posted: deque[tuple[Receive | None, MessageLayout, Tensor, Any]] = deque()
        _awaited.append(self._posted)
        self.expected: deque[Receive] = deque()
        self.gates: frozenset[Receive] = frozenset()
        self.has_ended = False
        self._gate: Receive | None = None
        self.arrived: dict[Receive, tuple[MessageLayout, list[float], Tensor]] = {}

    def expect(self, receives: Sequence[Receive], gates: frozenset[Receive] = frozenset()) -> None:
        """Set the receives of this step; those posted before must be the first of them.

        Args:
            receives: In the sender's order.
            gates: Those whose header may say that the data has ended.

        Raises:
            CommError: Others are posted: that step was another plan's.
        """
        posted = [receive for receive, *_ in self._posted]
        if posted != list(receives[: len(posted)]):
            raise CommError(
                "receive",
                ", ".join(str(Action(*receive)) for receive in posted if receive),
                "it was posted in a step that found no data, and other messages come now",
                "Train with as many micro-batches as before, or start all processes again",
            )
        self.expected = deque(receives[len(posted) :])
        self._gate = next((receive for receive in posted if receive in gates), None)
        self.gates, self.has_ended = gates, False

    def post_expected(
        self, layout_of: Callable[[Receive], MessageLayout | None], slots: int, *, now: bool = False
    ) -> bool:
        """Post the next expected receives, up to ``slots`` or the first of unknown layout.

        ``now`` says that the host is about to wait. Returns whether a receive is posted.
        """
        limit = slots if self._beside is None else int(now)
        while self.expected and len(self._posted) < limit and self._gate is None:
            layout = layout_of(self.expected[0])
            if layout is None:
                break
            if self.expected[0] in self.gates:
                self._gate = self.expected[0]
            self.post(self.expected.popleft(), layout)
        return bool(self._posted)

    def post(self, receive: Receive | None, layout: MessageLayout) -> None:
        """Post a receive; None stands for one that no plan has."""
        message = layout.empty(self._device)
        work = distributed.irecv(message, self._rank, group=self.group)
        self._posted.append((receive, layout, message, work))

    def close(self) -> None:
        """Forget what is expected, and destroy the group."""
        _forget(self._posted, _awaited)
        self.expected.clear()
        self.arrived.clear()
        group, self.group = [self.group], None  # while anything refers to it, it stays open
        destroy_groups(group)

    def wait(self) -> list[float]:
        """Wait for the message whose receive was posted first; return its header.

        A GPU's host waits for a message with a header, and so for passes queued before its receive.
        """
        receive, layout, message, work = self._posted.popleft()
        if layout.numbers and self._beside is not None:
            with torch.cuda.stream(self._beside):
                work.wait()
                header = layout.header(message)
            work.wait()
        else:
            work.wait()
            header = layout.header(message)
        if receive is not None:
            self.arrived[receive] = layout, header, message
            self.has_ended |= receive in self.gates and bool(header[0])
            if receive == self._gate and not self.has_ended:  # else nothing follows in this step
                self._gate = None
        return header


class PeerLink:
    """The messages of one rank by its plan, in which it may have several stages.

    All ranks make theirs together. There is one channel for each ordered pair of ranks whose stages
    are neighbours, with a group, and so a communicator, of its own: in one NCCL communicator a
    receive posted ahead would hold up later sends. NCCL splits its communicator by all ranks, so
    every rank makes every group. Over gloo a rank outside of a group does not touch the store for
    it (1,024 ranks, 16 stages: 1,920 groups in 0.05 s).

    Messages are received in the sender's order, and taken in the receiver's, which may differ. The
    first activation of each stage comes behind a description of its layout; with ``dynamic`` each
    one does, and cannot be received ahead.

    Args:
        grid: DeepSpeed's grid of the pipeline.
        device: The rank's device. Messages over gloo, which takes nothing else, are on the CPU.
        homes: For each stage its rank in the pipeline.
        activation_numbers: Length of an activation's header.
        in_each_activation: Whether every activation has that header, or only the first of a step.
        grad_numbers: Length of a gradient's header.
        dynamic: Whether micro-batches differ in shape.
    """

    def __init__(
        self,
        grid: Any,
        device: torch.device,
        homes: Sequence[int],
        *,
        activation_numbers: int = 0,
        in_each_activation: bool = True,
        grad_numbers: int = 0,
        dynamic: bool = False,
    ) -> None:
        self._rank_device = device
        self._device = torch.device("cpu") if distributed.get_backend() == "gloo" else device
        self._homes = tuple(homes)
        self._activation_numbers = activation_numbers
        self._in_each_activation = in_each_activation
        self._grad_numbers = grad_numbers
        self._dynamic = dynamic
        self._first, self._may_end = 0, False
        self._slots = 1
        self._sent: dict[int, MessageLayout] = {}
        self._received: dict[int, MessageLayout] = {}
        self._grads: dict[tuple[int, int], MessageLayout] = {}
        self._to: dict[int, SendQueue] = {}
        self._from: dict[int, RecvQueue] = {}
        self._key = f"wavemare/pipeline/{next(_links)}"
        self.is_closed = False
        neighbours = {(a, b) for a, b in pairwise(self._homes) if a != b}
        pairs = sorted(neighbours | {(b, a) for a, b in neighbours})
        me = dist.get_rank()
        self._rank = next(list(ranks).index(me) for ranks in grid.pipe_groups if me in ranks)
        for ranks in grid.pipe_groups:
            for sender, receiver in pairs:
                group = dist.new_group([ranks[sender], ranks[receiver]])
                if me == ranks[sender]:
                    self._to[receiver] = SendQueue(ranks[receiver], group, self._slots)
                elif me == ranks[receiver]:
                    self._from[sender] = RecvQueue(ranks[sender], group, self._device)
        await_connections(grid.get_pipe_parallel_group())

    @property
    def _queues(self) -> list[SendQueue | RecvQueue]:
        return [*self._to.values(), *self._from.values()]

    def close(self) -> None:
        """Wait until neighbours have taken what was sent, and destroy all channels."""
        if not self.is_closed and distributed.is_initialized():
            _flush([sends for queue in self._to.values() for sends in queue.pending])
        self._close()

    def _close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for queue in self._queues:
            queue.close()
        self._grads.clear()

    def abort(self, reason: str) -> None:
        """Leave word for the ranks of this pipeline and its replicas, and destroy all channels.

        Whoever waits for a message of this rank fails at once. The first word counts.
        """
        if not self.is_closed:
            with contextlib.suppress(RuntimeError):  # the store is gone with its rank
                _store().compare_set(self._key, "", reason)
            for queue in self._queues:
                fail_group(queue.group)
        self._close()

    def told(self) -> str | None:
        """Return the word that a rank has left in `abort`; None if none has, or cannot be asked."""
        with contextlib.suppress(RuntimeError):
            if _store().check([self._key]):
                return str(_store().get(self._key).decode())
        return None

    def begin(
        self, receives: Iterable[Action], slots: int, *, first: int = 0, may_end: bool = False
    ) -> None:
        """Note a step's receives, and post the first of them.

        Args:
            receives: Those of one sender in its order.
            slots: Messages that may be pending in one direction.
            first: Number of the step's first micro-batch.
            may_end: Whether the header of its activation may say that no other message follows.
        """
        self._slots, self._first, self._may_end = slots, first, may_end
        for sends in self._to.values():
            sends.slots = slots
        expected: dict[int, list[Receive]] = {sender: [] for sender in self._from}
        for action in receives:
            expected[self._sender(action)].append(action[:3])
        for sender, queue in self._from.items():
            queue.expect(expected[sender], frozenset(filter(self._is_gate, expected[sender])))
            queue.post_expected(self._layout_of, slots)

    def flush(self) -> None:
        """Wait until all messages are sent."""
        for queue in self._to.values():
            queue.flush()

    def reset_shapes(self) -> None:
        """Describe the layouts of activations again; nothing may be pending."""
        self._sent, self._received = {}, {}

    def send_activation(
        self, action: Action, outputs: Tensors, header: Sequence[float | Tensor] = ()
    ) -> None:
        """Send a micro-batch's outputs to the next stage; an empty tuple when the data ended.

        Raises:
            ModelError: They have other shapes or types than those before.
        """
        queue, stage = self._to[self._homes[action.stage + 1]], action.stage
        tensors, known = as_tuple(outputs), self._sent.get(stage)
        layout = known if known is not None and not tensors else MessageLayout.of(0, outputs)
        if known is None or self._dynamic:
            queue.send(DESCRIPTION.pack(layout.describe(), (), self._device), extra=True)
        elif known != layout:
            raise ModelError(
                "activations",
                str(layout),
                f"the micro-batches before had {known}, and the next stage expects them again",
                'If the last batch of the data is smaller, set "dataloader_drop_last": true (or '
                "drop_last in a loader of your own). For batches of many shapes set "
                '"dynamic_shape": true in wavemare.pipeline, or in the PipelineModule',
            )
        if tensors:
            self._sent[stage] = layout
        layout = layout.with_header(self._header_of(action.micro_batch))
        queue.send(layout.pack(header, tensors, self._device))

    def receive_activation(self, action: Action) -> tuple[list[float], Tensors]:
        """Return an activation's header and its tensors, which are leaves."""
        layout, header, tensors = self._take(action)
        return header, as_leaves(tensors[0] if layout.single else tensors)

    def expect_grad(self, action: Action, outputs: Iterable[Tensor]) -> None:
        """Note that a forward pass's gradients will have the shapes of these outputs."""
        self._grads[action.place] = MessageLayout.of(self._grad_numbers, tuple(outputs))
        queue = self._from[self._homes[action.stage + 1]]
        queue.post_expected(self._layout_of, self._slots)

    def send_grad(
        self, action: Action, grads: Sequence[Tensor], header: Sequence[float | Tensor] = ()
    ) -> None:
        """Send the gradients of a micro-batch's inputs to the stage before."""
        layout = MessageLayout.of(self._grad_numbers, tuple(grads))
        queue = self._to[self._homes[action.stage - 1]]
        queue.send(layout.pack(header, grads, self._device))

    def receive_grad(self, action: Action) -> tuple[list[float], list[Tensor]]:
        """Return the header and the gradients of a micro-batch's outputs."""
        _, header, tensors = self._take(action)
        del self._grads[action.place]
        return header, tensors

    def send_number(self, action: Action, number: float) -> None:
        """Send a norm: `SEND_NORM` to the stage before, `SEND_TOTAL` to the next."""
        queue = self._to[self._homes[action.stage + SENDS[action.kind][1]]]
        queue.send(_NUMBER_ALONE.pack([number], (), self._device))

    def receive_number(self, action: Action) -> float:
        """Receive a norm."""
        return self._take(action)[1][0]

    def discard(self, receives: Sequence[Action]) -> None:
        """Receive and drop activations beyond the last step, and send all that is pending."""
        for action in receives:
            self.receive_activation(action)
        self._grads.clear()
        self.flush()

    def _sender(self, receive: Action) -> int:
        return self._homes[receive.stage + RECEIVES[receive.kind][1]]

    def _layout_of(self, receive: Receive) -> MessageLayout | None:
        """Return the layout of a message to come, if it is known."""
        kind, stage, micro_batch = receive
        if kind is Kind.RECV_GRAD:
            return self._grads.get((stage, micro_batch))
        if kind is Kind.RECV_ACTIVATION:
            known = None if self._dynamic else self._received.get(stage)
            return known and known.with_header(self._header_of(micro_batch))
        return _NUMBER_ALONE

    def end_step(self, number: int, numbers: int) -> None:
        """Tell the next ranks that a step has no data, and hear the others tell it.

        So no receive stays posted. One notice goes through each channel for activations: the first
        activation of the step.

        Args:
            number: The step's first micro-batch.
            numbers: Length of an activation's header.
        """
        firsts: dict[tuple[int, int], int] = {}
        for stage, (sender, receiver) in enumerate(pairwise(self._homes)):
            firsts.setdefault((sender, receiver), stage)
        for (sender, receiver), stage in firsts.items():
            if sender == self._rank != receiver:
                notice = Action(Kind.SEND_ACTIVATION, stage, number)
                self.send_activation(notice, (), [1.0] * numbers)
        for (sender, receiver), stage in firsts.items():
            if sender != self._rank == receiver and not self._from[sender].has_ended:
                self.receive_activation(Action(Kind.RECV_ACTIVATION, stage + 1, number))

    def await_later_stages(self) -> None:
        """Wait until the ranks of later stages have come here, too, or fail where they have failed.

        Word goes from the rank of the last stage to all others, each of which waits for the one
        that follows its own last stage.
        """
        last = {rank: stage for stage, rank in enumerate(self._homes)}
        awaited = {rank: self._homes[stage + 1 : stage + 2] for rank, stage in last.items()}
        for sender in awaited[self._rank]:
            self._from[sender].post(None, _NUMBER_ALONE)
            self._from[sender].wait()
        for receiver, senders in awaited.items():
            if self._rank in senders:
                self._to[receiver].send(_NUMBER_ALONE.pack([1.0], (), self._device))
        self.flush()

    def _is_gate(self, receive: Receive) -> bool:
        """Return whether a message may be the notice that no other comes in this step."""
        kind, _, micro_batch = receive
        return self._may_end and kind is Kind.RECV_ACTIVATION and micro_batch == self._first

    def _header_of(self, micro_batch: int) -> int:
        """Return the length of an activation's header."""
        has_header = self._in_each_activation or micro_batch == self._first
        return self._activation_numbers if has_header else 0

    def _take(self, action: Action) -> tuple[MessageLayout, list[float], list[Tensor]]:
        queue, wanted = self._from[self._sender(action)], action[:3]
        while wanted not in queue.arrived:
            if not queue.post_expected(self._layout_of, self._slots, now=True):
                self._post_described(queue)
            queue.wait()
        queue.post_expected(self._layout_of, self._slots)
        layout, header, message = queue.arrived.pop(wanted)
        tensors = layout.tensors(message)
        if self._device != self._rank_device:
            tensors = [tensor.to(self._rank_device) for tensor in tensors]
        return layout, header, tensors

    def _post_described(self, queue: RecvQueue) -> None:
        """Receive the description of the next activation, and post its receive."""
        queue.post(None, DESCRIPTION)
        layout = MessageLayout.described(queue.wait())
        receive = queue.expected.popleft()
        if layout.shapes:  # else the data ended
            self._received[receive[1]] = layout
        queue.post(receive, layout.with_header(self._header_of(receive[2])))
