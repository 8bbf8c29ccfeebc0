# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a process group say to each other, in its store."""

from __future__ import annotations

import itertools
import json
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import distributed

from wavemare.comm.waits import Call
from wavemare.engine.health.rank_status import RankStatus
from wavemare.engine.launch.group import meet
from wavemare.files import process_has_ended

_KEY = "wavemare/watchdog"
_POLL_S = 0.02
_LAST_S = 3.0
"""Seconds that the store has for what was said before the last word."""
_meetings = itertools.count()

Heard = tuple[str, list[RankStatus]]
"""Why the run is to end, or nothing; and what the ranks that were asked have said last."""


class Board:
    """Keys of the ranks in the store of their process group.

    ``N`` holds the status of rank N, ``end`` why the run is to end, ``met`` and ``left`` how many
    ranks have come and gone. The last one that leaves deletes them.

    Args:
        store: Of the process group.
        me: What this rank says first.
        size: Number of ranks.

    Attributes:
        ranks: What each has said last.
    """

    def __init__(self, store: Any, me: RankStatus, size: int) -> None:
        # A connection of its own: an operation that blocks would block those of training.
        self._store = store.clone()
        world = distributed.group.WORLD
        self._group = None if world is None else weakref.ref(world)
        self._me = me
        root = f"{_KEY}/{next(_meetings)}"
        self._keys = [f"{root}/{rank}" for rank in range(size)]
        self._end, self._met, self._left = (f"{root}/{word}" for word in ("end", "met", "left"))
        self._write(me)
        self._store.compare_set(self._end, "", "")
        meet(self._store, self._met, size)
        self.ranks = self._read(self._keys)[1]
        self._pending: Call[Heard] | None = None
        self._has_left = False

    @property
    def is_open(self) -> bool:
        """Whether the process group still exists, with which its store goes."""
        group = self._group and self._group()
        return group is distributed.group.WORLD and not self._has_left

    def has_ended(self, rank: RankStatus) -> bool:
        """Whether the process of a rank has ended, as far as this machine knows."""
        return rank.machine == self._me.machine and process_has_ended(rank.pid)

    def hear(self, me: RankStatus, seconds: float, *, everyone: bool) -> Heard | None:
        """Say what this rank does, and hear what others do.

        Args:
            me: What this rank does.
            seconds: How long to wait. If the answer comes later, the next call returns it.
            everyone: Whether to ask all ranks, or the first one alone.

        Returns:
            What was heard; None without an answer, after an error for ever.
        """
        if self._pending is None:
            self._pending = Call(partial(self._exchange, me, everyone))
        heard = self._pending.wait(seconds)
        if heard is not None:
            self._pending = None
            self.ranks[: len(heard[1])] = heard[1]
        return heard

    def ask(self, me: RankStatus, seconds: float) -> list[RankStatus] | None:
        """Return what all ranks say now; None without an answer."""
        heard = Call(partial(self._exchange, me, True)).wait(seconds)
        return None if heard is None else heard[1]

    def decide(self, decision: str, seconds: float) -> str:
        """Say why the run is to end, unless another rank has; return what counts."""
        said = Call(partial(self._store.compare_set, self._end, "", decision)).wait(seconds)
        return decision if said is None else said.decode()

    def leave(self, me: RankStatus, linger_s: float = 0.0) -> None:
        """Say this rank's last word; it blocks while the store stands still.

        Args:
            me: With the word.
            linger_s: How long the first rank stays, with whose process the store may go.
        """
        if not self.is_open or (self._pending is not None and not self._pending.wait(_LAST_S)):
            return
        self._has_left = True
        deadline = time.monotonic() + linger_s
        with suppress(RuntimeError):  # the store has gone
            self._write(me)
            if self._store.add(self._left, 1) == len(self._keys):
                for key in (*self._keys, self._end, self._met, self._left):
                    self._store.delete_key(key)
            while me.rank == 0 and self._store.check(self._keys[:1]):
                if time.monotonic() > deadline:
                    return
                time.sleep(_POLL_S)

    def _write(self, me: RankStatus) -> None:
        self._store.set(self._keys[me.rank], json.dumps(vars(me)))

    def _read(self, keys: list[str]) -> Heard:
        decision, *texts = self._store.multi_get([self._end, *keys])
        return decision.decode(), [RankStatus(**json.loads(text)) for text in texts]

    def _exchange(self, me: RankStatus, everyone: bool) -> Heard:
        self._write(me)
        # The first rank's word may go with the store that it has in it: all hear it in time.
        keys = self._keys if everyone else self._keys[:1]
        ended = [self.has_ended(each) for each in self.ranks]  # before its last word is read
        decision, ranks = self._read(keys)
        return decision, [replace(each, ended=ended[each.rank]) for each in ranks]
