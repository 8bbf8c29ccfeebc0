# SPDX-License-Identifier: Apache-2.0
"""Measured timelines as pictures and as traces for Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wavemare.files import atomic_write_bytes, atomic_write_text
from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw import chrome_trace, png, svg

__all__ = ["build_timeline", "save_traces"]


def build_timeline(title: str, ranks: Sequence[Sequence[Event]]) -> Timeline | None:
    """Put the events of all ranks on one clock that begins with the first event.

    Micro-batches are counted from the earliest one as well.

    Args:
        title: Of the timeline.
        ranks: For each rank its events in any order, by a clock that all ranks share.

    Returns:
        The timeline; None if there is no event.
    """
    everything = [event for events in ranks for event in events]
    if not everything:
        return None
    origin = min(event.start_s for event in everything)
    first = min(event.action.micro_batch for event in everything)

    def shifted(event: Event) -> Event:
        action = event.action._replace(micro_batch=event.action.micro_batch - first)
        return Event(action, event.start_s - origin, event.end_s - origin)

    return Timeline(
        title,
        tuple(
            tuple(sorted(map(shifted, events), key=lambda event: event.start_s)) for events in ranks
        ),
    )


def save_traces(
    folder: Path, events: Mapping[tuple[str, int], Sequence[Sequence[Event]]], rank: int
) -> None:
    """Write ``timeline-mM.png``, ``timeline-mM.svg`` and ``trace-mM.json`` for each M, on rank 0.

    Args:
        folder: Where to.
        events: For each system and number of micro-batches, those of all ranks.
        rank: Of this process.
    """
    if rank != 0:
        return
    for count in {count for _, count in events}:
        timelines = [
            timeline
            for (name, number), ranks in events.items()
            if number == count and (timeline := build_timeline(f"{name}, M={count}", ranks))
        ]
        if timelines:
            atomic_write_bytes(folder / f"timeline-m{count}.png", png(timelines))
            atomic_write_text(folder / f"timeline-m{count}.svg", svg(timelines))
            atomic_write_text(folder / f"trace-m{count}.json", chrome_trace(timelines))
