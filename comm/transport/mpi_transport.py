# SPDX-License-Identifier: Apache-2.0
"""Messages over MPI, by mpi4py's buffer calls alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from mpi4py import MPI
from torch import Tensor

from wavemare.comm.transport.base import Gathering, Transport, as_bytes, message_parts
from wavemare.comm.waits import waiting
from wavemare.errors import CommError

TAG = 7
_PROBE_TAG = 8
_PROBES_AFTER_S = 1.0
"""Seconds of a wait after which each poll also looks whether a peer has given up."""
_PAUSE_S = 0.01
_SPINS = 20
"""Polls without a pause: a short message arrives before a sleeping thread wakes up. More of them
take Python's lock from the backward pass: 200 made a step 4 ms longer, timed by hand."""
_SHARE, _LEAST_S, _MOST_S = 1 / 32, 100e-6, 500e-6
"""Then a pause between two polls: a share of the wait so far, within limits. A library that waits
by itself keeps a core busy, which the backward pass and other ranks need; over the slowest of
useful links the buffers of the kernel last for longer."""
_IN_ONE_ROUND = 32 << 10
"""Bytes of a gather above which ranks send to each other directly: libraries pass larger ones
around a ring, and each rank has to poll in each of its N - 1 steps."""
_TYPES = {torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.int32: MPI.INT32_T}


class MpiTransport(Transport):
    """Messages over a duplicate of a communicator.

    Args:
        comm: Its ranks take part and must all call this.
        timeout_s: Seconds after which a silent peer counts as lost.
        takes_device: Whether this rank's MPI takes GPU buffers; used if all ranks' do, and for
            messages alone. Open MPI has no other non-blocking calls for them.
    """

    name = "mpi"
    gathers_side_by_side = True

    def __init__(
        self,
        comm: MPI.Comm = MPI.COMM_WORLD,
        timeout_s: float = 300.0,
        takes_device: bool = False,
    ) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError(
                "MPI",
                MPI.Get_library_version().split(",")[0].strip(),
                "it was started for one thread, and collectives run on a thread of their own",
                'Set mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported',
            )
        self._comm = comm.Dup()
        self.rank = self._comm.Get_rank()
        self.size = self._comm.Get_size()
        self.host = MPI.Get_processor_name()
        world = MPI.COMM_WORLD.Get_group()
        self.world_ranks = self._comm.Get_group().Translate_ranks(group=world)
        self.timeout_s = timeout_s
        self.takes_device = self._comm.allreduce(takes_device, MPI.LAND)
        # A message that comes after all must not be written to memory that has a new owner.
        self._unfinished: list[MPI.Request] = []

    def begin(self) -> _MpiExchange:
        """Start an exchange of messages."""
        return _MpiExchange(self)

    def begin_gather(self, mine: Tensor, out: Tensor) -> Gathering:
        """Begin `all_gather`."""
        if out.is_cuda or out.nbytes > _IN_ONE_ROUND:
            return super().begin_gather(mine, out)
        out[self.rank].copy_(mine)
        self.bytes_up += (self.size - 1) * mine.nbytes
        self.bytes_down += (self.size - 1) * mine.nbytes
        exchange = _MpiExchange(self)
        request = self._comm.Iallgather(MPI.IN_PLACE, buffer_of(out))
        exchange.posted.append((request, None, None))
        return exchange

    def reduces(self, dtype: torch.dtype) -> bool:
        """Whether `all_reduce` takes tensors of this type: MPI knows no 16-bit floats."""
        return dtype in _TYPES

    def _all_reduce(self, flat: Tensor) -> None:
        kind = _TYPES[flat.dtype]
        for part in message_parts(flat):
            request = self._comm.Iallreduce(MPI.IN_PLACE, [buffer_of(part)[0], kind])
            self.finish([request], [])

    def split(self, colour: int) -> Self:
        """Return a transport among the ranks of one colour; collective."""
        part = self._comm.Split(colour, self.rank)
        transport = type(self)(part, self.timeout_s, self.takes_device)
        part.Free()
        return transport

    def close(self) -> None:
        """Give back the communicator."""
        if self._comm != MPI.COMM_NULL and not MPI.Is_finalized():
            self._comm.Free()

    @waiting("messages over MPI")
    def finish(
        self,
        requests: list[MPI.Request],
        peers: Sequence[int | None],
        sizes: Sequence[int | None] = (),
    ) -> MPI.Status:
        """Wait for requests without keeping a core busy.

        Args:
            requests: From MPI.
            peers: The peer of each request; None, or no peers at all, if it is no single rank.
            sizes: The bytes to receive of each request; None for sends.

        Returns:
            The status of a request that ended last.

        Raises:
            CommError: A request failed, timed out or has another size.
        """
        started = time.monotonic()
        left, polls = len(requests), 0
        ended: list[MPI.Status] = []
        try:
            while True:
                # Testall would not mark the completed requests.
                places = MPI.Request.Testsome(requests, ended := []) or ()
                for size, status in zip([sizes[n] for n in places if sizes], ended, strict=False):
                    if size is not None and size != status.Get_count(MPI.BYTE):
                        raise _of_another_size()
                left -= len(places)
                if not left:
                    return ended[0]
                polls += 1
                if polls < _SPINS:
                    time.sleep(0)
                    continue
                waited = time.monotonic() - started
                if waited > self.timeout_s or (waited > _PROBES_AFTER_S and self._is_asked()):
                    how = f"nothing came within {self.timeout_s:g} s"
                    raise self.lost(_pending(requests, peers), how)
                time.sleep(min(max(waited * _SHARE, _LEAST_S), _MOST_S))
        except MPI.Exception as error:
            kinds = {MPI.Get_error_class(status.Get_error()) for status in ended}
            if MPI.ERR_TRUNCATE in kinds:
                raise _of_another_size() from error
            raise self.lost(_pending(requests, peers), str(error)) from error
        finally:
            # MPI may still write to the buffers of unfinished requests.
            self._unfinished.extend(r for r in requests if r != MPI.REQUEST_NULL)

    def _is_asked(self) -> bool:
        """Whether a peer has given up, and asks which ranks answer."""
        return bool(self._comm.Iprobe(tag=_PROBE_TAG))

    def _ask(self, suspects: Sequence[int], grace_s: float) -> Mapping[int, Sequence[int]]:
        """Ask by messages; ranks that wait answer at once."""
        mine = torch.zeros(self.size, dtype=torch.uint8)
        mine[list(suspects)] = 1
        words = {peer: torch.zeros_like(mine) for peer in self.peers()}
        try:
            asked = {p: self._comm.Irecv(buffer_of(words[p]), p, _PROBE_TAG) for p in words}
            self._unfinished += asked.values()
            self._unfinished += [self._comm.Isend(buffer_of(mine), p, _PROBE_TAG) for p in words]
            deadline = time.monotonic() + grace_s
            while asked and time.monotonic() < deadline:
                asked = {peer: request for peer, request in asked.items() if not request.Test()}
                time.sleep(_PAUSE_S)
        except MPI.Exception:  # after an error it may answer nothing more
            return super()._ask(suspects, grace_s)
        words = {self.rank: mine, **{p: word for p, word in words.items() if p not in asked}}
        return {rank: word.nonzero()[:, 0].tolist() for rank, word in words.items()}


