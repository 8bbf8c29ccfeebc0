# SPDX-License-Identifier: Apache-2.0
"""The report that each rank writes when the watchdog ends a run."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path

from wavemare.engine.health.watchdog.status import PeerAddress, RankStatus
from wavemare.engine.observe.progress import Progress

__all__ = ["write_report"]

_PER_LINE = 8
"""Actions of the plan in a line."""


def write_report(
    folder: str, where: PeerAddress, status: RankStatus, progress: Progress, headline: str
) -> str | None:
    """Write ``rank_NNNNN.txt``: place, last finished action, plan and the stacks of all threads.

    Returns:
        Why it could not be written, or None.
    """
    path = Path(folder) / f"rank_{where.rank:05d}.txt"
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} {where}",
        headline,
        f"{status}",
        f"last finished: {status.finished}",
        *_grid(progress.plan, progress.position),
        f"thread 0x{progress.thread or 0:016x} trains",
    ]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n\n")
            file.flush()
            faulthandler.dump_traceback(file)
    except OSError as error:
        return f"{where}: no report in {path} ({error.strerror})"
    return None


def _grid(plan: tuple[str, ...], position: int) -> list[str]:
    """Return the plan of this rank's step; the present action stands in brackets."""
    if not plan:
        return []
    words = [f"[{a}]" if n == position else a for n, a in enumerate(plan)]
    width = max(map(len, words)) + 1
    rows = [words[start : start + _PER_LINE] for start in range(0, len(words), _PER_LINE)]
    return ["plan of this step:", *("  " + "".join(f"{w:<{width}}" for w in row) for row in rows)]
