# SPDX-License-Identifier: Apache-2.0
"""The run folder of a training loop that is no recipe's."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wavemare.engine.config_shape import SECTION
from wavemare.engine.launch import environment_rank, environment_world_size
from wavemare.errors import ConfigError
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
    ) -> None:
        done = int(getattr(engine, "global_steps", 0)) if done is None else done
        if steps <= done:
            raise ConfigError("steps", steps, f"{done} are done already", "Give more steps")
        self.tokens = tokens
        self.results: dict[str, Any] = {}
        self._engine = engine
        self._done = self._step = done
        self._rate: float | None = None
        self._arguments = dict(arguments or {})
        rank = environment_rank()
        self.run = Run(Path(folder), rank=rank)
        self._events = Events(self.run.folder, rank=rank)
        self._speed = Speed()
        self._observing = Observing(
            self._events,
            self.run.folder,
            rank,
            trace_steps=trace_steps if self._ours is not None else 0,
            first_step=done + 1,
            last_step=steps,
            settled=self._settled(),
        )

    @property
    def _ours(self) -> Any:
        """The checked section of the engine's configuration; None if the engine is not ours."""
        return getattr(self._engine, "_sections", None)

    @property
    def _stages(self) -> int:
        return int(getattr(self._engine, "num_stages", 1))

    def _settled(self) -> int:
        asynchronous = self._stages > 1 and self._ours.pipeline.schedule == "pipemare"
        return self._ours.pipeline.pipemare.warmup_steps + self._stages if asynchronous else 0

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
        if self._done:
            self.run.truncate_after(self._done)
        elif self.run.metrics_file.exists():
            self.run.set_aside()
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
            self.run.summary({"results": results, "layout": self._layout()})
        self._observing.drop()
        self.run.close()
        self._events.close()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Follow an optimizer step, all of which is trained inside.

        Args:
            step: Its number, from 1.
        """
        groups = getattr(getattr(self._engine, "optimizer", None), "param_groups", None)
        self._rate = float(groups[0]["lr"]) if groups else None  # the next one after the step
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
        self.run.log(step, **{**self._told(), **given})
        self._observing.note_memory(step)

    def saving(self, step: int, tag: str) -> AbstractContextManager[None]:
        """Note how long the training waits for a checkpoint, which is saved inside.

        The report looks for checkpoints in the folder ``checkpoints`` of the run's.

        Args:
            step: Optimizer steps done.
            tag: The checkpoint's.
        """
        return self._observing.saving(step, tag)

    def _told(self) -> dict[str, Any]:
        speed = self._speed.tokens_per_second if self.tokens else None
        told: dict[str, Any] = {"learning_rate": self._rate, "tokens_per_second": speed}
        if self._engine is not None:
            norm = self._engine.get_global_grad_norm()
            told["grad_norm"] = None if norm is None else float(norm)
            told["samples"] = self._engine.global_samples
        if self._ours is not None:
            told.update(self._engine.step_metrics())
        return told

    def _configuration(self) -> dict[str, Any]:
        known: dict[str, Any] = {"arguments": self._arguments}
        if self._engine is None:
            return known
        known |= {"deepspeed": self._engine.config, "batch": self._batch()}
        if self._ours is not None:
            section = self._ours.model_dump(mode="json")
            section["pipeline"]["stages"] = self._stages  # a PipelineModule may bring its own
            known[SECTION] = section
        return known

    def _batch(self) -> dict[str, int]:
        return {
            "train_batch_size": self._engine.train_batch_size(),
            "train_micro_batch_size_per_gpu": self._engine.train_micro_batch_size_per_gpu(),
            "gradient_accumulation_steps": self._engine.gradient_accumulation_steps(),
        }

    def _layout(self) -> dict[str, object]:
        layout: dict[str, object] = {"processes": environment_world_size()}
        if self._engine is None:
            return layout
        schedule = self._ours.pipeline.schedule if self._ours is not None else "1f1b"
        return {
            **layout,
            "stages": self._stages,
            "schedule": schedule if self._stages > 1 else "data parallel",
            "zero_stage": int(self._engine.zero_optimization_stage()),
            **self._batch(),
        }
