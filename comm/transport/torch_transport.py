# SPDX-License-Identifier: Apache-2.0
"""Messages over ``torch.distributed``: gloo on hosts, NCCL on GPUs."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Self
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import Store
from torch.futures import Future

from wavemare.comm.transport.base import GRACE_S, Gathering, Transport, message_parts
from wavemare.comm.waits import Call, waiting
from wavemare.errors import CommError

_TAG = 0
_KEY = "wavemare-attempt"
_PAUSE_S = 0.01
_LONGEST_GRACE_S = 30.0
"""The most seconds in which ranks answer after a time limit."""


class TorchTransport(Transport):
    """Messages over a separate process group.

    Args:
        group: Its ranks take part and must all call this; None for all ranks.
        timeout_s: Seconds after which a silent peer counts as lost.
        device: Where buckets will be; the group's backend for it is used. Gloo always sends the
            host's memory.
        on_stream: Whether to send as over NCCL, which always does; for tests.

    Raises:
        CommError: Some ranks did not call in time, or the group has no backend for the device.
    """

    _group: Any
    _metadata: Any = None
    _beside: Any = None
    _label = ""
    _has_failed = False

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        timeout_s: float = 300.0,
        device: torch.device | str = "cpu",
        *,
        on_stream: bool = False,
    ) -> None:
        members = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        backend = backend_of(group, device)
        if backend is None:
            value, reason = dist.get_backend_config(group), f"it does not serve tensors on {device}"
            remedy = 'Call init_process_group("cpu:gloo,cuda:nccl")'
            raise CommError("process group", value, reason, remedy)
        store = PrefixStore(f"wavemare/comm/{members}", dist.distributed_c10d._get_default_store())
        name = _agree_on_name(store, dist.get_rank(), members, timedelta(seconds=timeout_s))
        self._device = torch.device(device)
        self._start(members, backend, timeout_s, name, on_stream or backend == "nccl")

    def _start(
        self, members: list[int], backend: str, timeout_s: float, name: str, on_stream: bool
    ) -> None:
        self.host = socket.gethostname()
        self.world_ranks = members
        self._backend = backend
        self.name = backend
        self.rank = members.index(dist.get_rank())
        self.size = len(members)
        self.timeout_s = timeout_s
        self.takes_device = self.on_stream = on_stream
        self._label = f"wavemare/comm/{name}"
        # Not by new_group: with local synchronization that gives a group the name, and so the
        # addresses, of an older one of the same ranks; and where the default group is bound to a
        # device it splits NCCL's communicator, which needs the ranks of all other groups too.
        store = PrefixStore(self._label, dist.distributed_c10d._get_default_store())
        timeout = timedelta(seconds=timeout_s)
        if on_stream:
            kind = self._device.type, backend
            self._group = _group_on(PrefixStore("data", store), self.rank, members, timeout, kind)
            # What ranks must know to launch a sum does not wait for the sum before.
            store = PrefixStore("metadata", store)
            self._metadata = _group_on(store, self.rank, members, timeout, kind)
        else:
            self._group = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)

    def begin(self) -> _TorchExchange:
        """Start an exchange of messages."""
        return _BatchedExchange(self) if self.on_stream else _TorchExchange(self)

    def begin_gather(self, mine: Tensor, out: Tensor) -> Gathering:
        """Begin `all_gather`."""
        if not self.on_stream:
            return super().begin_gather(mine, out)
        self.bytes_up += (self.size - 1) * mine.nbytes
        self.bytes_down += (self.size - 1) * mine.nbytes
        return _Gathering(self, mine.to(self._device, non_blocking=True), out)

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` adds tensors of this type; on a host 16-bit floats lose too much."""
        return self._backend == "nccl" or dtype not in (torch.bfloat16, torch.float16)

    def _all_reduce(self, flat: Tensor) -> None:
        self.finish(self._group.allreduce([flat]), None)

    def begin_all_reduce(self, flat: Tensor, end: Callable[[CommError | None], None]) -> bool:
        """Begin `all_reduce` on gloo's thread; NCCL's must be launched in turn."""
        if self.on_stream or not self._label:
            return False
        started = time.monotonic()

        def ended(future: Future[list[Tensor]]) -> None:
            error = None
            try:
                future.value()
            except Exception as caught:  # whatever it is, somebody waits for the end
                error = self.failed(caught, None, time.monotonic() - started)
            end(error)

        try:
            if self._beside is None:
                # In one group all threads would have to call in the same order.
                timeout = timedelta(seconds=self.timeout_s)
                store = dist.distributed_c10d._get_default_store()
                store = PrefixStore(f"{self._label}/beside", store)
                with waiting("the other ranks, to form a group"):
                    self._beside = dist.ProcessGroupGloo(store, self.rank, self.size, timeout)
            self._beside.allreduce([flat]).get_future().add_done_callback(ended)
        except RuntimeError as caught:
            raise self.failed(caught, None, time.monotonic() - started) from caught
        return True

    def split(self, colour: int) -> TorchTransport:
        """Return a transport among the ranks of one colour; collective."""
        # Not torch's generator, whose state training depends on.
        mine = torch.tensor([colour, secrets.randbits(62)])
        gathered = mine.new_empty(self.size, 2)
        self.all_gather(mine, gathered)
        table = gathered.tolist()
        chosen = [place for place, (other, _) in enumerate(table) if other == colour]
        members = [self.world_ranks[place] for place in chosen]
        part = object.__new__(TorchTransport)
        part._device = self._device
        name = str(table[chosen[0]][1])
        part._start(members, self._backend, self.timeout_s, name, self.on_stream)
        return part

    def close(self) -> None:
        """Give back the process groups; NCCL's communicators are destroyed."""
        groups = self._group, self._metadata
        self._group = self._metadata = self._beside = None
        for group in groups if self._backend == "nccl" else ():
            if group is not None:
                # Without an error all ranks finish what is under way; with one nobody waits.
                (group.abort if self._has_failed else group.shutdown)()

    def finish(self, work: Any, peer: int | None) -> None:
        """Wait for what torch has begun; on NCCL the current stream waits, not the host.

        Args:
            work: From torch.
            peer: Who is at the other end, if it is one rank.

        Raises:
            CommError: It failed, or took longer than the time limit.
        """
        if work is None:
            return
        started = time.monotonic()
        try:
            # With a time limit the host would wait for NCCL, whose watchdog has a limit of its own.
            limit = () if self.on_stream else (timedelta(seconds=self.timeout_s),)
            work.wait(*limit)
        except RuntimeError as error:
            raise self.failed(error, peer, time.monotonic() - started) from error

    def failed(self, error: Exception, peer: int | None, waited_s: float = 0.0) -> CommError:
        """Return the error for torch's failure, with the lost ranks.

        Args:
            error: From torch.
            peer: Who is at the other end, if it is one rank.
            waited_s: How long this rank has waited for it.
        """
        self._has_failed = True
        lines = str(error).strip().splitlines() or [type(error).__name__]
        # Ranks that began to wait later also give up later.
        grace_s = min(max(waited_s / 2, GRACE_S), _LONGEST_GRACE_S)
        return self.lost([] if peer is None else [peer], lines[-1], grace_s)

    def _ask(self, suspects: Sequence[int], grace_s: float) -> Mapping[int, Sequence[int]]:
        """Ask in the store: connections to ranks that have ended are closed."""
        # In a thread: if the store's host hangs, its own time limit is much longer.
        asking = Call(partial(self._ask_store, suspects, grace_s))
        answers = asking.wait(grace_s + GRACE_S)
        if answers is None and 0 in self.world_ranks:
            # The store's host is lost; the peer may have given up because of it.
            suspects = [self.world_ranks.index(0)]
        return super()._ask(suspects, grace_s) if answers is None else answers

    def _ask_store(
        self, suspects: Sequence[int], grace_s: float
    ) -> Mapping[int, Sequence[int]] | None:
        store = PrefixStore(f"{self._label}/lost", dist.distributed_c10d._get_default_store())
        answers: dict[int, Sequence[int]] = {}
        try:
            store.check(["0"])
        except RuntimeError:
            return None
        try:
            store.set(str(self.rank), " ".join(map(str, suspects)))
            deadline = time.monotonic() + grace_s
            while len(answers) < self.size and time.monotonic() < deadline:
                for rank in set(range(self.size)) - answers.keys():
                    if store.check([str(rank)]):
                        answers[rank] = [int(word) for word in store.get(str(rank)).split()]
                time.sleep(_PAUSE_S)
        except RuntimeError:  # it was there when this rank noticed: its host ended later
            return super()._ask(suspects, grace_s)
        return answers


