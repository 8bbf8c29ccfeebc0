# SPDX-License-Identifier: Apache-2.0
"""What is known of a run before its model, checked once."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import WavemareConfig, check_batch_sizes, check_config
from wavemare.engine.launch.devices import accelerator_visible
from wavemare.engine.launch.group import (
    ensure_launched,
    environment_rank,
    environment_world_size,
    may_restart,
)
from wavemare.errors import ConfigError
from wavemare.observe.quiet import quiet_libraries
from wavemare.parallel.layout.layout import Layout
from wavemare.training.arguments import ALL, TrainArguments
from wavemare.training.balance import read_layout, with_layout
from wavemare.training.checkpoints import check_resume, resumes_after_restart
from wavemare.training.config import resolve_config


@dataclass
class Setup:
    """What is known of a run. Only `wavemare.training.balance.balance` changes it.

    Attributes:
        arguments: The recipe's options.
        config: DeepSpeed's, with the changes of the options; `balance` adds the devices' shares.
        layout: The layout that ``--balance`` names, that of the run that continues, or the one
            that `balance` has measured.
        section: ``"wavemare"`` of the configuration.
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


def read_setup(
    arguments: TrainArguments,
    *,
    lr: float | None = None,
    inputs: Sequence[str] | None = None,
    bf16: bool = False,
) -> Setup:
    """Resolve and check the configuration, before torch and DeepSpeed are imported.

    Args:
        arguments: The recipe's options.
        lr: The learning rate that ``"lr": "auto"`` in the JSON stands for.
        inputs: What of a batch travels between the stages of a pipeline, by name; what the JSON
            says if omitted.
        bf16: Whether to compute in bf16 on GPUs, if the JSON names no 16-bit type.

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
    if bf16:
        config = _prefer_bf16(config, world_size)
    config = _fill_in(config, lr, inputs)
    return Setup(arguments, config, layout, section, batch, resume, rank, world_size)


def _prefer_bf16(config: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Return the configuration in bf16 if there are GPUs and it names no 16-bit type."""
    if not accelerator_visible() or config.keys() & {"bf16", "fp16"}:
        return config
    import torch

    if torch.cuda.is_available():
        changed = {**config, "bf16": {"enabled": True}}
        with suppress(ConfigError):  # some features refuse it
            check_config(changed, world_size=world_size)
            return changed
    return config


def _fill_in(
    config: dict[str, Any], lr: float | None, inputs: Sequence[str] | None
) -> dict[str, Any]:
    """Return the configuration with a recipe's learning rate and its inputs of stages."""
    config = copy.deepcopy(config)
    rates = config.get("optimizer", {}).get("params", {})
    if lr is not None and rates.get("lr") == "auto":
        rates["lr"] = lr
    pipeline = config.get("wavemare", {}).get("pipeline")
    if inputs is not None and pipeline is not None:
        pipeline["inputs"] = list(inputs)
    return config


def adapt_accumulation(config: dict[str, Any], data_ranks: int) -> None:
    """Let another number of ranks share the same batch, in place: they accumulate more or less."""
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data_ranks) == 0:
        config.pop("gradient_accumulation_steps", None)
