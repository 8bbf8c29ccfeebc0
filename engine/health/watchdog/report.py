# SPDX-License-Identifier: Apache-2.0
"""What a rank writes when a run is ended because its ranks only wait."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from pathlib import Path

from wavemare.engine.health.watchdog.status import PeerAddress, RankStatus
from wavemare.engine.observe.progress import Progress

__all__ = ["report_text", "write_report"]

_PER_LINE = 8
"""Actions of the plan in a line."""


def write_report(
    folder: str, where: PeerAddress, status: RankStatus, progress: Progress, headline: str
) -> str | None:
    """Write ``rank_NNNNN.txt``.

    Returns:
        Why it could not be written, or None.
    """
    file = Path(folder) / f"rank_{where.rank:05d}.txt"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(report_text(where, status, progress, headline), encoding="utf-8")
    except OSError as error:
        return f"{where}: no report in {file} ({error.strerror})"
    return None


def report_text(where: PeerAddress, status: RankStatus, progress: Progress, headline: str) -> str:
    """Return place, last finished action, plan and the stacks of all threads."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    lines = [
        f"{stamp} {where}",
        headline,
        f"{status}",
        f"last finished: {status.finished}",
        *_grid(progress.plan, progress.position),
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue  # the watchdog itself
        trains = " (trains)" if ident == progress.thread else ""
        lines += ["", f"thread {names.get(ident, ident)}{trains}, innermost call last:"]
        lines += [line.rstrip() for line in traceback.format_stack(frame)]
    return "\n".join(lines) + "\n"


def _grid(plan: tuple[str, ...], position: int) -> list[str]:
    """Return the plan of this rank's step; the action it is in stands in brackets."""
    if not plan:
        return []
    words = [f"[{a}]" if n == position else a for n, a in enumerate(plan)]
    width = max(map(len, words)) + 1
    rows = [words[start : start + _PER_LINE] for start in range(0, len(words), _PER_LINE)]
    return ["plan of this step:", *("  " + "".join(f"{w:<{width}}" for w in row) for row in rows)]
