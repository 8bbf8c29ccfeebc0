# SPDX-License-Identifier: Apache-2.0
"""Where this process stands in its training, for a watchdog that asks when it no longer moves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from wavemare.pipeline.action import Action

__all__ = ["PROGRESS", "Followed", "Follower", "Place", "Progress"]

_OUTSIDE = "the script's own code"


@dataclass(frozen=True, slots=True)
class Place:
    """What a process is doing.

    Args:
        what: In words, an action of the plan or an instruction of DeepSpeed's.
        since: Of the clock of its `Progress`.
        peer: The rank whose message it sends or receives, if it does.
        outside: Whether it is in no call to an engine.
        long: Whether it is something that takes long once.
    """

    what: object
    since: float
    peer: int | None = None
    outside: bool = False
    long: bool = False

    def __str__(self) -> str:
        if isinstance(self.what, Action):
            name = self.what.kind.name.lower().replace("_", " ")
            return f"{name} of micro-batch {self.what.micro_batch} ({self.what})"
        return str(self.what)


class Follower(Protocol):
    """Is told of the places as the process comes to them."""

    def enter(self, what: object) -> None:
        """Hear that something begins."""

    def at(self, what: object) -> None:
        """Hear that the next action begins."""

    def leave(self) -> None:
        """Hear that what was entered last has ended."""


class Progress:
    """Written by the thread that trains, read by others; every write replaces one reference.

    Args:
        clock: Returns seconds.

    Attributes:
        place: Where the process is.
        finished: What it finished last.
        broken: Where an exception left the step; None if none has.
        step: The optimizer step that it is in, or has finished last; from 1.
        plan: The actions of the step, as far as there is a plan.
        position: Which of them it is at.
        thread: Identity of the thread that trains.
        follower: Is told at once, by that thread; None if nobody wants to know.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.place = Place(_OUTSIDE, clock(), outside=True)
        self.finished: object = "nothing"
        self.broken: Place | None = None
        self.step = 0
        self.plan: tuple[str, ...] = ()
        self.position = 0
        self.thread = threading.main_thread().ident
        self.follower: Follower | None = None
        self._steps = 0
        self._pardoned: tuple[Place, float] = (self.place, 0.0)

    @contextmanager
    def doing(self, what: str, *, long: bool = False) -> Iterator[None]:
        """Say what is done inside; afterwards it is again what it was before.

        Args:
            what: In words.
            long: Whether it may take ``start_timeout_s``. All may before the first step's end.
        """
        outer = self.place
        self.thread = threading.get_ident()
        self.place = Place(what, self.clock(), long=outer.long or long)
        if self.follower is not None:
            self.follower.enter(what)
        try:
            yield
            self.finished = what
        except BaseException:
            self.broken = self.broken or self.place
            raise
        finally:
            self.place = replace(outer, since=self.clock())
            if self.follower is not None:
                self.follower.leave()

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield what an iterator gives, and say so while it is asked."""
        while True:
            with self.doing("the data loader"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def at(self, what: object, peer: int | None = None) -> None:
        """Say that the next action begins, and so the one before has ended."""
        place = self.place
        if not place.outside:
            self.finished = place
        self.place = Place(what, self.clock(), peer, long=place.long)
        if self.follower is not None:
            self.follower.at(what)

    def begin_step(self, step: int) -> None:
        """Note which optimizer step begins."""
        self.step = step
        self.plan = ()
        self.broken = None

    def end_step(self) -> None:
        """Note that an optimizer step has ended, after which nothing new is compiled."""
        self._steps += 1

    @property
    def age_s(self) -> float:
        """Seconds in which the process could have moved, and is still in its present place."""
        place, (pardoned, seconds) = self.place, self._pardoned
        return self.clock() - place.since - (seconds if pardoned is place else 0.0)

    def pardon(self, seconds: float) -> None:
        """Do not count the last so many seconds: nothing could move in them."""
        place, (pardoned, before) = self.place, self._pardoned
        seconds = min(seconds, self.clock() - place.since)
        self._pardoned = (place, seconds + (before if pardoned is place else 0.0))

    def patience(self, timeout_s: float, start_timeout_s: float) -> float:
        """Return the seconds that the present place may take."""
        return start_timeout_s if self.place.long or not self._steps else timeout_s


class Followed:
    """A DeepSpeed schedule that notes each instruction as it begins.

    Args:
        schedule: The schedule. Instructions may know their ``action`` of the plan.
        progress: Takes the notes.
        grid: DeepSpeed's, which knows the ranks of the stages before and after.
        neighbours: By kind of action, how many stages further its other side is.
    """

    def __init__(self, schedule: Any, progress: Progress, grid: Any, neighbours: Any) -> None:
        self._schedule = schedule
        self._progress = progress
        self._grid = grid
        self._neighbours = neighbours

    def __iter__(self) -> Iterator[list[Any]]:
        """Yield the instructions, one at a time."""
        instructions = [each for step in self._schedule.steps() for each in step]
        progress = self._progress
        progress.plan = tuple(map(_text, instructions))
        for position, instruction in enumerate(instructions):
            progress.position = position
            progress.at(getattr(instruction, "action", instruction), self._peer(instruction))
            yield [instruction]

    def num_pipe_buffers(self) -> int:
        """Return the schedule's."""
        return int(self._schedule.num_pipe_buffers())

    def _peer(self, instruction: Any) -> int | None:
        action = getattr(instruction, "action", None)
        distance = self._neighbours.get(getattr(action, "kind", None))
        if action is None or distance is None:
            return None
        return int(self._grid.stage_to_global(stage_id=action.stage + distance))


def _text(instruction: Any) -> str:
    action = getattr(instruction, "action", None)
    return str(action) if action is not None else repr(instruction)


PROGRESS = Progress()
"""This process's; it trains at one place, however many engines it has."""
