# SPDX-License-Identifier: Apache-2.0
"""What is known of a run before its model, checked once; and how processes join and part."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import WavemareConfig, check_batch_sizes, check_config
from wavemare.engine.launch.group import (
    ensure_launched,
    environment_rank,
    environment_world_size,
    may_restart,
    meet,
)
from wavemare.errors import ConfigError
from wavemare.observe.quiet import quiet_libraries
from wavemare.parallel.layout.layout import Layout
from wavemare.training.arguments import ALL, TrainArguments
from wavemare.training.balance import read_layout, with_layout
from wavemare.training.checkpoints import check_resume, resumes_after_restart
from wavemare.training.config import resolve_config


@dataclass(frozen=True)
class Setup:
    """A checked run.

    Attributes:
        arguments: The recipe's options.
        config: DeepSpeed's configuration, with the changes of the options.
        layout: The layout that ``--balance`` names, that of the run that continues, or the one
            that `wavemare.training.balance.balance` has measured.
        section: The section ``"wavemare"`` of the configuration.
        batch: DeepSpeed's three batch sizes by their keys.
        resume: Whether the run continues from a checkpoint.
        rank: Of this process.
        world_size: Number of processes.
    """

    arguments: TrainArguments
    config: dict[str, Any]
    layout: Layout | None
    section: WavemareConfig
    batch: dict[str, int]
    resume: bool
    rank: int
    world_size: int

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.arguments.output)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def model_folder(self) -> Path:
        """The folder of the trained model, in Hugging Face's format."""
        return self.folder / "model"

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
    def final_samples(self) -> int | None:
        """Samples of the last evaluation at most; None for all."""
        if self.arguments.eval_iters is not None:
            return self.eval_samples
        given = self.arguments.final_eval_samples
        return None if given == ALL else int(given)

    @property
    def data_ranks(self) -> int:
        """Number of processes that read different data."""
        return self.world_size // self.section.model_ranks

    @property
    def tensor_parallel(self) -> int:
        """Number of processes that share each layer."""
        return self.section.tensor_parallel.size


def read_setup(arguments: TrainArguments) -> Setup:
    """Resolve and check the configuration, before torch and DeepSpeed are imported.

    Args:
        arguments: The recipe's options.

    Raises:
        LaunchError: No launcher started this process.
        ConfigError: A key or value of the configuration cannot work.
        PlanError: The layout of ``--balance`` cannot be read.
        CheckpointError: ``--resume`` finds no checkpoint, or a damaged one.
    """
    folder = Path(arguments.output)
    resume = arguments.resume or resumes_after_restart(folder)
    config = resolve_config(arguments)
    layout = read_layout(arguments, config, resume=resume)
    if layout is not None:
        config = with_layout(config, layout)
    ensure_launched()
    rank, world_size = environment_rank(), environment_world_size()
    section = check_config(config, world_size=world_size)
    data_ranks = world_size // section.model_ranks
    if may_restart():
        adapt_accumulation(config, data_ranks)
    batch = check_batch_sizes(config, data_world_size=data_ranks)
    quiet_libraries()
    if resume:
        check_resume(folder / "checkpoints", config)
    return Setup(arguments, config, layout, section, batch, resume, rank, world_size)


def prefer_bf16(setup: Setup) -> Setup:
    """Return the setup in bf16 if there are GPUs and the JSON names no 16-bit type."""
    import torch

    if torch.cuda.is_available() and not setup.config.keys() & {"bf16", "fp16"}:
        changed = {**setup.config, "bf16": {"enabled": True}}
        with suppress(ConfigError):  # some features refuse it
            check_config(changed, world_size=setup.world_size)
            return replace(setup, config=changed)
    return setup


def fill_in_auto(setup: Setup, *, lr: float, inputs: Sequence[str]) -> Setup:
    """Return the setup with a learning rate for ``"lr": "auto"``, and with a pipeline's inputs.

    Args:
        setup: Of the run.
        lr: The learning rate.
        inputs: What of a batch travels between stages, by name.
    """
    config = copy.deepcopy(setup.config)
    rates = config.get("optimizer", {}).get("params", {})
    if rates.get("lr") == "auto":
        rates["lr"] = lr
    pipeline = config.get("wavemare", {}).get("pipeline")
    if pipeline is not None:
        pipeline["inputs"] = list(inputs)
    return replace(setup, config=config)


def join_and_seed(setup: Setup) -> None:
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
    seed = setup.arguments.seed  # transformers.set_seed, without the imports of its Trainer
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    get_accelerator().manual_seed_all(seed)


def wait_for_data(setup: Setup) -> None:
    """Wait until every process has its data, which one host may read for hours.

    The time limit that ends a collective does not count here.
    """
    from torch import distributed

    store = distributed.distributed_c10d._get_default_store()
    meet(store, "wavemare/data", setup.world_size)


def seed_dropout(engine: Any, seed: int) -> None:
    """Seed torch for the training: ranks that share layers draw the same numbers, others not."""
    import torch
    from torch import distributed

    section = getattr(engine, "settings", None)
    shared = 1 if section is None else section.tensor_parallel.size
    torch.manual_seed(seed + 1 + distributed.get_rank() // shared)


def disconnect() -> None:
    """Wait for the other processes and leave their group, so that no thread of it remains."""
    from torch import distributed

    distributed.barrier()
    distributed.destroy_process_group()


def adapt_accumulation(config: dict[str, Any], data_ranks: int) -> None:
    """Let another number of ranks share the same batch, in place: they accumulate more or less."""
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data_ranks) == 0:
        config.pop("gradient_accumulation_steps", None)
