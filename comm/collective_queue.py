# SPDX-License-Identifier: Apache-2.0
"""Runs collectives in the background, in call order, and says what they did."""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wavemare.comm.waits import failing, joining, waiting
from wavemare.errors import CommError

_EXIT_S = 60.0  # for pending collectives when the process ends
_READING = threading.Lock()


# --- what a collective did ------------------------------------------------------------------------


class Timer:
    """Measures a piece of work: on a GPU the work itself, between events of the current stream.

    Args:
        device: Where the work is; it begins now.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._begin = self._now()

    def stop(self) -> None:
        """The work is complete, or launched."""
        self._end = self._now()

    @property
    def ended(self) -> bool:
        """Whether the GPU has done the work; the host does not wait."""
        return not self._on_gpu or self._end.query()

    @property
    def seconds(self) -> float:
        """Of work that has ended."""
        return (
            self._begin.elapsed_time(self._end) / 1e3 if self._on_gpu else self._end - self._begin
        )

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass
class Statistics:
    """Statistics of one call.

    Attributes:
        executor: Its name.
        payload_bytes: Bytes of the bucket.
        density: Mean share of a rank's non-zero blocks; None without masks.
        union: Share of the blocks that are non-zero on some rank; None without masks.
        bytes_up: Bytes that this rank sent, masks included.
        bytes_down: Bytes that this rank received.
        predicted_s: Predicted seconds; None without a prediction.
        actual_s: Measured seconds; on a GPU known when it has ended, as those of the phases.
        phases_s: Seconds of ``mask``, ``metadata``, ``plan``, ``pack``, ``push``, ``reduce``,
            ``pull``, ``unpack``, ``dense``.
    """

    executor: str = ""
    payload_bytes: int = 0
    density: float | None = None
    union: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    predicted_s: float | None = None
    actual_s: float = 0.0
    phases_s: dict[str, float] = field(default_factory=dict)
    _running: deque[tuple[str | None, Timer]] = field(default_factory=deque, repr=False)

    def add(self, phase: str, seconds: float) -> None:
        """Add the time of a phase."""
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def note(self, phase: str | None, timer: Timer) -> None:
        """Stop a timer of a phase, or of the whole call."""
        timer.stop()
        self._running.append((phase, timer))
        self.read_timers()

    def read_timers(self) -> bool:
        """Fill in the times of what has ended; whether that is everything."""
        with _READING:  # the caller and the thread of the collectives may both look
            while self._running and self._running[0][1].ended:
                phase, timer = self._running.popleft()
                if phase is None:
                    self.actual_s = timer.seconds
                else:
                    self.add(phase, timer.seconds)
            return not self._running


class Totals:
    """Sums over all calls since the last `take`; calls that have ended are not kept.

    Attributes:
        num_calls: Number of calls so far, whether taken or not.
    """

    def __init__(self) -> None:
        self.num_calls = 0
        self._pending: deque[Statistics] = deque()
        self._lock = threading.Lock()  # threads of collectives add, and another one takes
        self._begin()

    def _begin(self) -> None:
        self._figures: defaultdict[str, float] = defaultdict(float)
        self._looked: defaultdict[str, int] = defaultdict(int)

    def add(self, call: Statistics) -> None:
        """Add a call; on a GPU it counts from when it has ended."""
        with self._lock:
            self.num_calls += 1
            self._pending.append(call)
            self._count_ended()

    def _count_ended(self) -> None:
        while self._pending and self._pending[0].read_timers():
            self._count(self._pending.popleft())

    def _count(self, call: Statistics) -> None:
        figures = self._figures
        figures["sparse_payload_bytes"] += call.payload_bytes
        figures["sparse_bytes_up"] += call.bytes_up
        figures["sparse_bytes_down"] += call.bytes_down
        figures["sparse_seconds"] += call.actual_s
        figures[f"sparse_calls_{call.executor}"] += 1
        if call.predicted_s is not None:
            figures["sparse_predicted_seconds"] += call.predicted_s
        for name, share in (("sparse_density", call.density), ("sparse_union", call.union)):
            if share is not None and call.payload_bytes:
                figures[name] += share * call.payload_bytes
                self._looked[name] += call.payload_bytes

    def take(self) -> Mapping[str, float]:
        """Return figures of the calls that have ended by name, and begin anew.

        Densities are means weighted by the bytes of the buckets; ``sparse_calls_EXECUTOR`` counts
        calls. Empty if there was no call.
        """
        with self._lock:
            self._count_ended()
            figures = dict(self._figures)
            for name, looked in self._looked.items():
                figures[name] /= looked
            self._begin()
        return figures


# --- collectives that run -------------------------------------------------------------------------


class End:
    """The end of a collective: for the host, when it is launched, and on a GPU.

    Args:
        beside: Whether it is none of the queue's thread, and runs beside those.
    """

    def __init__(self, beside: bool) -> None:
        self.beside = beside
        self.for_host = threading.Event()
        self.on_gpu: Any = None


class Handle:
    """A collective that was called and may still run.

    Args:
        thread: Runs it; None if the library's own does.
        stats: Filled in.
    """

    def __init__(
        self, thread: threading.Thread | None = None, stats: Statistics | None = None
    ) -> None:
        self.end = End(beside=thread is None)
        self._stats = stats or Statistics()
        self._thread = thread
        self._error: BaseException | None = None
        self._result: Any = None
        self._callbacks: list[Callable[[Handle], None]] = []
        self._lock = threading.Lock()

    @property
    def stats(self) -> Statistics:
        """What it did; complete after `wait`, but for times on a GPU that still works on it."""
        if self.done():
            self._stats.read_timers()
        return self._stats

    def done(self) -> bool:
        """Whether it has ended, with or without an error: on a GPU too."""
        end = self.end
        return end.for_host.is_set() and (end.on_gpu is None or end.on_gpu.query())

    def wait(self) -> Any:
        """Wait for the end; may be called several times.

        On a GPU the host waits until all work is launched, and the current stream for its end.

        Returns:
            The collective's result; the given tensor if it works in place.

        Raises:
            CommError: A peer was lost, or another rank called another collective.
        """
        # A thread of the library's has no marks of its own.
        with joining(self._thread) if self._thread else waiting("messages of the library"):
            self.end.for_host.wait()
        if self._error is not None:
            raise self._error
        if self.end.on_gpu is not None:
            result = self._result if isinstance(self._result, tuple) else (self._result,)
            for tensor in result:
                stream = torch.cuda.current_stream(tensor.device)
                stream.wait_event(self.end.on_gpu)
                # The worker's stream allocated the memory and would reuse it too early.
                tensor.record_stream(stream)
        return self._result

    def then(self, callback: Callable[[Handle], None]) -> None:
        """Call a function at the end, on the worker's thread; at once if it has ended.

        If it raises on the worker's thread, all later collectives fail with that error.
        """
        with self._lock:
            if not self.end.for_host.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, result: Any, error: BaseException | None, on_gpu: Any = None) -> None:
        """Set the result or the error, and call the callbacks."""
        with self._lock:
            self._result, self._error, self.end.on_gpu = result, error, on_gpu
            self.end.for_host.set()
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()


Finish = Callable[[], Any]
"""Moves and sums what a collective has looked at; its result is the handle's."""


