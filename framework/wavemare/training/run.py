# SPDX-License-Identifier: Apache-2.0
"""What a recipe does around its steps: metrics, checkpoints, and the end by SIGTERM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from wavemare.errors import ConfigError
from wavemare.files import atomic_write_text
from wavemare.observe.screen import print_rank_0
from wavemare.training.arguments import TrainArguments
from wavemare.training.balance import LAYOUT_FILE
from wavemare.training.start import start_recording

if TYPE_CHECKING:
    from wavemare.data.loader import ResumableLoader
    from wavemare.engine import Interruption
    from wavemare.training.setup import Setup


class TrainingRun:
    """One run of a recipe: it logs, saves and ends, so that the loop can be read at a glance.

    Make it before the data is read: the run folder records warnings from then on. All processes do
    the same with it::

        run = TrainingRun(args)
        ...
        with run.training(setup, engine, train_loader) as steps:
            for step in steps:
                loss = engine.train_batch(train_loader)
                run.after_step(loss)
                if step % args.eval_interval == 0:
                    run.log_eval(eval_loss=evaluate(engine, eval_loader))
                run.save_if_due()
        if not run.stopped:
            run.finish({"eval_loss": evaluate(engine, eval_loader)})

    Attributes:
        step: Optimizer steps done.
        is_last: Whether no step follows: the last one is done, or SIGTERM came.
        stopped: Whether SIGTERM has ended the training before the last step.

    Raises:
        ConfigError: The run folder cannot be made or written.
    """

    def __init__(self, arguments: TrainArguments) -> None:
        self.step = 0
        self.is_last = self.stopped = False
        self._arguments = arguments
        self._recording = start_recording(arguments)
        self._open_step = ExitStack()  # of the recording, until `after_step`
        self._losses: list[Any] = []  # since the last line of metrics
        self._setup: Setup
        self._engine: Any = None
        self._loader: ResumableLoader
        self._interruption: Interruption

    @contextmanager
    def training(
        self, setup: Setup, engine: Any, loader: ResumableLoader
    ) -> Iterator[Iterator[int]]:
        """Give the numbers of the steps to train, inside of ``with``.

        If the run resumes, the newest checkpoint is loaded first. SIGTERM to any process ends the
        steps of all processes after the same one. Leaving ``with`` waits for a checkpoint that is
        written in the background.

        Args:
            setup: Of the run.
            engine: Of `wavemare.initialize`.
            loader: Of the samples to train on; checkpoints keep its place.

        Raises:
            CheckpointError: The checkpoint does not fit the engine, or is of other data.
            ConfigError: The checkpoint is past the last step; or a run that has not ended writes
                the folder.
        """
        from wavemare.engine import Interruption

        self._setup, self._engine, self._loader = setup, engine, loader
        if setup.resume:
            self._load()
        self.step = engine.global_steps
        rows = engine.train_batch_size() * self._arguments.rows_per_sample
        tokens = rows * self._arguments.sequence_length  # of a step
        with (
            self._recording.training(engine, tokens=tokens),
            Interruption.of(engine) as self._interruption,
        ):
            yield self._steps()
            engine.finish_saving()

    def after_step(
        self, loss: Any, figures: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """End a step: show the progress and, every ``--log_interval`` steps, write metrics.

        Args:
            loss: The mean loss of the step, a tensor with one element. A line of metrics has the
                mean since the line before. Only a line waits for the device.
            figures: Returns more figures for a line, by name.
        """
        self._open_step.close()
        self._losses.append(loss)
        before_last = self.step < self._arguments.max_steps
        self.stopped = before_last and self._interruption.stops_after(self.step)
        self.is_last = self.stopped or not before_last
        if self.is_last or self.step % self._arguments.log_interval == 0:
            more = {} if figures is None else figures()
            mean = float(sum(self._losses) / len(self._losses))
            self._recording.log(self.step, loss=mean, **more)
            self._losses.clear()

    def log_eval(self, **metrics: float) -> None:
        """Write and show what an evaluation after the last step has found, such as ``eval_loss``.

        The time since the step counts as the evaluation's.
        """
        self._recording.log_eval(self.step, **metrics)

    def save_if_due(self) -> None:
        """Save a checkpoint every ``--save_interval`` steps, and after the last step or SIGTERM.

        It has all that a resumed run needs. The layout of the run stands beside it, if it has one.
        """
        if not self.is_last and self.step % self._arguments.save_interval:
            return
        setup = self._setup
        if setup.layout is not None and setup.rank == 0:
            atomic_write_text(setup.folder / LAYOUT_FILE, setup.layout.to_json())
        seconds = self._recording.training_seconds
        state = {"loader": self._loader.state_dict(), "seconds": seconds}
        with self._recording.saving(self.step, f"step-{self.step:06d}") as tag:
            self._engine.save_checkpoint(str(setup.checkpoints), tag, client_state=state)

    def finish(
        self,
        results: Mapping[str, Any],
        baselines: Callable[[], tuple[Mapping[str, Any], Mapping[str, float]]] | None = None,
    ) -> None:
        """Write and show the results and the loss curve; see `wavemare.observe.Recording.finish`.

        Args:
            results: Figures by name.
            baselines: Returns more results, and losses to compare with, by name. Rank 0 calls it
                last.
        """
        self._recording.finish(results, baselines)

    def _steps(self) -> Iterator[int]:
        for step in range(self.step + 1, self._arguments.max_steps + 1):
            self._open_step.enter_context(self._recording.step(step))
            self.step = step
            yield step
            if self.stopped:
                self._recording.stopped(step)
                break

    def _load(self) -> None:
        """Go on from the newest checkpoint: engine, order of the data, and training time so far."""
        engine, most = self._engine, self._arguments.max_steps
        _, state = engine.load_checkpoint(str(self._setup.checkpoints))
        if engine.global_steps > most:
            reason = f"the checkpoint is at step {engine.global_steps} already"
            raise ConfigError("--max_steps", most, reason, "Give more steps")
        consumed = {"consumed_samples": engine.global_samples}
        self._loader.load_state_dict({**state["loader"], **consumed})
        print_rank_0(f"resumed after step {engine.global_steps}")
        self._recording.earlier_seconds = float(state.get("seconds", 0.0))