class _MpiExchange:
    """Starts each message of the host at once; the library moves it when polled."""

    def __init__(self, transport: MpiTransport) -> None:
        self._transport = transport
        # Request, peer (None for no single rank) and the bytes to receive (None for sends).
        self.posted: list[tuple[MPI.Request, int | None, int | None]] = []
        self._on_device: list[tuple[int, Tensor, bool]] = []

    def send(self, peer: int, tensor: Tensor) -> None:
        self._post(peer, tensor, False)
        self._transport.bytes_up += tensor.nbytes

    def receive(self, peer: int, tensor: Tensor) -> None:
        self._post(peer, tensor, True)
        self._transport.bytes_down += tensor.nbytes

    def _post(self, peer: int, tensor: Tensor, receives: bool) -> None:
        if tensor.is_cuda:
            self._on_device.append((peer, tensor, receives))
        else:
            self._begin(peer, tensor, receives)

    def start(self) -> None:
        messages, self._on_device = self._on_device, []
        if messages:
            # MPI ignores streams: kernels that use the memory must have ended.
            torch.cuda.current_stream(messages[0][1].device).synchronize()
        for message in messages:
            self._begin(*message)

    def _begin(self, peer: int, tensor: Tensor, receives: bool) -> None:
        comm = self._transport._comm
        function = comm.Irecv if receives else comm.Isend
        for part in message_parts(tensor):
            request = function(buffer_of(part), peer, TAG)
            self.posted.append((request, peer, part.nbytes if receives else None))

    def wait(self) -> None:
        self.start()
        posted, self.posted = self.posted, []
        if posted:
            requests, peers, sizes = map(list, zip(*posted, strict=True))
            self._transport.finish(requests, peers, sizes)


def _pending(requests: Sequence[MPI.Request], peers: Sequence[int | None]) -> list[int]:
    waiting = (p for r, p in zip(requests, peers, strict=False) if r != MPI.REQUEST_NULL)
    return sorted({peer for peer in waiting if peer is not None})


def _of_another_size() -> CommError:
    reason = "this rank waits for more bytes or fewer: the ranks cut tensors differently"
    remedy = "Give all ranks the same staging, and buckets on the same kind of device"
    return CommError("message", "of another size", reason, remedy)


def buffer_of(tensor: Tensor) -> list[Any]:
    """Return what mpi4py takes for the bytes of a contiguous tensor."""
    if tensor.is_cuda:
        return [tensor.detach().view(-1).view(torch.uint8), MPI.BYTE]
    return [as_bytes(tensor), MPI.BYTE]
