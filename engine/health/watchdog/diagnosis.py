# SPDX-License-Identifier: Apache-2.0
"""From what all ranks tell to whether the run can go on, and who holds it up."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wavemare.engine.health.watchdog.status import PeerAddress, RankStatus, UnreachablePeer

__all__ = ["Diagnosis", "blame", "diagnose"]


@dataclass(frozen=True)
class Diagnosis:
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
        ranks: Sequence[PeerAddress],
        statuses: Sequence[RankStatus],
        unreachable: Sequence[UnreachablePeer],
        headline: str,
        folder: str,
    ) -> str:
        """Return the lines that one rank prints.

        Args:
            ranks: All ranks, in their order.
            statuses: Of those that answered.
            unreachable: The others.
            headline: What was noticed.
            folder: Of the reports.
        """
        lines = [f"watchdog: {headline}"]
        names = ", ".join(str(w) for w in ranks if w.rank in self.suspects) or "no single rank"
        lines.append(f"suspect: {names}: {self.reason}")
        told = {each.rank: f"{each}" for each in statuses}
        told |= {each.of.rank: f"{each}" for each in unreachable}
        plans = {each.rank: each.plan for each in statuses if each.plan}
        for where in _chosen(ranks, self.suspects):
            lines.append(f"  {where}: {told.get(where.rank, 'was not asked')}")
            if where.rank in plans:
                lines.append(f"    plan: {plans[where.rank]}")
        lines += [f"remedy: {self.remedy}", f"stacks and plans: {folder}/rank_*.txt"]
        return "\n".join(lines)


_SHOWN = 16


def _chosen(ranks: Sequence[PeerAddress], suspects: Sequence[int]) -> list[PeerAddress]:
    """Return the suspects and the first others, not more than a screen holds."""
    first = [where for where in ranks if where.rank in suspects][:_SHOWN]
    others = [where for where in ranks if where.rank not in suspects]
    return first + others[: max(_SHOWN - len(first), 1)]


def diagnose(
    statuses: Sequence[RankStatus],
    unreachable: Sequence[UnreachablePeer],
    lost: Collection[PeerAddress],
    timeout_s: float,
) -> Diagnosis | None:
    """Return why a run does not go on; None if it may, as a rank computes.

    Args:
        statuses: Of all ranks that answer.
        unreachable: Those that do not.
        lost: Those of them that have not answered for long; the others may compute.
        timeout_s: Seconds for which a rank may wait.
    """
    if any(not status.wait or status.waited_s < timeout_s for status in statuses):
        return None
    if unreachable:
        known = any(each.of in lost or each.farewell is not None for each in unreachable)
        return blame(unreachable) if known else None
    behind = min(status.step for status in statuses)
    last = tuple(status.rank for status in statuses if status.step == behind)
    if len(last) == len(statuses):
        return Diagnosis((), "all ranks wait, in the same step", _LOST_MESSAGE)
    reason = f"in step {behind}, while others are in a later one"
    return Diagnosis(last, reason, "Give all ranks equally many batches, and the same calls")


_LOST_MESSAGE = (
    "Compare the places above: ranks that call different collectives, or in another order, never "
    "meet"
)


def blame(unreachable: Sequence[UnreachablePeer]) -> Diagnosis:
    """Return that ranks which do not answer hold up the run."""
    ranks = tuple(each.of.rank for each in unreachable)
    first, reason = unreachable[0], str(unreachable[0])
    if first.farewell is not None:
        remedy = "Look at its own output, and give all ranks equally many batches and steps"
        return Diagnosis(ranks, reason, remedy)
    if first.gone:
        remedy = f"Look at its own output, and at dmesg on {first.of.host}"
        return Diagnosis(ranks, reason, remedy)
    remedy = f"Look at {first.of.host}: is it reachable, is process {first.of.pid} stopped?"
    return Diagnosis(ranks, reason, remedy)