class MovingTransport(TorchTransport):
    """Messages over gloo among processes that share no ``torch.distributed`` group.

    Args:
        store: By which they find each other; of these processes alone, and used once.
        rank: This process's place.
        names: What errors call the processes, by rank.
        timeout_s: Seconds after which a silent peer counts as lost.

    Raises:
        RuntimeError: They have not found each other in this time.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        self.host, self.world_ranks = socket.gethostname(), names
        self.name = self._backend = "gloo"
        self.rank, self.size, self.timeout_s = rank, len(names), timeout_s
        self._device = torch.device("cpu")
        self._group = dist.ProcessGroupGloo(store, rank, len(names), timedelta(seconds=timeout_s))

    def split(self, colour: int) -> Self:
        """Refuse: the processes of this transport change.

        Raises:
            CommError: Always.
        """
        reason = "processes that come and go have no lasting groups"
        raise CommError("transport", self.name, reason, "Use all of them, without a hierarchy")

    # Others may have given up because of another one, and share no store.
    _ask = Transport._ask


class _TorchExchange:
    """Starts each message at once; gloo's thread moves it."""

    def __init__(self, transport: TorchTransport) -> None:
        self._transport = transport
        self._works: list[tuple[Any, int | None]] = []

    def send(self, peer: int, tensor: Tensor) -> None:
        self._post(peer, tensor, receives=False)
        self._transport.bytes_up += tensor.nbytes

    def receive(self, peer: int, tensor: Tensor) -> None:
        self._post(peer, tensor, receives=True)
        self._transport.bytes_down += tensor.nbytes

    def _post(self, peer: int, tensor: Tensor, *, receives: bool) -> None:
        group = self._transport._group
        for part in message_parts(tensor):
            try:
                work = (group.recv if receives else group.send)([part], peer, _TAG)
            except RuntimeError as error:
                raise self._transport.failed(error, peer) from error
            self._works.append((work, peer))

    def start(self) -> None:
        """Nothing waits to be started."""

    def wait(self) -> None:
        self.start()
        works, self._works = self._works, []
        for work, peer in works:
            self._transport.finish(work, peer)


