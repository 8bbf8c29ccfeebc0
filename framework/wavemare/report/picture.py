# SPDX-License-Identifier: Apache-2.0
"""The measured timelines of runs as one picture, below each other on one time axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from wavemare.errors import DataError, PlanError
from wavemare.pipeline.clock.simulate import Event, Timeline
from wavemare.pipeline.draw import png
from wavemare.pipeline.plan.plan import Action
from wavemare.report.runs import RankTrace, RunFacts, Trace

_STEPS = 2
"""Of the steps that a run has noted so many are drawn: labels of more are too small to read."""


def timeline_picture(runs: Sequence[RunFacts]) -> bytes:
    """Return a PNG with what each rank of the runs did in the first two steps that were noted.

    Args:
        runs: In their order from above.

    Raises:
        DataError: A run has no timeline.
    """
    return png([_timeline(run) for run in runs])


def _timeline(run: RunFacts) -> Timeline:
    trace: Trace | None = run.trace
    if trace is None:
        reason = "no rank has noted its actions"
        remedy = "Train with --trace_steps 1 or more, and for some twenty steps"
        raise DataError("--picture", run.name, reason, remedy)
    ranks = tuple(tuple(_events(rank)) for rank in trace.ranks)
    return Timeline(f"{run.name} ({run.layout['schedule'] or 'no schedule'}), measured", ranks)


def _events(rank: RankTrace) -> Iterator[Event]:
    """Yield the actions that begin in the steps that are drawn; words are left out."""
    start, end = rank.steps[0][0], rank.steps[:_STEPS][-1][1]
    for span in rank.spans:
        if start <= span.start_s < end:
            try:
                yield Event(Action.parse(span.text), span.start_s, span.end_s)
            except PlanError:
                continue
