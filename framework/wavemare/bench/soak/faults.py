# SPDX-License-Identifier: Apache-2.0
"""Faults that befall ranks at random times: pauses, deaths, a slow link."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from wavemare.bench.namespaces import Namespaces, namespace_obstacle, run_tool

__all__ = ["Fault", "Link", "draw_faults", "inflict"]

_LINK_MBIT = 20
_SECONDS = {"pause": (1.0, 5.0), "kill": (0.0, 0.0), "slow link": (5.0, 15.0)}
_PER_MINUTE = {"pause": 1.0, "kill": 1 / 20, "slow link": 0.25}
_UNDISTURBED = 0.25
_UNDISTURBED_S = 180.0
"""In this share of the time at the beginning and at the end, and this at most, nothing happens."""


@dataclass(frozen=True, order=True)
class Fault:
    """What is going to happen.

    Args:
        at_s: Seconds after the start.
        kind: ``pause``, ``kill`` or ``slow link``.
        seconds: How long it lasts.
        rank: To which; a slow link is everybody's.
    """

    at_s: float
    kind: str
    seconds: float
    rank: int


class Link:
    """The loopback interface of a network namespace of its own, over which ranks talk.

    Raises:
        LaunchError: Namespaces cannot be had.
    """

    def __init__(self) -> None:
        self._namespaces = Namespaces("ip link set lo up")

    @staticmethod
    def obstacle() -> str | None:
        """Return why there cannot be one, or None."""
        return namespace_obstacle()

    @property
    def enter(self) -> list[str]:
        """Words that, before a command, run it behind the link."""
        return self._namespaces.enter("--net")

    def limit(self, mbit: int | None) -> None:
        """Set the link's rate; None for no limit."""
        tool = [*self.enter, "tc", "qdisc"]
        if mbit is None:
            run_tool([*tool, "del", "dev", "lo", "root"])
        else:
            bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms"]
            run_tool([*tool, "add", "dev", "lo", "root", *bucket])

    def close(self) -> None:
        """Remove the namespace."""
        self._namespaces.close()


def draw_faults(minutes: float, ranks: int, seed: int, *, links: bool) -> list[Fault]:
    """Return faults in the order of their times: a pause a minute, a death in twenty or one.

    Args:
        minutes: Length of the run.
        ranks: Processes.
        seed: Of the draw.
        links: Whether links can be slowed.
    """
    generator = random.Random(seed)
    first = min(minutes * 60 * _UNDISTURBED, _UNDISTURBED_S)
    last = minutes * 60 - first
    faults = []
    for kind, rate in _PER_MINUTE.items():
        if kind == "slow link" and not links:
            continue
        for _ in range(max(1, round(rate * (last - first) / 60))):
            seconds = generator.uniform(*_SECONDS[kind])
            at_s = generator.uniform(first, last)
            faults.append(Fault(at_s, kind, seconds, generator.randrange(ranks)))
    return sorted(faults)


def inflict(fault: Fault, ranks: Sequence[psutil.Process], link: Link | None) -> bool:
    """Let a fault happen, and return when it is over; whether there was anything to befall."""
    if fault.kind == "slow link":
        if link is None:
            return False
        link.limit(_LINK_MBIT)
        time.sleep(fault.seconds)
        link.limit(None)
        return True
    if fault.rank >= len(ranks):
        return False  # the ranks are just being started
    victim = ranks[fault.rank]
    with suppress(psutil.NoSuchProcess):
        if fault.kind == "kill":
            victim.kill()
            return True
        victim.suspend()
        time.sleep(fault.seconds)
        victim.resume()
        return True
    return False
