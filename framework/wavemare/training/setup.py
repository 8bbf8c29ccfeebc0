# SPDX-License-Identifier: Apache-2.0
"""Everything about a run that is known before the model: checked once, then frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import WavemareConfig, check_batch_sizes, check_config
from wavemare.engine.launch.group import ensure_launched, environment_rank, environment_world_size
from wavemare.engine.launch.restart import may_restart
from wavemare.observe.quiet import quiet_libraries
from wavemare.training.arguments import TrainArguments
from wavemare.training.balance import BalanceController
from wavemare.training.config import resolve_config
from wavemare.training.resume import (
    adapt_accumulation,
    check_resume,
    convert_checkpoint,
    resumes_after_restart,
)

__all__ = ["Setup", "connect", "leave", "prepare", "seed_dropout"]


@dataclass(frozen=True)
class Setup:
    """A checked run.

    Attributes:
        arguments: The recipe's options.
        balance: Holds the DeepSpeed configuration; ``--balance auto`` completes it by measurements.
        section: The section ``"wavemare"`` of the configuration.
        batch: DeepSpeed's three batch sizes by their keys.
        resume: Whether the run continues from a checkpoint.
        foreign: Tag of a checkpoint of another number of ranks, which `connect` converts.
        rank: Of this process.
        world_size: Number of processes.
    """

    arguments: TrainArguments
    balance: BalanceController
    section: WavemareConfig
    batch: dict[str, int]
    resume: bool
    foreign: str | None
    rank: int
    world_size: int

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.arguments.output)

    @property
    def num_samples(self) -> int:
        """Samples of the whole training."""
        return self.arguments.max_steps * self.batch["train_batch_size"]

    @property
    def eval_samples(self) -> int:
        """Samples of an evaluation between two steps."""
        iterations = self.arguments.eval_iters
        if iterations is None:
            return self.arguments.eval_samples
        return iterations * self.batch["train_batch_size"]

    @property
    def data_ranks(self) -> int:
        """Number of processes that read different data."""
        return self.world_size // self.section.model_ranks


def prepare(arguments: TrainArguments) -> Setup:
    """Resolve and check the configuration; torch and DeepSpeed are not imported.

    Raises:
        LaunchError: No launcher started this process.
        ConfigError: A key or value of the configuration cannot work.
        PlanError: The plan of ``--balance`` cannot be read.
        CheckpointError: ``--resume`` finds no checkpoint, or a damaged one.
    """
    resume = arguments.resume or resumes_after_restart(Path(arguments.output))
    balance = BalanceController(
        arguments.balance, resolve_config(arguments), Path(arguments.output), resume=resume
    )
    ensure_launched()
    rank, world_size = environment_rank(), environment_world_size()
    section = check_config(balance.config, world_size=world_size)
    data_ranks = world_size // section.model_ranks
    if may_restart():
        adapt_accumulation(balance.config, data_ranks)
    batch = check_batch_sizes(balance.config, data_world_size=data_ranks)
    quiet_libraries()
    foreign = None
    if resume:
        folder = Path(arguments.output) / "checkpoints"
        foreign = check_resume(folder, balance.config, world_size, section.model_ranks)
    return Setup(arguments, balance, section, batch, resume, foreign, rank, world_size)


def connect(setup: Setup) -> None:
    """Join the other processes, and seed the weights alike on all of them."""
    import transformers

    import wavemare

    wavemare.init_distributed()
    quiet_libraries()
    transformers.set_seed(setup.arguments.seed)
    if setup.foreign is not None:
        convert_checkpoint(setup.folder / "checkpoints", setup.foreign, setup.rank)
        setup.balance.config.setdefault("checkpoint", {})["load_universal"] = True


def seed_dropout(engine: Any, seed: int) -> None:
    """Seed torch for the training: ranks that share layers draw the same numbers, others not."""
    import torch
    from torch import distributed

    section = getattr(engine, "settings", None)
    shared = 1 if section is None else section.tensor_parallel.size
    torch.manual_seed(seed + 1 + distributed.get_rank() // shared)


def leave() -> None:
    """Wait for the other processes and leave their group, so that no thread of it remains."""
    from torch import distributed

    distributed.barrier()
    distributed.destroy_process_group()
