# SPDX-License-Identifier: Apache-2.0
"""Whether a run can go on, and which rank holds it up, from what all ranks tell."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from wavemare.engine.health.watchdog.status import PeerAddress, RankStatus, UnreachablePeer

__all__ = ["Diagnosis", "diagnose", "diagnose_unreachable"]

_SHOWN = 16
"""Ranks in a summary, so that it fits a screen."""


@dataclass(frozen=True)
class Diagnosis:
    """Why a run does not go on.

    Args:
        suspects: The ranks that hold it up; none if all wait in the same step.
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
            ranks: All ranks, in order.
            statuses: Of the ranks that answered.
            unreachable: The other ranks.
            headline: What was noticed.
            folder: Of the reports.
        """
        suspects = [peer for peer in ranks if peer.rank in self.suspects]
        others = [peer for peer in ranks if peer.rank not in self.suspects]
        names = ", ".join(map(str, suspects)) or "no single rank"
        lines = [f"watchdog: {headline}", f"suspect: {names}: {self.reason}"]
        reported = {each.rank: f"{each}" for each in statuses}
        reported |= {each.peer.rank: f"{each}" for each in unreachable}
        plans = {each.rank: each.plan for each in statuses if each.plan}
        for peer in suspects[:_SHOWN] + others[: max(_SHOWN - len(suspects), 1)]:
            lines.append(f"  {peer}: {reported.get(peer.rank, 'was not asked')}")
            if peer.rank in plans:
                lines.append(f"    plan: {plans[peer.rank]}")
        return "\n".join(
            [*lines, f"remedy: {self.remedy}", f"stacks and plans: {folder}/rank_*.txt"]
        )


def diagnose(
    statuses: Sequence[RankStatus],
    unreachable: Sequence[UnreachablePeer],
    lost: Collection[PeerAddress],
    timeout_s: float,
) -> Diagnosis | None:
    """Return why a run does not go on; None while a rank computes or may compute.

    Args:
        statuses: Of all ranks that answer.
        unreachable: The other ranks.
        lost: Unreachable ranks that have been silent for long; the others may compute.
        timeout_s: Seconds for which a rank may wait.
    """
    if any(not status.wait or status.waited_s < timeout_s for status in statuses):
        return None
    if unreachable:
        known = any(each.peer in lost or each.notice is not None for each in unreachable)
        return diagnose_unreachable(unreachable) if known else None
    behind = min(status.step for status in statuses)
    last = tuple(status.rank for status in statuses if status.step == behind)
    if len(last) == len(statuses):
        remedy = "Compare the places above: do all ranks call the same collectives in one order?"
        return Diagnosis((), "all ranks wait, in the same step", remedy)
    reason = f"in step {behind}, while others are in a later one"
    return Diagnosis(last, reason, "Give all ranks equally many batches, and the same calls")


def diagnose_unreachable(unreachable: Sequence[UnreachablePeer]) -> Diagnosis:
    """Return that ranks which do not answer hold up the run."""
    first, host = unreachable[0], unreachable[0].peer.host
    if first.notice is not None:
        remedy = "Look at its own output, and give all ranks equally many batches and steps"
    elif first.gone:
        remedy = f"Look at its own output, and at dmesg on {host}"
    else:
        remedy = f"Look at {host}: is it reachable, is process {first.peer.pid} stopped?"
    return Diagnosis(tuple(each.peer.rank for each in unreachable), str(first), remedy)
