# SPDX-License-Identifier: Apache-2.0
"""Measured timelines as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from wavemare.files import atomic_write_bytes, atomic_write_text
from wavemare.pipeline.clock.timeline import Event, Timeline
from wavemare.pipeline.draw import chrome_trace, png, svg
from wavemare.pipeline.plan.action import Action

__all__ = [
    "build_timeline",
    "draw_timelines",
    "load_timeline",
    "save_timeline",
    "save_timelines",
]


def build_timeline(title: str, ranks: Sequence[Sequence[Event]]) -> Timeline | None:
    """Put the events of all ranks on one clock that begins with the first of them.

    Micro-batches are counted from the earliest one as well.

    Args:
        title: What is shown.
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


def save_timeline(timeline: Timeline, file: Path) -> None:
    """Write a timeline as JSON: ``{"title": ..., "ranks": [[["0F3", start_s, end_s], ...], ...]}``.

    Args:
        timeline: What to write.
        file: Replaced if it exists.
    """
    ranks = [
        [[str(event.action), event.start_s, event.end_s] for event in events]
        for events in timeline.ranks
    ]
    atomic_write_text(file, json.dumps({"title": timeline.title, "ranks": ranks}) + "\n")


def load_timeline(file: Path) -> Timeline:
    """Read what `save_timeline` wrote."""
    content = json.loads(file.read_text(encoding="utf-8"))
    ranks = (
        tuple(Event(Action.parse(action), start, end) for action, start, end in events)
        for events in content["ranks"]
    )
    return Timeline(content["title"], tuple(ranks))


def save_timelines(
    folder: Path, system: str, micro_batches: int, ranks: Sequence[Sequence[Event]], rank: int
) -> None:
    """Write ``SYSTEM-mM.json`` on rank 0, if the system's actions were noted.

    Args:
        folder: Where to.
        system: Its name.
        micro_batches: Per optimizer step.
        ranks: As `build_timeline` takes them.
        rank: Of this process.
    """
    timeline = build_timeline(f"{system}, M={micro_batches}, measured", ranks)
    if rank == 0 and timeline is not None:
        save_timeline(timeline, folder / f"{system}-m{micro_batches}.json")


def draw_timelines(folder: Path, systems: Sequence[str], micro_batches: int) -> None:
    """Draw the saved timelines of several systems, one below the other on one time axis.

    Writes ``timeline-mM.png``, ``timeline-mM.svg`` and ``trace-mM.json`` (for Perfetto).

    Args:
        folder: Where `save_timelines` wrote.
        systems: Names, in their order from above; those without a timeline are passed over.
        micro_batches: Per optimizer step.
    """
    files = [folder / f"{system}-m{micro_batches}.json" for system in systems]
    timelines = [load_timeline(file) for file in files if file.exists()]
    if timelines:
        name = f"m{micro_batches}"
        atomic_write_bytes(folder / f"timeline-{name}.png", png(timelines))
        atomic_write_text(folder / f"timeline-{name}.svg", svg(timelines))
        atomic_write_text(folder / f"trace-{name}.json", chrome_trace(timelines))
