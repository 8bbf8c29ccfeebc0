# SPDX-License-Identifier: Apache-2.0
"""Passes of micro-batches, alone or two in turns on one device.

A collective calls `wait` where it needs the result. Within a pair the other pass then runs up to
its own next collective, or to its end. So the order of passes and collectives depends on the model
alone, and is the same on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from wavemare.engine.observe.progress import PROGRESS
from wavemare.pipeline.plan.plan import Action, Kind

_SUMS = {Kind.FORWARD: Kind.SUM_OUTPUT, Kind.BACKWARD: Kind.SUM_GRADIENT}

_running = threading.local()


def wait(work: Work) -> None:
    """Wait for a collective. Within a pair the other pass runs meanwhile."""
    turns: _Turns | None = getattr(_running, "turns", None)
    if turns is None:
        work.wait()
    else:
        turns.wait(work)


class Pass(NamedTuple):
    """A forward or backward pass.

    Args:
        kind: Which.
        micro_batch: Its number.
        work: What it does.
    """

    kind: Kind
    micro_batch: int
    work: Callable[[], Any]


class Recorder(Protocol):
    """Learns of the parts of passes between two collectives, and of the waits."""

    def now(self) -> float:
        """Return the time in seconds."""

    def note(self, action: Action, start_s: float, end_s: float) -> None:
        """Take a part of a pass, or a wait after it; its ``stage`` counts from 0 in each pass."""


class PassRunner:
    """Runs the passes of an engine, alone or in pairs of a backward and a forward pass.

    The forward pass runs in the caller's thread, the backward pass in another one. Only one thread
    computes at any time. Collectives of `wavemare.parallel` call `wait`, which gives way.

    Args:
        device: Of the model.

    Attributes:
        recorder: None if nobody wants to know.
        collectives: How many passes have waited for.
        while_waiting: Called in a pass that has started a collective, before the other one runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._generators = default_generators(device)
        self._thread = ThreadPoolExecutor(1, "wavemare-backward")
        self.recorder: Recorder | None = None
        self.collectives = 0
        self.while_waiting: Callable[[], None] | None = None

    def alone(self, only: Pass) -> Any:
        """Run a pass; return what its work returns."""
        return _Turns(self, only).run()

    def pair(self, first: Pass, second: Pass) -> tuple[Any, Any]:
        """Run two passes in turns; return what they return.

        Afterwards the generators have the forward pass's state. An error in one ends both.
        """
        turns, others = _Turns(self, first), _Turns(self, second)
        turns.other, others.other = others, turns
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        states = self.random_states()
        began = self._thread.submit(self._beside, turns, stream)
        try:
            result = others.run(after_other=states)
        except _OtherFailedError:
            began.result()  # raises what ended it
            raise
        except BaseException:
            began.exception()
            raise
        after = self.random_states()
        result_of_first = began.result()
        PROGRESS.thread = threading.get_ident()
        self.set_random_states(after)
        return result_of_first, result

    @staticmethod
    def _beside(turns: _Turns, stream: Any) -> Any:
        if stream is not None:
            torch.cuda.set_device(stream.device)
            torch.cuda.set_stream(stream)
        return turns.run()

    def random_states(self) -> list[Tensor]:
        """Return the states of the device's and the processor's generators."""
        return [generator.get_state() for generator in self._generators]

    def set_random_states(self, states: list[Tensor]) -> None:
        """Put states of `random_states` back."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


class _OtherFailedError(BaseException):
    """Ends a pass whose partner has failed."""


class _Turns:
    """One pass that runs.

    Attributes:
        other: Its partner, if it has one.
        turn: Released when it may go on.
        has_ended: Whether it has.
        has_failed: Whether an error ended it.
    """

    def __init__(self, runner: PassRunner, run: Pass) -> None:
        self._runner = runner
        self._work = run.work
        self._part = Action(run.kind, 0, run.micro_batch)
        self._began_s = 0.0
        self.other: _Turns | None = None
        self.turn = threading.Semaphore(0)
        self.has_ended = self.has_failed = False

    def run(self, after_other: list[Tensor] | None = None) -> Any:
        _running.turns = self
        try:
            if after_other is not None:
                self._resume(after_other)
            self._begin()
            # On a GPU autograd would use a thread of its own, which has no turns.
            with torch.autograd.set_multithreading_enabled(False):
                result = self._work()
            self._end(self._part)
            return result
        except BaseException:
            self.has_failed = True
            raise
        finally:
            _running.turns = None
            self.has_ended = True
            if self.other is not None:
                self.other.turn.release()

    def wait(self, work: Work) -> None:
        if self._runner.while_waiting is not None:
            self._runner.while_waiting()
        self._end(self._part)
        self._runner.collectives += 1
        try:
            if self.other is not None:
                self._give_way(self.other)
        finally:
            self._begin()
            work.wait()
        self._end(self._part._replace(kind=_SUMS[self._part.kind]))
        self._part = self._part._replace(stage=self._part.stage + 1)
        self._begin()

    def _give_way(self, other: _Turns) -> None:
        if not other.has_ended:
            # A backward pass that runs a checkpointed layer again has put old states in place.
            states = self._runner.random_states()
            other.turn.release()
            self._resume(states)
        if other.has_failed:
            raise _OtherFailedError

    def _resume(self, states: list[Tensor]) -> None:
        self.turn.acquire()
        self._runner.set_random_states(states)

    def _begin(self) -> None:
        PROGRESS.thread = threading.get_ident()  # whose waits the watchdog looks at
        if self._runner.recorder is not None:
            self._began_s = self._runner.recorder.now()

    def _end(self, action: Action) -> None:
        recorder = self._runner.recorder
        if recorder is not None:
            recorder.note(action, self._began_s, recorder.now())


def default_generators(device: torch.device) -> list[torch.Generator]:
    """Return the generators that operations on a device draw from: the processor's comes first."""
    if device.type != "cuda":
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]