class _BatchedExchange(_TorchExchange):
    """All messages start together: NCCL's would wait for each other one by one."""

    def __init__(self, transport: TorchTransport) -> None:
        super().__init__(transport)
        self._messages: list[tuple[int, Tensor, bool]] = []

    def _post(self, peer: int, tensor: Tensor, *, receives: bool) -> None:
        self._messages += [(peer, part, receives) for part in message_parts(tensor)]

    def start(self) -> None:
        messages, self._messages = self._messages, []
        if not messages:
            return
        # As dist.batch_isend_irecv, which takes only groups that torch has registered.
        group, device = self._transport._group, self._transport._device
        together = group._get_backend(device).supports_coalescing
        try:
            if together:
                group._start_coalescing(device)
            works = [
                (group.recv if receives else group.send)([part], peer, _TAG)
                for peer, part, receives in messages
            ]
            if together:
                works = [group._end_coalescing(device)]
        except RuntimeError as error:
            raise self._transport.failed(error, None) from error
        self._works += [(work, None) for work in works]


class _Gathering:
    def __init__(self, transport: TorchTransport, mine: Tensor, out: Tensor) -> None:
        self._transport = transport
        self._out = out
        self._table = out if out.device == mine.device else mine.new_empty(out.shape)
        # all_gather_into_tensor under its older name, which torch does not warn of.
        group = transport._metadata
        self._work = group._allgather_base(self._table.view(-1), mine.view(-1))

    def wait(self) -> None:
        self._transport.finish(self._work, None)
        if self._out is not self._table:
            with waiting(f"messages over {self._transport.name}"):
                self._out.copy_(self._table)