class CollectiveQueue:
    """One thread that runs collectives in the order in which they were submitted.

    Waiting for messages and running kernels release the interpreter's lock. Each collective first
    looks at its inputs and agrees with the other ranks; on a GPU on a stream of its own, which does
    not wait for the sums of the collectives before.

    Args:
        name: Name of the thread.
        in_turn: Whether collectives of all such queues of this process run one after the other, in
            call order: two of NCCL's communicators in flight may wait for each other for ever
            unless all ranks launch them in the same order.
    """

    _turns = threading.Lock()
    _last: End | None = None

    def __init__(self, name: str, *, in_turn: bool = False) -> None:
        self._name = name
        self._in_turn = in_turn
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._adopted: set[Handle] = set()
        self._is_registered = False
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._in_flight: dict[int, Any] = {}  # the last use of each memory on a GPU

    def submit(
        self,
        look: Callable[[Statistics], Finish],
        device: torch.device,
        inputs: Iterable[Tensor | None] = (),
    ) -> Handle:
        """Run a collective after all earlier ones.

        Args:
            look: Fills in statistics, and returns what is to be done with what it has seen. What
                it makes on a GPU, beside its inputs, must not be used there.
            device: Where its tensors are.
            inputs: What it reads and writes; the caller may free it before a GPU has done so.

        Raises:
            CommError: The queue has been closed.
        """
        self.check_open()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            self._at_exit()
        handle = Handle(self._thread)
        ready = None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        with self._turns:
            before = None
            if self._in_turn:
                before, CollectiveQueue._last = self._last, handle.end
            self._queue.put((handle, look, device, ready, list(inputs), before))
        return handle

    def adopt(self, handle: Handle) -> None:
        """Wait at the end for a collective that the library's own thread runs, too.

        Its failure is that of all later ones.
        """
        with self._turns:
            self._adopted.add(handle)
        self._at_exit()
        handle.then(self._release)

    def _release(self, handle: Handle) -> None:
        with self._turns:
            self._adopted.discard(handle)
        self._failure = self._failure or handle._error

    @property
    def has_failed(self) -> bool:
        """Whether a collective has failed, so that all later ones do."""
        return self._failure is not None

    def wait(self, end: End) -> None:
        """Wait for the end of a collective, for the host."""
        with joining(self._thread):
            end.for_host.wait()

    def check_open(self) -> None:
        """Refuse calls after the end.

        Raises:
            CommError: The queue has been closed.
        """
        if self._closed:
            reason, remedy = "its communicator has been closed", "Make another one"
            raise CommError("collective", self._name, reason, remedy)

    def _at_exit(self) -> None:
        if not self._is_registered:
            self._is_registered = True
            # gloo's call that returns while the interpreter shuts down would abort the process.
            atexit.register(self._finish_at_exit)

    def close(self) -> None:
        """Finish the submitted collectives and end the thread; a second call does nothing."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            with joining(self._thread):
                self._thread.join()
            self._thread = None
        for handle in tuple(self._adopted):
            handle.end.for_host.wait()
        atexit.unregister(self._finish_at_exit)

    def _finish_at_exit(self) -> None:
        self._queue.put(None)
        if failing.is_set():
            return
        if self._thread is not None:
            self._thread.join(_EXIT_S)
        for handle in tuple(self._adopted):
            handle.end.for_host.wait(_EXIT_S)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, look, device, ready, inputs, before = item
            result = error = end = None
            try:
                if before is not None:
                    with waiting("an earlier collective of this process"):
                        before.for_host.wait()
                if self._failure is not None:
                    raise _broken(self._failure)
                if ready is None:
                    result = look(handle.stats)()
                else:
                    looking, moving = self._streams_of(device, inputs)
                    memory = {t.untyped_storage().data_ptr() for t in inputs if t is not None}
                    with torch.cuda.stream(looking):
                        looking.wait_event(ready)
                        for used in memory & self._in_flight.keys():
                            looking.wait_event(self._in_flight[used])
                        finish = look(handle.stats)
                    with torch.cuda.stream(moving):
                        moving.wait_stream(looking)
                        if before is not None and before.on_gpu is not None:
                            moving.wait_event(before.on_gpu)
                        result = finish()
                        end = moving.record_event()
                    left = {p: event for p, event in self._in_flight.items() if not event.query()}
                    self._in_flight = left | dict.fromkeys(memory, end)
                    del finish
            except BaseException as caught:  # the thread goes on, to fail later collectives
                error = caught
                self._failure = self._failure or caught
            try:
                handle.finish(result, error, end)
            except BaseException as caught:
                self._failure = self._failure or caught
            # Free the handle's tensors before waiting for the next item.
            del item, handle, look, result, error, inputs, before

    def _streams_of(self, device: torch.device, inputs: Iterable[Tensor | None]) -> tuple[Any, Any]:
        torch.cuda.set_device(device)  # each thread begins on the first GPU
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        for stream in self._streams[device]:
            for tensor in inputs:
                if tensor is not None and tensor.is_cuda:
                    tensor.record_stream(stream)  # the caller's stream allocated it
        return self._streams[device]


def _broken(failure: BaseException) -> CommError:
    if isinstance(failure, CommError):
        return CommError(failure.key, failure.value, failure.reason, failure.remedy)
    return CommError(
        "collective",
        type(failure).__name__,
        f"an earlier collective has failed ({failure}), so that the ranks may be out of step",
        "Mend what failed first",
    )
