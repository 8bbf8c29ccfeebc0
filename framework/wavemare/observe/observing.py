# SPDX-License-Identifier: Apache-2.0
"""What a run notes beside its metrics: some steps as they ran, memory, checkpoints, warnings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wavemare.engine.observe.trace import StepTrace
from wavemare.observe.events import Events
from wavemare.observe.lines import go_without

__all__ = ["Observing"]

_SETTLING = 10
"""Steps before the noted ones: the first ones take longer."""
_STEP = "train_batch"
"""How engines that train whole steps tell of one, and how a report knows it."""


class Observing:
    """Follows one rank's training for the report; nothing of it waits for other ranks.

    Args:
        events: Of this rank.
        folder: The run's.
        rank: Global rank of this process.
        trace_steps: How many steps are noted action by action; 0 for none.
        first_step: The first one that is trained, from 1.
        last_step: The last one.
        settled: The first one that runs as the later ones do (after a synchronous warm-up).
    """

    def __init__(
        self,
        events: Events,
        folder: Path,
        rank: int,
        *,
        trace_steps: int,
        first_step: int,
        last_step: int,
        settled: int,
    ) -> None:
        self.events = events
        self._folder = folder
        self._rank = rank
        count = min(trace_steps, last_step - first_step + 1)
        begin = max(first_step + _SETTLING, settled + 1)
        self._begin = min(begin, last_step - count + 1)
        self._end = self._begin + count - 1
        self._trace: StepTrace | None = None

    @contextmanager
    def step(self, step: int, engine: Any) -> Iterator[None]:
        """Follow an optimizer step, which is trained inside."""
        if step == self._begin and step <= self._end:
            self._trace = StepTrace()
            self._trace.begin()
        self.events.step = step
        try:
            if self._trace is None:
                yield
            else:
                with _whole_step(self._trace):
                    yield
        except BaseException:
            self.drop()  # whoever catches it may train on, and would be followed for ever
            raise
        # Whoever has trained a step did so with rank 0, which had prepared the folder before.
        self.events.open()
        if step == self._end:
            self.end(engine)

    def end(self, engine: Any) -> None:
        """Write the steps that are being noted, if any are, and note no more."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.end()
        stage = int(getattr(engine, "stage_id", 0))
        try:
            trace.save(self._folder, rank=self._rank, stage=stage, first_step=self._begin)
        except OSError as error:
            go_without(self._folder, error)

    def drop(self) -> None:
        """Forget the steps that are being noted, and note no more."""
        if self._trace is not None:
            self._trace.end()
            self._trace = None

    def note_memory(self, step: int) -> int:
        """Note the most memory since the last call (without an accelerator: at this moment).

        Returns:
            Bytes of this rank.
        """
        from deepspeed.accelerator import get_accelerator

        accelerator = get_accelerator()
        if accelerator.device_name() == "cpu":
            used = int(accelerator.memory_allocated())  # its peaks are those of its own readings
        else:
            used = int(accelerator.max_memory_allocated())
            accelerator.reset_peak_memory_stats()
        self.events.note("memory", step, bytes=used)
        return used

    @contextmanager
    def saving(self, step: int, tag: str) -> Iterator[None]:
        """Note how long the training waits for a checkpoint, which is saved inside."""
        start = time.perf_counter()
        yield
        self.saved(step, tag, seconds=time.perf_counter() - start)

    def saved(self, step: int, tag: str, *, seconds: float) -> None:
        """Note how long the training has waited for a checkpoint."""
        self.events.note("checkpoint", step, tag=tag, seconds=seconds)


@contextmanager
def _whole_step(trace: StepTrace) -> Iterator[None]:
    """Note what is done inside as a step, unless the engine tells of one itself."""
    before = len(trace.spans)
    trace.enter(_STEP)
    yield
    trace.leave()
    if any(what == _STEP for what, *_ in trace.spans[before:-1]):
        trace.spans.pop()  # of the loop around the engine's own
