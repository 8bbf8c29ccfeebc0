# SPDX-License-Identifier: Apache-2.0
"""A run of a recipe: how it starts, what is around its steps, and how it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wavemare.engine.launch.group import meet
from wavemare.errors import ConfigError
from wavemare.files import atomic_write_text
from wavemare.observe.quiet import quiet_libraries
from wavemare.observe.screen import Screen, print_rank_0
from wavemare.training.arguments import TrainArguments
from wavemare.training.balance import LAYOUT_FILE, balance
from wavemare.training.models import check_model
from wavemare.training.setup import Setup, read_setup
from wavemare.training.start import count_parameters, print_start, start_recording
from wavemare.training.text import find_data

if TYPE_CHECKING:
    from wavemare.data.loader import ResumableLoader
    from wavemare.data.sources import Source
    from wavemare.engine import Interruption


def start_run(
    arguments: TrainArguments,
    *,
    lr: float | None = None,
    inputs: Sequence[str] | None = None,
    bf16: bool = False,
) -> TrainingRun:
    """Check configuration, data and model of a run, make its folder, and join the other processes.

    Most mistakes end the run here, before torch is imported. Each process gets the same seed, so
    that all make the same first weights. The arguments are those of `read_setup`.

    Raises:
        ConfigError: The run folder cannot be made or written.
        WavemareError: See `read_setup`, `find_data` and `check_model`.
    """
    setup, source = read_setup(arguments, lr=lr, inputs=inputs, bf16=bf16), find_data(arguments)
    check_model(arguments)
    run = TrainingRun(**vars(setup), source=source)
    join_and_seed(arguments.seed)
    return run


@dataclass
class TrainingRun(Setup):
    """One run of a recipe: what is known of it, and what is around its loop, on all processes.

    Attributes:
        source: Where the data is.
        parameters: Trained parameters of all stages, with the copies of untied weights.
        step: Optimizer steps done.
        is_last: Whether no step follows: the last one is done, or SIGTERM came.
        stopped: Whether SIGTERM has ended the training before the last step.
    """

    source: Source

    def __post_init__(self) -> None:
        """Make the run folder, which records warnings from now on."""
        self.parameters = self.step = 0
        self.is_last = self.stopped = False
        self._recording = start_recording(self.arguments)
        self._open_step = ExitStack()  # of the recording, until `after_step`
        self._losses: list[Any] = []  # since the last line of metrics
        self._engine: Any = None
        self._loader: ResumableLoader
        self._interruption: Interruption

    def begin(
        self, title: str, model: Any, corpus: Mapping[str, object], rate: str | None = None
    ) -> None:
        """Wait until all processes have data and model, and print what is trained, and how.

        One host may read the data for hours: the time limit that ends a collective does not count
        here. With ``--balance``, the devices then share the work by their speed: `balance` changes
        the configuration.

        Args:
            title: Of the run.
            model: The whole transformers model.
            corpus: What it learns from, by name.
            rate: How the learning rate changes if the JSON has no scheduler; constant if omitted.

        Raises:
            ConfigError, PlanError: See `balance`.
        """
        from torch import distributed

        store = distributed.distributed_c10d._get_default_store()
        meet(store, "wavemare/data", self.world_size)
        self.parameters = count_parameters(self, model)
        print_start(title, self, model, corpus, rate)
        balance(self, model)

    @contextmanager
    def training(self, engine: Any, loader: ResumableLoader) -> Iterator[Iterator[int]]:
        """Give the numbers of the steps to train, inside of ``with``.

        Dropout gets its seed: ranks that share layers draw the same numbers, others not. If the run
        resumes, the newest checkpoint is loaded, with its random state. SIGTERM to any process ends
        the steps of all processes after the same one. Leaving ``with`` waits for a checkpoint that
        is written in the background.

        Args:
            engine: Of `wavemare.initialize`.
            loader: Of the samples to train on; checkpoints keep its place.

        Raises:
            CheckpointError: The checkpoint does not fit the engine, or is of other data.
            ConfigError: The checkpoint is past the last step; or a run that has not ended writes
                the folder.
        """
        import torch

        from wavemare.engine import Interruption

        self._engine, self._loader = engine, loader
        Screen(rank=self.rank).note(self.layout or engine.layout)  # most runs have none
        section = getattr(engine, "settings", None)
        shared = 1 if section is None else section.tensor_parallel.size
        torch.manual_seed(self.arguments.seed + 1 + self.rank // shared)
        if self.resume:
            self._load()
        self.step = engine.global_steps
        rows = engine.train_batch_size() * self.arguments.rows_per_sample
        tokens = rows * self.arguments.sequence_length  # of a step
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
        before_last = self.step < self.arguments.max_steps
        self.stopped = before_last and self._interruption.stops_after(self.step)
        self.is_last = self.stopped or not before_last
        if self.is_last or self.step % self.arguments.log_interval == 0:
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
        if not self.is_last and self.step % self.arguments.save_interval:
            return
        if self.layout is not None and self.rank == 0:
            atomic_write_text(self.folder / LAYOUT_FILE, self.layout.to_json())
        seconds = self._recording.training_seconds
        state = {"loader": self._loader.state_dict(), "seconds": seconds}
        with self._recording.saving(self.step, f"step-{self.step:06d}") as tag:
            self._engine.save_checkpoint(str(self.checkpoints), tag, client_state=state)

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
        for step in range(self.step + 1, self.arguments.max_steps + 1):
            self._open_step.enter_context(self._recording.step(step))
            self.step = step
            yield step
            if self.stopped:
                self._recording.stopped(step)
                break

    def _load(self) -> None:
        """Go on from the newest checkpoint: engine, order of the data, and training time so far."""
        engine, most = self._engine, self.arguments.max_steps
        _, state = engine.load_checkpoint(str(self.checkpoints))
        if engine.global_steps > most:
            reason = f"the checkpoint is at step {engine.global_steps} already"
            raise ConfigError("--max_steps", most, reason, "Give more steps")
        consumed = {"consumed_samples": engine.global_samples}
        self._loader.load_state_dict({**state["loader"], **consumed})
        print_rank_0(f"resumed after step {engine.global_steps}")
        self._recording.earlier_seconds = float(state.get("seconds", 0.0))


def join_and_seed(seed: int) -> None:
    """Join the other processes, and seed the weights alike on all of them."""
    import random

    import numpy as np
    import torch

    # What any model needs, and takes seconds: before the others wait for this process.
    import transformers.generation.utils
    import transformers.modeling_utils  # noqa: F401
    from deepspeed.accelerator import get_accelerator

    import wavemare

    wavemare.init_distributed()
    quiet_libraries()
    random.seed(seed)  # transformers.set_seed, without the imports of its Trainer
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def disconnect() -> None:
    """Wait for the other processes and leave their group, so that no thread of it remains."""
    from torch import distributed

    distributed.barrier()
    distributed.destroy_process_group()
