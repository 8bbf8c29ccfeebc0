# SPDX-License-Identifier: Apache-2.0
"""What the ranks did in a round, action by action: pictures, and traces for Perfetto."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from wavemare.files import atomic_write_bytes, atomic_write_text
from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.draw import chrome_trace, png, svg


def build_timeline(title: str, ranks: Sequence[Sequence[Event]]) -> Timeline | None:
    """Put the events of all ranks on one clock that begins with the first event.

    Micro-batches are counted from the earliest one as well.

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


def save_traces(folder: Path, events: Mapping[tuple[str, str], Sequence[Sequence[Event]]]) -> None:
    """Write ``timeline-CASE.png``, ``timeline-CASE.svg`` and ``trace-CASE.json`` for each case.

    Args:
        folder: Is made if it is missing.
        events: Of each rank, by the case and the title of a timeline.
    """
    for case in dict.fromkeys(case for case, _ in events):
        timelines = [
            timeline
            for (own, title), ranks in events.items()
            if own == case and (timeline := build_timeline(title, ranks))
        ]
        if timelines:
            folder.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(folder / f"timeline-{case}.png", png(timelines))
            atomic_write_text(folder / f"timeline-{case}.svg", svg(timelines))
            atomic_write_text(folder / f"trace-{case}.json", chrome_trace(timelines))
