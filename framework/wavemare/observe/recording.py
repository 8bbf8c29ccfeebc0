# SPDX-License-Identifier: Apache-2.0
"""The run folder of a training loop, and its progress on the screen."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wavemare.engine.launch.group import environment_rank, environment_world_size
from wavemare.errors import ConfigError
from wavemare.observe.engine_facts import EngineFacts
from wavemare.observe.events import Events
from wavemare.observe.live import live_facts
from wavemare.observe.observing import Observing
from wavemare.observe.run import Run
from wavemare.observe.screen import Progress, Screen

__all__ = ["Recording"]


class Recording:
    """Writes the run folder that `wavemare report` reads, and shows the progress of the training.

    Every rank makes one, which records warnings from then on. It trains inside of ``with`` when the
    engine is built and has loaded its checkpoint. A new run renames an older one in the folder. A
    continued run (``done`` above 0) cuts off the lines after its checkpoint. A loop that ends by an
    exception leaves no ``summary.json``, and the report says so.

    Args:
        folder: The run folder, which holds nothing else.
        engine: Of `wavemare.initialize`; DeepSpeed's own, whose steps are not recorded action by
            action; or None. It may be set later, before ``with``.
        steps: The last optimizer step.
        done: Optimizer steps done before; by default the engine's count.
        arguments: Options of the script, for ``config.json``.
        tokens: Of an optimizer step over all ranks, for the speed; None if they are not known.
        trace_steps: How many steps are recorded action by action; 0 for none.
        checkpoints: Folder of the checkpoints, if it is not ``checkpoints`` in the run folder.
        show: Whether rank 0 draws a progress line.

    Attributes:
        run: The folder; its `Run.log` takes values that are measured between steps, such as
            ``eval_loss``.
        config: DeepSpeed's configuration, for ``config.json``; the engine's if it is None.
        results: Figures by name, for ``summary.json``.
        seconds: Training time of the earlier parts of a continued run; `training_seconds` adds it.
        tokens: As given; a loop may set it inside of each step.
        screen: Draws on rank 0 if ``show`` is set.

    Raises:
        ConfigError: The folder cannot be made or written, or no step is left to train.
    """

    def __init__(
        self,
        folder: str | Path,
        engine: Any = None,
        *,
        steps: int,
        done: int | None = None,
        arguments: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        trace_steps: int = 4,
        checkpoints: str | Path | None = None,
        show: bool = False,
    ) -> None:
        self.engine = engine
        self.tokens = tokens
        self.results: dict[str, Any] = {}
        self.seconds = 0.0
        self.config: Mapping[str, Any] | None = None
        self._steps = steps
        self._given_done = done
        self._rate: float | None = None
        self._arguments = dict(arguments or {})
        self._checkpoints = None if checkpoints is None else Path(checkpoints).resolve()
        self._trace_steps = trace_steps
        self._rank = environment_rank()
        self.run = Run(Path(folder), rank=self._rank)
        self.screen = Screen(rank=self._rank if show else 1)
        self._events = Events(self.run.folder, rank=self._rank)
        self._drawing = ExitStack()
        self._done = self._step = self._first()
        self._pauses = self._trained = 0.0
        self._started = time.perf_counter()
        self._events.listen()

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

    @property
    def training_seconds(self) -> float:
        """Seconds of this run and of the earlier parts that it continues."""
        return self.seconds + time.perf_counter() - self._started

    def begin(self) -> None:
        """Prepare the folder and show the progress; ``with`` does it."""
        self._done = self._step = self._first()
        self._facts = facts = EngineFacts(self.engine)
        self._observing = Observing(
            self._events,
            self.run.folder,
            self._rank,
            trace_steps=self._trace_steps if facts.section is not None else 0,
            first_step=self._done + 1,
            last_step=self._steps,
            settled=facts.settled,
        )
        older = self.run.begin(done=self._done or None)
        if older is not None:
            self.screen.note(f"the older run is now {older}")
        self.run.write_config(self._configuration(), world_size=environment_world_size())
        progress = self.screen.progress(self._steps, done=self._done)
        self._progress: Progress = self._drawing.enter_context(progress)
        self._started = time.perf_counter()

    def end(self, *, finished: bool) -> None:
        """Write the summary, and close all files; ``with`` does it.

        Args:
            finished: False if an exception has ended the training: there is no summary then.
        """
        self._drawing.close()
        if finished:
            self._trained = time.perf_counter() - self._started - self._pauses
            self._observing.end(self.engine)  # a loop may have ended before its last step
            self.results = {
                "steps": self._step,
                "training seconds": round(self.training_seconds, 3),
                **self.results,
            }
            self.summarize()
        self._observing.drop()
        self.run.close()
        self._events.close()

    def summarize(self) -> None:
        """Write the summary with the present `results`."""
        self.run.summary({"results": self.results, "layout": self._facts.layout()})

    def stopped(self, step: int) -> None:
        """Record that SIGTERM has ended the training early, after a checkpoint."""
        self.results["stopped_after"] = step
        self.screen.note(f"stopped by SIGTERM after step {step}; resume with --resume")

    def finish(
        self, results: Mapping[str, Any], baselines: Mapping[str, float] | None = None
    ) -> None:
        """Write results that are known after the training, draw the loss curve, and show them.

        Args:
            results: Figures by name.
            baselines: Losses to compare with, by name.
        """
        self.results |= results
        if self.tokens_per_second is not None:
            self.results["tokens per second"] = round(self.tokens_per_second)
        self.run.curve(baselines=baselines)
        self.run.close()
        self.summarize()
        self.screen.results(self.results)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record an optimizer step, which is trained inside.

        Args:
            step: Its number, from 1.
        """
        self._rate = self._facts.learning_rate  # after the step it is the next one's
        with self._observing.step(step, self.engine):
            yield
        self._step = step
        self._progress.step(step, tokens=self.tokens or 0, learning_rate=self._rate)

    def log(self, step: int, **metrics: float | None) -> None:
        """Write a line: these figures and the engine's figures of the last step.

        Every rank calls this, as each records its memory.

        Args:
            step: Optimizer steps done.
            metrics: Numbers, such as ``loss`` (reading it waits for the device). They replace the
                engine's: ``learning_rate``, ``grad_norm``, ``samples``, ``tokens_per_second`` and
                those of ``step_metrics``.
        """
        given = {name: value for name, value in metrics.items() if value is not None}
        speed = self._progress.tokens_per_second if self.tokens else None
        self.run.log(step, **{**self._facts.line(self._rate, speed), **given})
        memory = self._observing.note_memory(step)
        told = self.engine.step_metrics() if self._facts.section is not None else {}
        facts = live_facts(
            told,
            memory_bytes=memory,
            warnings=self._events.warnings,
            latest=self._events.latest,
        )
        self._progress.show(given.get("loss"), facts)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside, such as an evaluation's, out of `tokens_per_second`."""
        start = time.perf_counter()
        yield
        self._pauses += time.perf_counter() - start

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, over the whole training of this process; None if tokens are not known."""
        if not self.tokens or not self._trained:
            return None
        return self.tokens * (self._step - self._done) / self._trained

    @contextmanager
    def saving(self, step: int, tag: str) -> Iterator[str]:
        """Record how long the training waits for a checkpoint, which is saved inside.

        Args:
            step: Optimizer steps done.
            tag: The checkpoint's.
        """
        with self._observing.saving(step, tag):
            yield tag

    def saved(self, step: int, tag: str, *, seconds: float) -> None:
        """Record a checkpoint that was not saved inside of `saving`.

        Args:
            step: Optimizer steps done.
            tag: The checkpoint's.
            seconds: How long the training waited for it.
        """
        self._observing.saved(step, tag, seconds=seconds)

    def _first(self) -> int:
        counted = int(getattr(self.engine, "global_steps", 0))
        done = counted if self._given_done is None else self._given_done
        if self._steps <= done:
            raise ConfigError("steps", self._steps, f"{done} are done already", "Give more steps")
        return done

    def _configuration(self) -> dict[str, Any]:
        known: dict[str, Any] = {"arguments": self._arguments}
        config = self.config or getattr(self.engine, "config", None)
        if config is not None:
            known["deepspeed"] = config
        if self._checkpoints is not None:
            known["checkpoints"] = str(self._checkpoints)
        return known | self._facts.configuration()
