# SPDX-License-Identifier: Apache-2.0
"""Stops all ranks after the same step when one of them gets a signal.

Cluster schedulers send SIGTERM some seconds before they kill a job: to one rank, to all ranks or to
the launcher, at different moments. A checkpoint needs all ranks at one step.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Self

from wavemare.comm.waits import told_to_end
from wavemare.errors import ConfigError, check_number

_PREFIX = "wavemare/interruption"
_ASKED = "asked"
_STOP_AT = "stop_at"


class Interruption:
    """Lets all ranks stop after the same step once any of them has got a signal.

    Use it as a context manager around a training loop, on every rank, and call `stops_after` after
    every step. In the block the signals only set a flag. Rank 0 learns of the flag between two of
    its steps and writes the number of a later step into the store of the process group. The other
    ranks read it between their steps: no rank waits for another, and all stop after the same step.
    After a stop the signals stay ignored, since schedulers repeat them while the checkpoint is
    written. Otherwise the block restores the handlers that it found.

    Outside the main thread, where Python sets no handlers, it only follows the other ranks.

    Args:
        lead: How many steps more than rank 0 another rank can have finished while rank 0 stands
            between two steps. 0 if every step needs all ranks, as with ZeRO and 1F1B.
        signals: The signals to notice.
        store: A ``torch.distributed`` store that all ranks share; by default the default group's.
        rank: This process's place among them, from 0; by default its global rank.

    Raises:
        ConfigError: The lead is negative.
    """

    def __init__(
        self,
        *,
        lead: int = 0,
        signals: Sequence[int] = (signal.SIGTERM,),
        store: Any = None,
        rank: int | None = None,
    ) -> None:
        from deepspeed.accelerator import get_accelerator
        from torch import distributed

        check_number(ConfigError, "lead", lead, whole=True)
        self._lead = lead
        self._signals = tuple(signals)
        self._given_store = store
        self._rank = distributed.get_rank() if rank is None else rank
        self._pace = _Pace(get_accelerator())
        self._previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._signalled = False
        self._store: Any = None
        self._stop_at: int | None = None
        self._stopped = False

    @classmethod
    def of(cls, engine: Any, **options: Any) -> Self:
        """Return one for the training loop of an engine, with the lead of its schedule.

        Args:
            engine: Of `wavemare.initialize`.
            options: ``signals``, ``store`` and ``rank`` of the class.
        """
        return cls(lead=engine.step_lead, **options)

    def __enter__(self) -> Self:
        from torch.distributed import distributed_c10d

        self._stop_at, self._stopped = None, False
        store = self._given_store
        if store is None:
            store = distributed_c10d._get_default_store()
        # A part that no earlier loop has written: each rank counts its own, and all enter the same.
        loops = store.add(f"{_PREFIX}/{self._rank}/loops", 1)
        self._store = distributed_c10d.PrefixStore(f"{_PREFIX}/{loops}", store)
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._previous[number] = signal.signal(number, self._note)
                # Libraries' system calls go on instead of failing with EINTR.
                signal.siginterrupt(number, False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            # None stands for a handler that was not set by Python and cannot be put back by it.
            handler = signal.SIG_DFL if previous is None else previous
            signal.signal(number, signal.SIG_IGN if self._stopped else handler)
        self._previous.clear()
        self._store = None

    def stops_after(self, step: int) -> bool:
        """Return whether the ranks stop now; call it once after every step, on every rank.

        Args:
            step: How many steps this rank has finished, counted alike on all ranks.

        Raises:
            ConfigError: The others stop after a step that this rank has passed: ``lead`` is too
                small. A checkpoint would mix the steps.
        """
        self._pace.end_step()
        if self._stop_at is None:
            self._stop_at = self._ask(step)
        if self._stop_at is None:
            return False
        if step > self._stop_at:
            reason = f"this rank had finished step {step} when step {self._stop_at} became the last"
            raise ConfigError("lead", self._lead, reason, "Give a larger lead")
        self._stopped = step == self._stop_at
        return self._stopped

    def _ask(self, step: int) -> int | None:
        """Return the step to stop after, if there is one, by one or two calls to the store."""
        from torch.distributed import DistError

        if self._store is None:
            return None
        try:
            return self._decide(step) if self._rank == 0 else self._follow()
        except DistError as error:  # its process has gone, and the launcher ends this one soon
            logging.getLogger(__name__).debug("the store does not answer: %s", error)
            return None

    def _decide(self, step: int) -> int | None:
        # No other rank has passed the step chosen here. Until rank 0 begins its next step, no rank
        # finishes a step beyond step + lead, and a rank asks about pace.ahead steps more at most
        # (see _Pace). Rank 0 begins its next step only when the store holds the number:
        # `compare_set` waits for the reply, `set` might not.
        if not self._signalled and not self._store.check([_ASKED]):
            return None
        stop_at = str(step + self._lead + self._pace.ahead + 1)
        return int(self._store.compare_set(_STOP_AT, "", stop_at))

    def _follow(self) -> int | None:
        if self._signalled:
            self._store.add(_ASKED, 1)
            self._signalled = False
        return int(self._store.get(_STOP_AT)) if self._store.check([_STOP_AT]) else None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self._signalled = True
            told_to_end.set()
            return
        # A forked child, of a data loader for example, has inherited this handler and must end.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


class _Pace:
    """Keeps a process at most one step ahead of its accelerator.

    Calls that start work on an accelerator return before it is done. Without a bound, a process
    could ask about a step long before rank 0 has begun it, although its device cannot finish it.
    Waiting for the step before the last one leaves the device a whole step of work.
    """

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._waits = not accelerator.is_synchronized_device()
        # How many steps the process may be ahead of its device when `end_step` returns.
        self.ahead = int(self._waits and accelerator.Event is not None)
        self._last_step: Any = None

    def end_step(self) -> None:
        """Mark the end of a step in the device's work, and wait for the end of the one before."""
        if not self._waits:
            return
        if not self.ahead:  # a device without events
            self._accelerator.synchronize()
            return
        if self._last_step is not None:
            self._last_step.synchronize()
        self._last_step = self._accelerator.Event()
        self._last_step.record()
