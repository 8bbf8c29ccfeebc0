# SPDX-License-Identifier: Apache-2.0
"""What this process does: its action of the plan, or the call to an engine that it is in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavemare.comm.waits import Wait, wait_of
from wavemare.pipeline.plan.plan import Action

if TYPE_CHECKING:
    from wavemare.engine.observe.recorder import StepTrace


@dataclass(frozen=True, slots=True)
class Place:
    """What a process is doing.

    Args:
        what: In words, an action of the plan or an instruction of DeepSpeed's.
        peer: The rank whose message it sends or receives, if it does.
    """

    what: object
    peer: int | None = None

    def __str__(self) -> str:
        if isinstance(self.what, Action):
            name = self.what.kind.name.lower().replace("_", " ")
            return f"{name} of micro-batch {self.what.micro_batch} ({self.what})"
        return str(self.what)


_OUTSIDE = Place("the script's own code")


class Progress:
    """Written by the thread that trains, read by others; every write replaces one reference.

    Attributes:
        broken: Where an exception left the step; None if none has.
        step: The optimizer step that it is in, or has finished last; from 1.
        actions: Of the step, as far as there is a plan.
        position: Which of them it is at.
        thread: Identity of the thread that trains.
        follower: Called at once, by that thread; None if there is none.
    """

    def __init__(self) -> None:
        self._place = _OUTSIDE
        self._peer_of: Callable[[Any], int | None] = lambda _: None
        self._is_at_action = False
        self._finished: object = "nothing"
        self.broken: Place | None = None
        self.step = 0
        self.actions: Sequence[object] = ()
        self.position = 0
        self.thread = threading.main_thread().ident
        self.follower: StepTrace | None = None

    @property
    def place(self) -> Place:
        """Where the process is."""
        actions, position = self.actions, self.position
        if self._is_at_action and position < len(actions):
            return Place(actions[position], self._peer_of(actions[position]))
        return self._place

    @property
    def finished(self) -> object:
        """What the process finished last."""
        if self._is_at_action and self.position:
            return Place(self.actions[self.position - 1])
        return self._finished

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Name what is done inside; afterwards the place before counts again.

        Args:
            what: In words.
        """
        outer = self._place, self._is_at_action
        self.thread = threading.get_ident()
        self._place, self._is_at_action = Place(what), False
        if self.follower is not None:
            self.follower.enter(what)
        try:
            yield
            self._finished = what
        except StopIteration:  # the data has ended
            raise
        except BaseException:
            self.broken = self.broken or self.place
            raise
        finally:
            self._place, self._is_at_action = outer
            if self.follower is not None:
                self.follower.leave()

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield from an iterator; the place is the data loader while it is asked."""
        while True:
            with self.doing("the data loader"):
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def at(self, what: object) -> None:
        """Begin the next part, which ends the one before."""
        if self.place is not _OUTSIDE:
            self._finished = self.place
        self._place = Place(what)
        if self.follower is not None:
            self.follower.at(what)

    def begin_actions(
        self, actions: Sequence[object], peer_of: Callable[[Any], int | None]
    ) -> None:
        """Begin a rank's actions of a plan; `at_action` says which one runs.

        Args:
            actions: In their order.
            peer_of: Returns the rank at the other side of an action's message; None without one.
        """
        self.actions, self._peer_of, self.position = actions, peer_of, 0

    def at_action(self, position: int) -> None:
        """Begin an action, which ends the one before."""
        self.position, self._is_at_action = position, True
        if self.follower is not None:
            self.follower.at(self.actions[position])

    @property
    def action(self) -> object:
        """The action that runs, or ran last; None without a plan."""
        return self.actions[self.position] if self.position < len(self.actions) else None

    def end_actions(self) -> None:
        """Note that the actions have ended."""
        self._finished, self._is_at_action = self.place, False

    def begin_step(self, step: int) -> None:
        """Note which optimizer step begins."""
        self.step = step
        self.actions = ()
        self.broken = None

    @property
    def plan(self) -> tuple[str, ...]:
        """The actions of the step in words, as far as there is a plan."""
        return tuple(map(str, self.actions))

    @property
    def wait(self) -> Wait | None:
        """What the thread that trains waits for; None if it computes."""
        return wait_of(self.thread)


PROGRESS = Progress()
"""Of this process: all its engines share it."""