def _group_on(
    store: Store,
    rank: int,
    members: Sequence[int],
    timeout: timedelta,
    kind: tuple[str, str],
) -> dist.ProcessGroup:
    """Return a process group whose messages start on an accelerator's streams.

    It is made as `torch.distributed.new_group` makes one, but from nothing.

    Args:
        store: Of these ranks alone.
        rank: This process's place in the group.
        members: The launcher's number of each rank.
        timeout: Of NCCL's watchdog.
        kind: Type of the device, and the backend.
    """
    device, backend = kind
    types = dist.ProcessGroup.BackendType
    made: Any
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group = timeout, list(members)
        made, type_ = dist.ProcessGroupNCCL(store, rank, len(members), options), types.NCCL
    else:
        made, type_ = dist.ProcessGroupGloo(store, rank, len(members), timeout), types.GLOO
    made._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, len(members))
    group._set_default_backend(type_)
    for served in {device} if backend == "nccl" else {device, "cpu"}:
        group._register_backend(torch.device(served), type_, made)
    return group


def backend_of(group: dist.ProcessGroup | None, device: torch.device | str) -> str | None:
    """Return what a group sends tensors of a device by: ``nccl``, ``gloo``, or None.

    Args:
        group: None for all ranks.
        device: Where they are. Gloo sends the host's memory, whatever it is registered for, also
            beside NCCL alone: a transport's group is its own.
    """
    pairs = dist.get_backend_config(group).split(",")
    backends = dict(pair.split(":") for pair in pairs)
    kind = torch.device(device).type
    if backends.get(kind) == "nccl":
        return "nccl"
    beside = kind == "cpu" and "nccl" in backends.values()
    return "gloo" if beside or "gloo" in backends.values() else None


@waiting("the other ranks, to agree on a name")
def _agree_on_name(store: Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> str:
    """Return a new name that these ranks share, whatever earlier attempts have left.

    A collective would not do: a rank that calls it alone breaks the group for the attempts that
    follow. Each rank writes a word of its own, which the first rank answers with the name; a rank
    that finds its answer acknowledges it. Words of earlier attempts have no reader.

    Raises:
        CommError: Some ranks have not called in this time.
    """
    own = uuid4().hex
    deadline = time.monotonic() + timeout.total_seconds()

    def pause(missing: list[int]) -> None:
        if time.monotonic() > deadline:
            reason = f"they have not come in {timeout.total_seconds():g} s"
            raise CommError("ranks", missing, reason, "Look at what they have printed")
        time.sleep(_PAUSE_S)

    if rank != ranks[0]:
        store.set(f"{_KEY}/hello/{rank}", own)
        while not store.check([f"{_KEY}/answer/{own}"]):
            pause([ranks[0]])
        name = store.get(f"{_KEY}/answer/{own}").decode()
        store.set(f"{_KEY}/heard/{name}/{rank}", "")
        return name
    missing = set(ranks[1:])
    while missing:
        for other in sorted(missing):
            hello = f"{_KEY}/hello/{other}"
            if store.check([f"{_KEY}/heard/{own}/{other}"]):
                missing.discard(other)
            elif store.check([hello]):
                store.set(f"{_KEY}/answer/{store.get(hello).decode()}", own)
        if missing:
            pause(sorted(missing))
    return own
