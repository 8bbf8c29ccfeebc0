# SPDX-License-Identifier: Apache-2.0
"""Plans and timelines as CSV, one line per action."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.plan.action import Action
from wavemare.pipeline.plan.plan import Plan

__all__ = ["to_csv"]

_COLUMNS = ("rank", "index", "kind", "stage", "micro_batch", "version", "wave")
_TIMES = ("start_s", "end_s")


def to_csv(subject: Plan | Timeline) -> str:
    """Return a table of all actions: rank, index, kind, stage, micro_batch, version and wave.

    Args:
        subject: A timeline's table has start_s and end_s in seconds as well. A plan's begins with
            a comment, ``# plan ...``, with what the lines do not say. To read a plan back, take
            its text form.

    Returns:
        Lines that end in a line feed; the first one after the comment names the columns.
    """
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    if isinstance(subject, Plan):
        header = str(replace(subject, ranks=())).rstrip()
        file.write(f"# {header} ranks={len(subject.ranks)}\n")
        writer.writerow(_COLUMNS)
        for rank, actions in enumerate(subject.ranks):
            writer.writerows([rank, index, *_fields(a)] for index, a in enumerate(actions))
    else:
        writer.writerow([*_COLUMNS, *_TIMES])
        for rank, events in enumerate(subject.ranks):
            writer.writerows(
                # repr keeps every bit of a time, which is a float.
                [rank, index, *_fields(event.action), repr(event.start_s), repr(event.end_s)]
                for index, event in enumerate(events)
            )
    return file.getvalue()


def _fields(action: Action) -> list[str | int]:
    kind, *numbers = action
    return [kind.name.lower(), *numbers]
