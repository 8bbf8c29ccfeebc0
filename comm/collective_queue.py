# SPDX-License-Identifier: Apache-2.0
"""Runs collectives in the background, in call order, while the main thread computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from wavemare.comm.statistics import Statistics
from wavemare.comm.waits import joining
from wavemare.errors import CommError

__all__ = ["CollectiveQueue", "Handle"]


class Handle:
    """A collective that was called and may still run.

    Args:
        thread: Runs it.

    Attributes:
        stats: What it did; complete after `wait`.
    """

    def __init__(self, thread: threading.Thread | None = None) -> None:
        self.stats = Statistics()
        self._thread = thread
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None
        self._callbacks: list[Callable[[Handle], None]] = []
        self._lock = threading.Lock()
        self._device_end: Any = None

    def done(self) -> bool:
        """Whether it has ended, with or without an error."""
        return self._ended.is_set()

    def wait(self) -> Any:
        """Wait for the end; may be called several times.

        On a GPU the current stream waits, not the host.

        Returns:
            The collective's result; the given tensor if it works in place.

        Raises:
            CommError: A peer was lost, or another rank called another collective.
        """
        with joining(self._thread):
            self._ended.wait()
        if self._error is not None:
            raise self._error
        if self._device_end is not None:
            self._join_stream()
        return self._result

    def _join_stream(self) -> None:
        result = self._result if isinstance(self._result, tuple) else (self._result,)
        for tensor in result:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self._device_end)
            # The worker's stream allocated the memory and would reuse it too early.
            tensor.record_stream(stream)

    def then(self, callback: Callable[[Handle], None]) -> None:
        """Call a function at the end, on the worker's thread; at once if it has ended.

        If it raises on the worker's thread, all later collectives fail with that error.
        """
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self, result: Any, error: BaseException | None, device_end: Any = None) -> None:
        """Set the result or the error, and call the callbacks."""
        with self._lock:
            self._result, self._error, self._device_end = result, error, device_end
            self._ended.set()
        for callback in self._callbacks:
            callback(self)
        self._callbacks.clear()


class CollectiveQueue:
    """One thread that runs collectives in the order in which they were submitted.

    Waiting for messages and running kernels release the interpreter's lock.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self._streams: dict[torch.device, Any] = {}

    def submit(self, work: Callable[[Statistics], Any], device: torch.device) -> Handle:
        """Run a collective after all earlier ones.

        Args:
            work: Fills in statistics; its result is the handle's.
            device: Where its tensors are.

        Raises:
            CommError: The queue has been closed.
        """
        if self._closed:
            reason, remedy = "its communicator has been closed", "Make another one"
            raise CommError("collective", self._name, reason, remedy)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        handle = Handle(self._thread)
        ready = None
        if device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(device))
        self._queue.put((handle, work, device, ready))
        return handle

    def close(self) -> None:
        """Finish the submitted collectives and end the thread; a second call does nothing."""
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            with joining(self._thread):
                self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            handle, work, device, ready = item
            result = error = end = None
            try:
                if self._failure is not None:
                    raise _broken(self._failure)
                result, end = self._run_one(handle, work, device, ready)
            except BaseException as caught:  # the thread goes on, to fail later collectives
                error = caught
                self._failure = self._failure or caught
            try:
                handle.finish(result, error, end)
            except BaseException as caught:
                self._failure = self._failure or caught
            # Free the handle's tensors before waiting for the next item.
            del item, handle, work, result, error

    def _run_one(self, handle: Handle, work: Any, device: torch.device, ready: Any) -> Any:
        if ready is None:
            return work(handle.stats), None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            result = work(handle.stats)
            end = torch.cuda.Event()
            end.record(stream)
        return result, end


def _broken(failure: BaseException) -> CommError:
    if isinstance(failure, CommError):
        return CommError(failure.key, failure.value, failure.reason, failure.remedy)
    return CommError(
        "collective",
        type(failure).__name__,
        f"an earlier collective has failed ({failure}), so that the ranks may be out of step",
        "Mend what failed first",
    )
