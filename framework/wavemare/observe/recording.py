# SPDX-License-Identifier: Apache-2.0
"""The run folder of a training loop, and its progress on the screen."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from wavemare.engine.config.shape import SECTION
from wavemare.engine.launch.group import environment_rank, environment_world_size
from wavemare.engine.observe.recorder import StepTrace
from wavemare.errors import ConfigError
from wavemare.observe.lines import Events, go_without
from wavemare.observe.run import Run
from wavemare.observe.screen import Screen, live_facts

_FIRST_STEPS = 10
"""Steps before the traced ones: the first ones take longer."""
_STEP = "train_batch"
"""How engines that train whole steps report one, and how a report knows it."""


class Recording:
    """Writes the run folder that `wavemare report` reads, and shows the progress of the training.

    Every rank makes one, which records warnings from then on. It trains inside of ``with`` when the
    engine is built and has loaded its checkpoint::

        with Recording(folder, engine, steps=steps) as recording: ...
        with recording.training(engine): ...  # of a Recording that was made before the engine

    A new run renames an older one in the folder. A continued run (``done`` above 0) cuts off the
    lines after its checkpoint. A loop that ends by an exception leaves no ``summary.json``, and the
    report says so. No rank waits for another.

    Args:
        folder: The run folder, which holds nothing else.
        engine: Of `wavemare.initialize`; DeepSpeed's own, whose steps are not recorded action by
            action; or None.
        steps: The last optimizer step.
        done: Optimizer steps done before; by default the engine's count.
        arguments: Options of the script, for ``config.json``.
        tokens: Of an optimizer step over all ranks, for the speed; None if they are not known.
        trace_steps: How many steps are recorded action by action; 0 for none.
        checkpoints: Folder of the checkpoints, if it is not ``checkpoints`` in the run folder.
        show: Whether rank 0 draws a progress line.

    Attributes:
        run: The folder.
        results: Figures by name, for ``summary.json``.
        tokens: As given; a loop may set it inside of each step.
        earlier_seconds: Training time of the earlier parts of a continued run.
        screen: Draws on rank 0 if ``show`` is set.

    Raises:
        ConfigError: The folder cannot be made or written, or more than ``steps`` are done.
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
        self.tokens = tokens
        self.results: dict[str, Any] = {}
        self._engine = engine
        self._config: Mapping[str, Any] | None = None
        self.earlier_seconds = 0.0
        self._steps = steps
        self._given_done = done
        self._rate: float | None = None
        self._arguments = dict(arguments or {})
        self._checkpoints = None if checkpoints is None else Path(checkpoints).resolve()
        self._trace_steps = trace_steps
        self._trace: StepTrace | None = None
        self._rank = environment_rank()
        self.run = Run(Path(folder), rank=self._rank)
        self.screen = Screen(rank=self._rank if show else 1)
        self._events = Events(self.run.folder, rank=self._rank)
        self._drawing = ExitStack()
        self._done = self._step = self._first()
        self._pauses = self._trained = 0.0
        self._started = self._marked = time.perf_counter()
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

    def training(
        self,
        engine: Any,
        *,
        tokens: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return this recording, to train an engine inside of ``with``.

        Args:
            engine: As of the class.
            tokens: As of the class.
            config: DeepSpeed's configuration, for ``config.json``; the engine's if it is None.
        """
        self._engine, self.tokens, self._config = engine, tokens, config
        return self

    @property
    def training_seconds(self) -> float:
        """Seconds of this run and of the earlier parts that it continues."""
        return self.earlier_seconds + time.perf_counter() - self._started

    @property
    def tokens_per_second(self) -> float | None:
        """Of all ranks, in this process; None if tokens are not known or no step was trained.

        The time before a `log_eval` that follows a step, which is that of an evaluation, is left
        out.
        """
        steps = self._step - self._done
        if not (self.tokens and self._trained and steps):
            return None
        return self.tokens * steps / self._trained

    def begin(self) -> None:
        """Prepare the folder and show the progress; ``with`` does it.

        Raises:
            ConfigError: A run that has not ended writes the folder.
        """
        self._done = self._step = self._first()
        count = 0 if _section(self._engine) is None else self._trace_steps
        count = min(count, self._steps - self._done)
        begin = max(self._done + 1 + _FIRST_STEPS, _first_async_step(self._engine) + 1)
        begin = min(begin, self._steps - count + 1)
        self._traced = range(begin, begin + count)
        older = self.run.begin(done=self._done)
        if older is not None:
            self.screen.note(f"the older run is now {older}")
        self.run.write_config(self._configuration(), world_size=environment_world_size())
        progress = self.screen.progress(self._steps, done=self._done)
        self._progress = self._drawing.enter_context(progress)
        self._started = self._marked = time.perf_counter()

    def end(self, *, finished: bool) -> None:
        """Write the summary, and close all files; ``with`` does it.

        Args:
            finished: False if an exception has ended the training: there is no summary then.
        """
        self._drawing.close()
        if finished:
            self._trained = time.perf_counter() - self._started - self._pauses
            self._end_trace(save=True)  # a loop may have ended before its last step
            self.results = {
                "steps": self._step,
                "training seconds": round(self.training_seconds, 3),
                **self.results,
            }
            self._summarize()
        self._end_trace(save=False)
        self.run.close()
        self._events.close()

    def stopped(self, step: int) -> None:
        """Record that SIGTERM has ended the training early, after a checkpoint."""
        self.results["stopped_after"] = step
        self.screen.note(f"stopped by SIGTERM after step {step}; resume with --resume")

    def finish(
        self,
        results: Mapping[str, Any],
        baselines: Callable[[], tuple[Mapping[str, Any], Mapping[str, float]]] | None = None,
    ) -> None:
        """Write results that are known after the training, draw the loss curve, and show them.

        Args:
            results: Figures by name.
            baselines: Returns more results, and losses to compare with, by name. Rank 0 calls it
                when the results are written; an error in it is told, and changes nothing else.
        """
        self.results |= results
        if self.tokens_per_second is not None:
            self.results["tokens per second"] = round(self.tokens_per_second)
        self._summarize()
        losses: Mapping[str, float] = {}
        if baselines is not None and self._rank == 0:
            try:
                more, losses = baselines()
            except Exception as error:  # the model is trained and saved, whatever they are
                self.screen.note(f"there are no baselines to compare with: {error}")
            else:
                self.results |= more
        self.run.curve(losses)
        self.run.close()
        self._summarize()
        self.screen.results(self.results)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record an optimizer step, from 1, which is trained inside."""
        self._rate = _learning_rate(self._engine)  # after the step it is the next one's
        self._events.step = step
        if step == self._traced.start and self._traced:
            self._trace = StepTrace()
            self._trace.begin()
        try:
            with ExitStack() if self._trace is None else _whole_step(self._trace):
                yield
        except BaseException:
            self._end_trace(save=False)  # whoever catches it may train on
            raise
        # Whoever has trained a step did so with rank 0, which had prepared the folder before.
        self._events.open()
        if step == self._traced.stop - 1:
            self._end_trace(save=True)
        self._step = step
        self._progress.step(step, tokens=self.tokens or 0, learning_rate=self._rate)
        self._marked = time.perf_counter()

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
        measured = {} if _section(self._engine) is None else dict(self._engine.step_metrics())
        line: dict[str, float | None] = {"learning_rate": self._rate}
        if self._engine is not None:
            norm = self._engine.get_global_grad_norm()
            line["grad_norm"] = None if norm is None else float(norm)
        line["tokens_per_second"] = self._progress.tokens_per_second if self.tokens else None
        if self._engine is not None:
            line["samples"] = self._engine.global_samples
        self.run.log(step, **{**line, **measured, **given})
        used = _most_memory()
        self._events.note("memory", step, bytes=used)
        warnings, latest = self._events.warnings, self._events.latest
        facts = live_facts(measured, memory_bytes=used, warnings=warnings, latest=latest)
        self._progress.show(given.get("loss"), facts)
        self._marked = time.perf_counter()

    def log_eval(self, step: int, **metrics: float | None) -> None:
        """Write and show figures that were measured since the step, such as ``eval_loss``.

        The time since the last step, line or checkpoint was that of an evaluation: it is left out
        of `tokens_per_second`.
        """
        self.run.log(step, **metrics)
        known = (f"{name} {value:.4f}" for name, value in metrics.items() if value is not None)
        self.screen.note("  ".join([f"step {step}", *known]))
        now = time.perf_counter()
        self._pauses += now - self._marked
        self._marked = now

    @contextmanager
    def saving(self, step: int, tag: str) -> Iterator[str]:
        """Record how long the training waits for a checkpoint, which is saved inside."""
        start = time.perf_counter()
        yield tag
        self.saved(step, tag, seconds=time.perf_counter() - start)

    def saved(self, step: int, tag: str, *, seconds: float) -> None:
        """Record how long the training waited for a checkpoint not saved inside of `saving`."""
        self._events.note("checkpoint", step, tag=tag, seconds=seconds)
        self._marked = time.perf_counter()

    def _first(self) -> int:
        counted = int(getattr(self._engine, "global_steps", 0))
        done = counted if self._given_done is None else self._given_done
        if self._steps < done:
            raise ConfigError("steps", self._steps, f"{done} are done already", "Give more steps")
        return done

    def _end_trace(self, *, save: bool) -> None:
        """Trace no more, and write the traced steps or discard them."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.end()
        if save:
            stage = int(getattr(self._engine, "stage_id", 0))
            first = self._traced.start
            try:
                trace.save(self.run.folder, rank=self._rank, stage=stage, first_step=first)
            except OSError as error:
                go_without(self.run.folder, error)

    def _summarize(self) -> None:
        layout: dict[str, object] = {"processes": environment_world_size()}
        if self._engine is not None:
            layout |= {
                "stages": _stages(self._engine),
                "schedule": _schedule(self._engine),
                "zero_stage": int(self._engine.zero_optimization_stage()),
                **_batch(self._engine),
            }
        self.run.summary({"results": self.results, "layout": layout})

    def _configuration(self) -> dict[str, Any]:
        known: dict[str, Any] = {"arguments": self._arguments}
        config = self._config or getattr(self._engine, "config", None)
        if config is not None:
            known["deepspeed"] = config
        if self._checkpoints is not None:
            known["checkpoints"] = str(self._checkpoints)
        if self._engine is not None:
            known["batch"] = _batch(self._engine)
        section = _section(self._engine)
        if section is not None:
            values = section.model_dump(mode="json")
            # A PipelineModule may bring its own.
            values["pipeline"]["stages"] = _stages(self._engine)
            known[SECTION] = values
        return known


@contextmanager
def _whole_step(trace: StepTrace) -> Iterator[None]:
    """Trace what is done inside as a step, unless the engine reports one itself."""
    before = len(trace.spans)
    trace.enter(_STEP)
    yield
    trace.leave()
    if any(what == _STEP for what, *_ in trace.spans[before:-1]):
        trace.spans.pop()  # of the loop around the engine's own


def _most_memory() -> int:
    """Return the most bytes in use since the last call (without an accelerator: now)."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return int(accelerator.memory_allocated())  # its peaks are those of its own readings
    used = int(accelerator.max_memory_allocated())
    accelerator.reset_peak_memory_stats()
    return used


def _section(engine: Any) -> Any:
    """Return the checked section that an engine was built by; None if the engine is not ours."""
    return getattr(engine, "settings", None)


def _stages(engine: Any) -> int:
    return int(getattr(engine, "num_stages", 1))


def _schedule(engine: Any) -> str:
    """Return a pipeline's schedule, as the configuration names it."""
    if _stages(engine) == 1:
        return "data parallel"
    section = _section(engine)
    return "1f1b" if section is None else str(section.pipeline.schedule)


def _first_async_step(engine: Any) -> int:
    """Return the first step that runs as the later ones do; 0 where the first one does."""
    if _schedule(engine) != "pipemare":
        return 0
    return int(_section(engine).pipeline.pipemare.warmup_steps) + _stages(engine)


def _batch(engine: Any) -> dict[str, int]:
    """Return DeepSpeed's three batch sizes by their keys."""
    return {
        "train_batch_size": engine.train_batch_size(),
        "train_micro_batch_size_per_gpu": engine.train_micro_batch_size_per_gpu(),
        "gradient_accumulation_steps": engine.gradient_accumulation_steps(),
    }


def _learning_rate(engine: Any) -> float | None:
    """Return the first group's rate: before a step its own, after it the next step's."""
    groups = getattr(getattr(engine, "optimizer", None), "param_groups", None)
    return float(groups[0]["lr"]) if groups else None
