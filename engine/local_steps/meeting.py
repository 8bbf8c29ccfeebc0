# SPDX-License-Identifier: Apache-2.0
"""What replicas that come and go tell each other in a meeting, and what follows from it."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

from wavemare.engine.local_steps.wire import START, Header
from wavemare.errors import CommError


class Row(NamedTuple):
    """What a replica tells the others in a meeting.

    Args:
        model: Digest of its parameters' names and shapes, and of its frozen weights.
        settings: Digest of its settings.
        trains: 1 if it has trained, 0 if it has just come.
        gives: 1 if its change counts.
        hurries: 1 if it has waited for more replicas for long enough.
        step: See `Header`, as what follows.
        fragment: May be `START` or `WHOLE`.
        numel: See `Header`.
        bits: See `Header`.
        digest: See `Header`.
    """

    model: int
    settings: int
    trains: int
    gives: int
    hurries: int
    step: int
    fragment: int
    numel: int
    bits: int
    digest: int

    @property
    def header(self) -> Header:
        """What it is about to do."""
        return Header(*self[5:])


class Verdict(Enum):
    """What the replicas of a meeting do; all come to the same one."""

    GO = auto()
    WAIT = auto()
    """They agree, and wait for more replicas."""
    FOLLOW = auto()
    """They are at different places: in the next meeting the state of `judge_of` counts."""
    DROP = auto()
    """They make no exchange this time."""


def judge_of(rows: Sequence[Row]) -> int:
    """Return which replica is right where they differ: the first one that has trained."""
    return next((number for number, row in enumerate(rows) if row.trains), 0)


def decide(rows: Sequence[Row], replicas: int) -> tuple[Verdict, str, list[int]]:
    """Return what replicas do, why not more, and which of them are refused.

    Args:
        rows: Of those present.
        replicas: How many there are when all are present.
    """
    judge = rows[judge_of(rows)]
    refused = [n for n, row in enumerate(rows) if row[:2] != judge[:2]]
    if refused:
        return Verdict.DROP, "a replica has another model or other settings", refused
    starts = rows[0].fragment == START
    # Those that start from checkpoints of one exchange may be at different steps after it.
    if any(row.header[starts:] != rows[0].header[starts:] for row in rows):
        return Verdict.FOLLOW, "replicas are at different steps or have different weights", []
    if starts:
        ready = len(rows) >= replicas or any(row.hurries for row in rows)
        return (Verdict.GO, "", []) if ready else (Verdict.WAIT, "replicas are missing", [])
    diverged = any(row.trains and not row.gives for row in rows)
    if diverged and not all(row.trains for row in rows):
        return Verdict.DROP, "a replica would take weights that may not be finite", []
    if not any(row.gives for row in rows):
        return Verdict.DROP, "no replica has a finite change", []
    return Verdict.GO, "", []


@dataclass
class Meeting:
    """The result of a meeting.

    Args:
        verdict: What to do.
        reason: Why there is no exchange, in words.
        header: What the replicas are about to do.
        state: What another replica has sent, for this one to take; None if it is not behind.
        givers: How many replicas' changes count.
        diverged: Whether this replica's change does not count, as it is not finite.
    """

    verdict: Verdict
    reason: str
    header: Header
    state: dict[str, Any] | None = None
    givers: int = 0
    diverged: bool = False

    @property
    def goes(self) -> bool:
        """Whether there is an exchange."""
        return self.verdict is Verdict.GO


def reason_of(error: CommError) -> str:
    """Return why an exchange has failed, and let go of what its traceback holds.

    That are the sockets: while they are open, the others would not notice that this one is gone.
    """
    said = f"replica {error.value}: {error.reason}"
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain.__traceback__ = None
        chain = chain.__cause__ or chain.__context__
    return said
