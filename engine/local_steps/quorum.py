# SPDX-License-Identifier: Apache-2.0
"""Who takes part in an exchange: torchft's lighthouse and manager, and what replicas agree on.

Each exchange begins with a meeting. The lighthouse says who is there; a replica that is behind gets
the state of one that is not; then all compare what they are about to do. This module imports
torchft, so only `elastic.py` imports it, when a run needs it.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("RUST_LOG", "error")  # read when torchft's library is loaded

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import TCPStore
from torchft import Manager
from torchft.checkpointing import HTTPTransport
from torchft.process_group import ProcessGroup, create_store_client

from wavemare.comm.collective_queue import CollectiveQueue
from wavemare.comm.executors import Scratch
from wavemare.comm.kernels import kernels_for
from wavemare.comm.transport.torch_transport import MovingTransport
from wavemare.comm.waits import waiting
from wavemare.engine.launch.environment import host_address
from wavemare.engine.launch.group import gather
from wavemare.engine.local_steps.meeting import Meeting, Row, Verdict, decide, judge_of, reason_of
from wavemare.engine.local_steps.wire import Header, Message, ReplicaLink
from wavemare.errors import CommError, ConfigError, LaunchError

KEY = "wavemare.local_steps.elastic"
_CONNECT_S = 10.0
_WORDS = 256
_HERE = ("localhost", "127.0.0.1", "::1")

logging.getLogger("torchft").setLevel(logging.CRITICAL)  # a traceback for each lost replica
# Of a state that has come: it is only read.
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)


class _Group(ProcessGroup):
    """What torchft's manager makes anew whenever other replicas are there: our transport."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(0, 1)
        self.transport: MovingTransport | None = None
        self._timeout_s = timeout_s

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Connect the ranks at this one's place in all replicas."""
        self.leave()
        store = create_store_client(store_addr, timeout=timedelta(seconds=self._timeout_s))
        names = [number // (group_world_size or 1) for number in global_ranks or range(world_size)]
        self.transport = MovingTransport(store, rank, names, self._timeout_s)

    def leave(self) -> None:
        """Close the sockets."""
        if self.transport is not None:
            self.transport.close()
        self.transport = None


class _States(HTTPTransport):
    """Serves the state to replicas that are behind, by an address that they can reach."""

    def __init__(self, host: str, timeout_s: float) -> None:
        self._host = host
        super().__init__(timedelta(seconds=timeout_s), num_chunks=0)
        self._server.RequestHandlerClass.log_message = lambda *_: None  # a line for each copy

    def metadata(self) -> str:
        """Return the address."""
        return str(super().metadata()).replace(socket.gethostname(), self._host)

    def shutdown(self, wait: bool = True) -> None:
        """End the thread and close the socket, which torchft leaves open."""
        super().shutdown(wait=True)
        self._server.server_close()


class ElasticLink(ReplicaLink):
    """Exchanges between those replicas that have met.

    Attributes:
        gives: Whether the change of this replica counts; else it sends zeros.
        givers: How many replicas' changes count.
    """

    def __init__(self, group: _Group) -> None:
        self._group = group
        self.gives, self.givers = True, 1
        self._open()
        # The first sum compiles. In an exchange others would wait for it.
        sums, where = torch.zeros(2, _WORDS), torch.zeros(1, 1, dtype=torch.int64)
        kernels_for("cpu").reduce(sums[0], where, _WORDS, 1.0, sums[1])

    def _open(self) -> None:
        self._queue, self._scratch = CollectiveQueue("wavemare-replicas"), Scratch()

    def use(self, transport: MovingTransport) -> None:
        """Exchange with the replicas that have met."""
        self._transport = transport

    def send(self, header: Header, values: Tensor, note: float = 0.0) -> Message:
        """Begin an exchange as `ReplicaLink.send`."""
        if not self.gives:
            values.zero_()
        return super().send(header, values, note)

    @property
    def _changes(self) -> int:
        return self.givers

    def reset(self) -> None:
        """Leave an exchange that has failed: the others notice at once.

        What is still on its way may fill the old memory.
        """
        self.close()
        self._open()
        gc.collect()  # what is pending holds the sockets

    def close(self) -> None:
        """Finish all exchanges and close the sockets."""
        self._queue.close()
        self._group.leave()


class Members:
    """This replica among those present; its ranks call all methods together.

    Args:
        address: Of the lighthouse.
        replica: Number of this replica.
        replicas: How many there are when all are present.
        least: How many an exchange needs.
        timeout_s: Limit of a meeting, and of an exchange.
        state: Returns what a replica that is behind gets.
        digests: Of the model and the settings, as in `Row`.

    Attributes:
        address: Of the lighthouse.
    """

    def __init__(
        self,
        address: str,
        *,
        replica: int,
        replicas: int,
        least: int,
        timeout_s: float,
        state: Callable[[], dict[str, Any]],
        digests: tuple[int, int],
    ) -> None:
        self._replicas, self._digests = replicas, digests
        self._replica, self.address = replica, address
        self._received: dict[str, Any] | None = None
        host = _own_host(address)
        self._store, store_port = _shared_store(host)
        self._group = _Group(timeout_s)
        self.link = ElasticLink(self._group)
        limit = timedelta(seconds=timeout_s)
        self._manager = Manager(
            pg=self._group,
            load_state_dict=self._receive,
            state_dict=state,
            min_replica_size=least,
            use_async_quorum=False,
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=timedelta(seconds=_CONNECT_S),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            store_addr=host,
            store_port=store_port,
            lighthouse_addr=address,
            replica_id=f"replica_{replica:06d}",
            hostname=host,
            checkpoint_transport=_States(host, timeout_s),
            init_sync=False,  # the first meeting compares the weights
        )

    def _receive(self, state: dict[str, Any]) -> None:
        self._received = state

    def meet(
        self,
        header: Header,
        *,
        trains: bool,
        gives: bool,
        hurries: bool = False,
        wait_s: float | None = None,
    ) -> Meeting:
        """Meet the replicas that are there; `commit` must follow.

        Args:
            header: What this replica is about to do, unless it is behind.
            trains: Whether it has trained.
            gives: Whether its change counts; not if it is behind.
            hurries: Whether it has waited for more replicas for long enough.
            wait_s: Limit of the wait for the others; ``timeout_s`` if omitted.

        Raises:
            ConfigError: The others have another model or other settings.
        """
        manager, before = self._manager, self._manager.state_dict()
        self._received, reason = None, ""
        try:
            with waiting("the other replicas"):
                manager.start_quorum(timeout=timedelta(seconds=wait_s) if wait_s else None)
            if (error := manager.errored()) is not None:
                reason = _first_line(error.original_exception)
            elif self._group.transport is None:
                reason = "the replicas have not connected anew"
        except Exception as error:  # of torchft's library, which has no types of its own
            manager._quorum_future = None  # else it would raise the same error for ever
            reason = _first_line(error)
        rows: list[Row] = []
        state = self._received
        if not self._any(bool(reason)):
            found = header if state is None else Header(*state["header"])
            here = state is None
            own = int(trains and here), int(gives and here), int(hurries)
            rows, reason = self._tell(Row(*self._digests, *own, *found))
        if self._any(bool(reason)):
            manager.load_state_dict(before)  # what has come is not taken
            diverged = trains and state is None and not gives
            reason = reason or "another rank has met nobody"
            return Meeting(Verdict.DROP, reason, header, diverged=diverged)
        verdict, reason, refused = decide(rows, self._replicas)
        if verdict in (Verdict.DROP, Verdict.FOLLOW):
            manager.load_state_dict(before)
        if self._transport.rank in refused:
            self._refuse(rows)
        own_row, judge = rows[self._transport.rank], rows[judge_of(rows)]
        alike = own_row.trains == judge.trains and own_row.header == judge.header
        if verdict is Verdict.FOLLOW and alike:  # the others take this state in the next meeting
            manager.load_state_dict({**before, "step": before["step"] + 1})
        self.link.use(self._transport)
        self.link.givers = sum(row.gives for row in rows)
        kept = state if verdict in (Verdict.GO, Verdict.WAIT) else None
        self.link.gives = bool(own_row.gives)
        diverged = trains and state is None and not gives
        return Meeting(verdict, reason, own_row.header, kept, self.link.givers, diverged)

    @property
    def _transport(self) -> MovingTransport:
        assert self._group.transport is not None
        return self._group.transport

    def _tell(self, row: Row) -> tuple[list[Row], str]:
        """Return the rows of all replicas, or why they are not known."""
        try:
            with waiting("the other replicas"):
                table = torch.empty(self._transport.size, len(row), dtype=torch.int64)
                self._transport.all_gather(torch.tensor(row), table)
        except CommError as error:
            return [], reason_of(error)
        return [Row(*values) for values in table.tolist()], ""

    def _hear(self) -> str:
        """Return why another replica has not got what it needs; empty if all have.

        Without it those that have would go on without those that have not, which would then have
        to take their state.
        """
        try:
            with waiting("the other replicas"):
                self._transport.barrier()
        except CommError as error:
            return reason_of(error)
        return ""

    def _refuse(self, rows: Sequence[Row]) -> None:
        own, names = rows[self._transport.rank], self._transport.world_ranks
        judge = judge_of(rows)
        self.commit("this replica is refused")
        same = own.model == rows[judge].model
        model = "another model, by its names, shapes or frozen weights"
        reason = f"replica {names[judge]} has {'other settings' if same else model}"
        remedy = "Start all replicas with the same model, configuration and number of ranks"
        raise ConfigError("replica", self._replica, reason, remedy)

    def commit(self, reason: str = "") -> bool:
        """End a meeting and its exchange.

        Args:
            reason: Why this rank has not got what it needs; empty if it has.

        Returns:
            Whether all ranks have, and enough replicas were there.
        """
        reason = reason or self._hear()
        if reason:
            self._manager.report_error(RuntimeError(reason))
        done = bool(self._manager.should_commit())
        if not done:
            self.link.reset()
        return done

    def state_dict(self) -> dict[str, int]:
        """Return how many exchanges there have been."""
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on with a state of `state_dict`; of all replicas that meet, the latest one counts."""
        self._manager.load_state_dict(state)

    def close(self) -> None:
        """Leave the other replicas."""
        self.link.close()
        self._manager.shutdown(wait=False)

    def _any(self, holds: bool) -> bool:
        """Whether it holds on any rank of this replica."""
        return holds if dist.get_world_size() == 1 else any(gather(holds))


def check_lighthouse(address: str) -> None:
    """Check on all ranks of a replica that the lighthouse answers.

    Raises:
        ConfigError: The address is none.
        LaunchError: It does not answer.
    """
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme != "http" or not host or not port:
        reason = "it is not the address of a lighthouse"
        raise ConfigError(f"{KEY}.lighthouse", address, reason, "Write http://HOST:PORT")
    said = ""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        said = str(error)
    found = gather(said)
    if any(found):
        reason = f"no lighthouse answers there ({next(filter(None, found))})"
        remedy = (
            "Start one: torchft_lighthouse --min_replicas 1 --bind '[::]:29510'; "
            "wavemare launch --replicas does so by itself"
        )
        raise LaunchError(f"{KEY}.lighthouse", address, reason, remedy)


def _own_host(address: str) -> str:
    """Return how other replicas reach this host: by the interface that reaches the lighthouse."""
    parts = urlsplit(address)
    if parts.hostname in _HERE:
        return "localhost"
    with socket.create_connection((parts.hostname, parts.port), timeout=_CONNECT_S) as probe:
        own = str(probe.getsockname()[0])
    # The name of this host itself may stand for an address that no other host has.
    return host_address(os.environ) if own.startswith("127.") else own


def _shared_store(host: str) -> tuple[Any, int]:
    """Return the store of a replica, which its first rank holds, and its port."""
    store = None
    if dist.get_rank() == 0:
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    ports = gather(None if store is None else store.port)
    return store, int(ports[0])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
