# SPDX-License-Identifier: Apache-2.0
"""From what all ranks tell to the rank that holds up the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wavemare.engine.watchdog.standing import Absent, Standing, Whereabouts

__all__ = ["Verdict", "blame", "judge"]


@dataclass(frozen=True)
class Verdict:
    """Why a run does not go on.

    Args:
        suspects: The ranks to blame; none if all wait in the same place.
        reason: Why these.
        remedy: What to look at.
    """

    suspects: tuple[int, ...]
    reason: str
    remedy: str

    def summary(
        self,
        ranks: Sequence[Whereabouts],
        standings: Sequence[Standing],
        absent: Sequence[Absent],
        headline: str,
        folder: str,
    ) -> str:
        """Return the lines that one rank prints.

        Args:
            ranks: All ranks, in their order.
            standings: Of those that answered.
            absent: The others.
            headline: What was noticed.
            folder: Of the reports.
        """
        lines = [f"watchdog: {headline}"]
        names = ", ".join(str(w) for w in ranks if w.rank in self.suspects) or "no single rank"
        lines.append(f"suspect: {names}: {self.reason}")
        told = {each.rank: f"{each}" for each in standings}
        told |= {each.of.rank: f"{each}" for each in absent}
        plans = {each.rank: each.plan for each in standings if each.plan}
        for where in _chosen(ranks, self.suspects):
            lines.append(f"  {where}: {told.get(where.rank, 'was not asked')}")
            if where.rank in plans:
                lines.append(f"    plan: {plans[where.rank]}")
        lines += [f"remedy: {self.remedy}", f"stacks and plans: {folder}/rank_*.txt"]
        return "\n".join(lines)


_SHOWN = 16


def _chosen(ranks: Sequence[Whereabouts], suspects: Sequence[int]) -> list[Whereabouts]:
    """Return the suspects and the first others, not more than a screen holds."""
    first = [where for where in ranks if where.rank in suspects][:_SHOWN]
    others = [where for where in ranks if where.rank not in suspects]
    return first + others[: max(_SHOWN - len(first), 1)]


def judge(standings: Sequence[Standing], absent: Sequence[Absent]) -> Verdict | None:
    """Return who holds up the run, or None if it only is slow.

    A run moves as long as one rank that answers has changed its place in time: the others may be
    waiting for that one. Otherwise those are to blame that do not answer; else those that do
    something of their own while others wait; else, of those that all wait, those furthest behind.

    Args:
        standings: Of all ranks that answer.
        absent: Of those that do not.
    """
    if any(not standing.stalled for standing in standings):
        return None
    if absent:
        return blame(absent)
    alone = [each for each in standings if not each.waits or each.lock is not None]
    if alone:
        return _of_alone(alone)
    behind = min(standing.step for standing in standings)
    last = tuple(standing.rank for standing in standings if standing.step == behind)
    if len(last) == len(standings):
        return Verdict((), "all ranks wait for each other in the same step", _LOST_MESSAGE)
    reason = f"in step {behind}, while others are in a later one"
    return Verdict(last, reason, "Give all ranks equally many batches, and the same calls")


_LOST_MESSAGE = (
    "Compare the places above: ranks that call different collectives, or in another order, never "
    "meet"
)


def blame(absent: Sequence[Absent]) -> Verdict:
    """Return that ranks which do not answer hold up the run."""
    ranks = tuple(each.of.rank for each in absent)
    reason = str(absent[0])
    if absent[0].farewell is not None:
        remedy = "Look at its own output, and give all ranks equally many batches and steps"
        return Verdict(ranks, reason, remedy)
    if absent[0].gone:
        return Verdict(
            ranks, reason, f"Look at its own output, and at dmesg on {absent[0].of.host}"
        )
    remedy = f"Look at {absent[0].of.host}: is it reachable, is process {absent[0].of.pid} stopped?"
    return Verdict(ranks, reason, remedy)


def _of_alone(alone: Sequence[Standing]) -> Verdict:
    locked = [each for each in alone if each.lock is not None]
    first = (locked or alone)[0]
    ranks = tuple(each.rank for each in locked or alone)
    reason = f"in {first.what}, and waits for no other rank"
    if first.lock is not None:
        reason = f"it waits for the lock {first.lock} of an extension build"
        return Verdict(ranks, reason, "If no build is running, remove that file")
    if first.outside:
        return Verdict(ranks, reason, "Look at its stack: data loading, evaluation, a debugger?")
    remedy = "Look at its stack; if it only needs longer, raise wavemare.watchdog.timeout_s"
    return Verdict(ranks, reason, remedy)
