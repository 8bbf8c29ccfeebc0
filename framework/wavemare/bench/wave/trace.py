# SPDX-License-Identifier: Apache-2.0
"""A tick-tock step as it ran, collectives included: as a trace and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from wavemare.bench.wave.record import StepRecorder, WatchingExecutor
from wavemare.bench.wave.request import TICK_TOCK, WaveRequest
from wavemare.bench.wave.systems import Systems
from wavemare.files import atomic_write_bytes, atomic_write_text
from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw import chrome_trace, png
from wavemare.pipeline.plan.action import COMPUTE

__all__ = ["save_trace", "wave_timelines"]

_SHOWN_MICRO_BATCHES = 2.5


def save_trace(request: WaveRequest, systems: Systems) -> None:
    """Run a tick-tock step over the links as they are, and write rank 0's part of it.

    All ranks must call it. It does nothing if no file is asked for.

    Args:
        request: Names the files: of the whole step (trace), and of its first part (picture).
        systems: Runs the step.
    """
    if request.trace is None and request.timeline is None:
        return
    recorder = StepRecorder()
    systems.clear()
    dist.barrier()
    executor = systems.step(TICK_TOCK, recorder.record, WatchingExecutor)
    assert isinstance(executor, WatchingExecutor)
    passes = [event for event in recorder.events if event.action.kind in COMPUTE]
    dist.barrier()  # gloo's threads have noted all ends by then
    if dist.get_rank() != 0:
        return
    waves = wave_timelines([*passes, *executor.sums])
    if request.trace is not None:
        atomic_write_text(Path(request.trace), chrome_trace(waves))
    if request.timeline is not None:
        end_s = max(wave.ranks[0][-1].end_s for wave in waves)
        shown_s = min(end_s, end_s * _SHOWN_MICRO_BATCHES / request.micro_batches)
        atomic_write_bytes(Path(request.timeline), png(waves, end_s=shown_s))


def wave_timelines(events: Sequence[Event]) -> list[Timeline]:
    """Return what one rank did, for each wave, on a clock that begins with the first event.

    Args:
        events: Of both waves, in any order.
    """
    origin = min(event.start_s for event in events)
    ordered = sorted(events, key=lambda event: event.start_s)
    return [
        Timeline(
            f"{name}, measured",
            (
                tuple(
                    Event(action, start_s - origin, end_s - origin)
                    for action, start_s, end_s in ordered
                    if action.wave == wave
                ),
            ),
        )
        for wave, name in enumerate(("tick", "tock"))
    ]
