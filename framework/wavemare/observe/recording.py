# SPDX-License-Identifier: Apache-2.0
"""The run folder of a training loop that is no recipe's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wavemare.engine.launch.group import environment_rank, environment_world_size
from wavemare.errors import ConfigError
from wavemare.observe.engine_facts import EngineFacts
from wavemare.observe.events import Events
from wavemare.observe.observing import Observing
from wavemare.observe.run import Run
from wavemare.observe.speed import Speed

__all__ = ["Recording"]


class Recording:
    """Writes what `wavemare report` reads of a training loop: the same folder as a recipe's.

    Every rank makes one when its engine is built and has loaded its checkpoint, if there is one,
    and trains inside of ``with``. A run that begins anew renames an older one in the folder; one
    that goes on (``done`` above 0) cuts off the lines after its checkpoint. A loop that ends by an
    exception leaves no ``summary.json``, and the report says so.

    Args:
        folder: The run's, which holds nothing else.
        engine: Of `wavemare.initialize`; DeepSpeed's own, of which no step is noted action by
            action; or None.
        steps: The last optimizer step.
        done: Optimizer steps done before; by default those that the engine counts.
        arguments: Options of the script, for ``config.json``.
        tokens: Of an optimizer step over all ranks, for the speed; None if they are not known.
        trace_steps: How many steps are noted action by action; 0 for none.
        checkpoints: Folder of the checkpoints, if it is not ``checkpoints`` in the run's.

    Attributes:
        run: The folder; its `Run.log` takes what is measured between steps, such as
            ``held_out_loss``.
        results: Figures by name, for ``summary.json``.
        tokens: As given; who knows them after each step only sets them inside of it.

    Raises:
        ConfigError: The folder cannot be made or written, or no step is left to train.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Any,
        *,
        steps: int,
        done: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        trace_steps: int = 4,
        checkpoints: str | Path | None = None,
    ) -> None:
        done = int(getattr(engine, "global_steps", 0)) if done is None else done
        if steps <= done:
            raise ConfigError("steps", steps, f"{done} are done already", "Give more steps")
        self.tokens = tokens
        self.results: dict[str, Any] = {}
        self._engine = engine
        self._facts = EngineFacts(engine)
        self._done = self._step = done
        self._rate: float | None = None
        self._arguments = dict(arguments or {})
        self._checkpoints = None if checkpoints is None else Path(checkpoints).resolve()
        rank = environment_rank()
        self.run = Run(Path(folder), rank=rank)
        self._events = Events(self.run.folder, rank=rank)
        self._speed = Speed()
        self._observing = Observing(
            self._events,
            self.run.folder,
            rank,
            trace_steps=trace_steps if self._facts.section is not None else 0,
            first_step=done + 1,
            last_step=steps,
            settled=self._facts.settled,
        )

    def __enter__(self) -> Self:
        """See `begin`."""
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """See `end`; an exception is passed on."""
        self.end(finished=kind is None)

    def begin(self) -> None:
        """Prepare the folder, and listen to warnings from now on; ``with`` does it."""
        self.run.begin(done=self._done or None)
        self.run.write_config(self._configuration(), world_size=environment_world_size())
        self._events.listen()
        self._speed.start(self._done)
        self._started = time.perf_counter()

    def end(self, *, finished: bool) -> None:
        """Write the summary, and close all files; ``with`` does it.

        Args:
            finished: False if an exception has ended the training: there is no summary then.
        """
        if finished:
            self._observing.end(self._engine)  # a loop may have ended before its last step
            seconds = time.perf_counter() - self._started
            results = {"steps": self._step, "training seconds": round(seconds, 3), **self.results}
            self.run.summary({"results": results, "layout": self._facts.layout()})
        self._observing.drop()
        self.run.close()
        self._events.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Follow an optimizer step, all of which is trained inside.

        Args:
            step: Its number, from 1.
        """
        self._rate = self._facts.learning_rate  # the next one after the step
        with self._observing.step(step, self._engine):
            yield
        self._step = step
        self._speed.advance(step, self.tokens or 0)

    def log(self, step: int, **metrics: float | None) -> None:
        """Write a line: these figures, and beside them what the engine tells of the last step.

        Every rank calls this, as each notes its memory, too.

        Args:
            step: Optimizer steps done.
            metrics: Numbers, such as ``loss`` (reading it waits for the device). Given ones stand
                in place of the engine's: ``learning_rate``, ``grad_norm``, ``samples``,
                ``tokens_per_second`` and those of ``step_metrics``.
        """
        given = {name: value for name, value in metrics.items() if value is not None}
        speed = self._speed.tokens_per_second if self.tokens else None
        self.run.log(step, **{**self._facts.line(self._rate, speed), **given})
        self._observing.note_memory(step)

    def saving(self, step: int, tag: str) -> AbstractContextManager[None]:
        """Note how long the training waits for a checkpoint, which is saved inside.

        Args:
            step: Optimizer steps done.
            tag: The checkpoint's.
        """
        return self._observing.saving(step, tag)

    def saved(self, step: int, tag: str, *, seconds: float) -> None:
        """Note a checkpoint that was not saved inside of `saving`.

        Args:
            step: Optimizer steps done.
            tag: The checkpoint's.
            seconds: How long the training waited for it.
        """
        self._observing.saved(step, tag, seconds=seconds)

    def _configuration(self) -> dict[str, Any]:
        known: dict[str, Any] = {"arguments": self._arguments}
        if self._engine is not None:
            known["deepspeed"] = self._engine.config
        if self._checkpoints is not None:
            known["checkpoints"] = str(self._checkpoints)
        return known | self._facts.configuration()
