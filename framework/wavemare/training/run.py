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
        step: The step that is trained, from 1; after the loop, the optimizer steps done.
        parameters: The trained ones of all stages, with the copies of untied weights.
    """

    source: Source

    def __post_init__(self) -> None:
        """Make the run folder, which records warnings from now on."""
        self.step = self.parameters = 0
        self._recording = start_recording(self.arguments)
        self._open_step = ExitStack()  # of the recording, until `record`
        self._losses: list[Any] = []  # since the last line of metrics
        self._interruption: Interruption
        self._asked = 0  # the last step after which the ranks were asked whether they stop
        self._stops = False

    def wait_for_all(self) -> None:
        """Wait until all processes have data and model, which may take some of them hours.

        The time limit that ends a collective does not count here.
        """
        from torch import distributed

        store = distributed.distributed_c10d._get_default_store()
        meet(store, "wavemare/data", self.world_size)

    def show(
        self, title: str, model: Any, corpus: Mapping[str, object], rate: str | None = None
    ) -> None:
        """Print what is trained, and how; see `print_start`. It counts the parameters, too.

        So it comes before `wavemare.initialize`, which divides them.
        """
        self.parameters = count_parameters(self, model)
        print_start(title, self, model, corpus, self.parameters, rate)

    def balance(self, model: Any) -> None:
        """With ``--balance``, write the devices' shares into `config`; see `balance`."""
        balance(self, model)

    def resume_or_start(self, engine: Any, loader: ResumableLoader) -> int:
        """Seed the dropout, load the newest checkpoint if the run resumes, return the first step.

        Ranks that share layers draw the same numbers for dropout, others not. A checkpoint has a
        random state of its own.

        Args:
            engine: Of `wavemare.initialize`.
            loader: Of the samples to train on; it goes on from its place in the checkpoint.

        Raises:
            CheckpointError: The checkpoint does not fit the engine, or is of other data.
            ConfigError: The checkpoint is past the last step.
        """
        import torch

        section = getattr(engine, "settings", None)
        shared = 1 if section is None else section.tensor_parallel.size
        torch.manual_seed(self.arguments.seed + 1 + self.rank // shared)
        if self.resume:
            self._load(engine, loader)
        self.step = self._asked = engine.global_steps
        return self.step + 1

    @contextmanager
    def recording(self, engine: Any) -> Iterator[None]:
        """Record the steps inside of ``with`` in the run folder, and show their progress.

        SIGTERM sets a flag in there, which `is_last` reads. Leaving ``with`` waits for a checkpoint
        that is written in the background.

        Args:
            engine: Of `wavemare.initialize`, as `resume_or_start` leaves it.

        Raises:
            ConfigError: A run that has not ended writes the folder.
        """
        from wavemare.engine import Interruption

        Screen(rank=self.rank).note(self.layout or engine.layout)  # most runs have none
        rows = engine.train_batch_size() * self.arguments.rows_per_sample
        tokens = rows * self.arguments.sequence_length  # of a step
        with (
            self._recording.training(engine, tokens=tokens),
            Interruption.of(engine) as self._interruption,
        ):
            yield
            engine.finish_saving()

    def steps(self, first: int) -> Iterator[int]:
        """Yield the numbers of the steps to train, inside of `recording`.

        The last one is that of ``--max_steps``. After SIGTERM to any process, all processes end
        after the same step, one to three steps later.
        """
        for step in range(first, self.arguments.max_steps + 1):
            self.step = step
            self._open_step.enter_context(self._recording.step(step))
            yield step
            self._open_step.close()
            if self.stopped:
                self._recording.stopped(step)
                return

    @property
    def is_last(self) -> bool:
        """Whether no step follows this one: it is the last of all, or SIGTERM came.

        All processes get the same answer.
        """
        return self.step >= self.arguments.max_steps or self.stopped

    @property
    def stopped(self) -> bool:
        """Whether SIGTERM ends the training after this step, which is not the last of all."""
        if self._asked < self.step < self.arguments.max_steps:
            self._asked = self.step  # once after each step
            self._stops = self._interruption.stops_after(self.step)
        return self._stops

    def record(
        self, step: int, loss: Any, figures: Callable[[], Mapping[str, float]] | None = None
    ) -> None:
        """Show that a step is done; every ``--log_interval`` steps, write a line of metrics.

        Args:
            step: Its number. Its time ends here.
            loss: Its mean loss, a tensor with one element. A line has the mean since the line
                before. Only a line waits for the device.
            figures: Returns more figures for a line, by name.
        """
        self._open_step.close()
        self._losses.append(loss)
        if self.is_last or step % self.arguments.log_interval == 0:
            more = {} if figures is None else figures()
            mean = float(sum(self._losses) / len(self._losses))
            self._recording.log(step, loss=mean, **more)
            self._losses.clear()

    def log_eval(self, step: int, **metrics: float) -> None:
        """Write and show what an evaluation after a step has found, such as ``eval_loss``.

        The time since the step counts as the evaluation's.
        """
        self._recording.log_eval(step, **metrics)

    def save_checkpoint(self, engine: Any, loader: ResumableLoader) -> None:
        """Save all that a resumed run needs, in the folder of the run's checkpoints.

        The layout of the run stands beside them, if it has one.
        """
        if self.layout is not None and self.rank == 0:
            atomic_write_text(self.folder / LAYOUT_FILE, self.layout.to_json())
        state = {"loader": loader.state_dict(), "seconds": self._recording.training_seconds}
        with self._recording.saving(self.step, f"step-{self.step:06d}") as tag:
            engine.save_checkpoint(str(self.checkpoints), tag, client_state=state)

    def finish(
        self,
        results: Mapping[str, Any],
        baselines: Callable[[], tuple[Mapping[str, Any], Mapping[str, float]]] | None = None,
    ) -> None:
        """Write and show the results and the loss curve; see `wavemare.observe.Recording.finish`.

        Args:
            results: Figures by name; the number of `parameters` is added.
            baselines: Returns more results, and losses to compare with, by name. Rank 0 calls it
                last.
        """
        self._recording.finish({**results, "parameters": self.parameters}, baselines)

    def _load(self, engine: Any, loader: ResumableLoader) -> None:
        """Go on from the newest checkpoint: engine, order of the data, and training time so far."""
        most = self.arguments.max_steps
        _, state = engine.load_checkpoint(str(self.checkpoints))
        if engine.global_steps > most:
            reason = f"the checkpoint is at step {engine.global_steps} already"
            raise ConfigError("--max_steps", most, reason, "Give more steps")
        loader.load_state_dict({**state["loader"], "consumed_samples": engine.global_samples})
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
