# SPDX-License-Identifier: Apache-2.0
"""What is known of a run before its model, checked once; and how a run continues."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.engine.config.resolve import WavemareConfig, check_batch_sizes, check_config
from wavemare.engine.launch.group import (
    ensure_launched,
    environment_rank,
    environment_world_size,
    job_started,
    may_restart,
    meet,
)
from wavemare.errors import CheckpointError, ConfigError
from wavemare.files import atomic_write_text, remove_leftovers, replace_folder, temporary_sibling
from wavemare.observe.quiet import quiet_libraries
from wavemare.observe.recording import Recording
from wavemare.training.arguments import ALL, TrainArguments
from wavemare.training.config import BalanceController, resolve_config

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_")
"""Beginnings of the names by which launchers tell a process its place."""


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
    def final_samples(self) -> int | None:
        """Samples of the last evaluation at most; None for all."""
        if self.arguments.eval_iters is not None:
            return self.eval_samples
        given = self.arguments.final_eval_samples
        return None if given == ALL else int(given)

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def layout(self) -> Any:
        """The layout that ``--balance auto`` has measured for the model; None if none was."""
        return self.balance.measured

    def config_for(self, model: Any) -> dict[str, Any]:
        """Return DeepSpeed's configuration for a model.

        ``--balance auto`` measures the devices for it; all ranks call this.
        """
        length = self.arguments.sequence_length
        self.balance.measure(model, self.batch, sequence_length=length)
        return self.balance.config

    @property
    def data_ranks(self) -> int:
        """Number of processes that read different data."""
        return self.world_size // self.section.model_ranks


def prepare(arguments: TrainArguments) -> Setup:
    """Resolve and check the configuration; torch and DeepSpeed are not imported.

    Raises:
        LaunchError: No launcher started this process.
        ConfigError: A key or value of the configuration cannot work.
        PlanError: The layout of ``--balance`` cannot be read.
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
    from torch import distributed

    import wavemare

    wavemare.init_distributed()
    quiet_libraries()
    transformers.set_seed(setup.arguments.seed)
    if setup.foreign is not None:
        if setup.rank == 0:
            print(f"{setup.foreign} is converted for {setup.world_size} ranks", flush=True)
            convert_checkpoint(setup.folder / "checkpoints", setup.foreign)
        store = distributed.distributed_c10d._get_default_store()
        meet(store, "wavemare/converted", setup.world_size)  # a barrier would not wait for hours
        setup.balance.config.setdefault("checkpoint", {})["load_universal"] = True


def wait_for_data(setup: Setup) -> None:
    """Wait until every process has its data, which one host may read for hours."""
    from torch import distributed

    store = distributed.distributed_c10d._get_default_store()
    meet(store, "wavemare/data", setup.world_size)  # no time limit of a collective ends this


def prefer_bf16(setup: Setup) -> None:
    """Compute in bf16 on GPUs, unless the configuration says otherwise."""
    import torch

    config, bf16 = setup.balance.config, {"bf16": {"enabled": True}}
    if torch.cuda.is_available() and not config.keys() & {"bf16", "fp16"}:
        with suppress(ConfigError):  # some features refuse it
            check_config({**config, **bf16}, world_size=setup.world_size)
            config |= bf16


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


def resumes_after_restart(output: Path) -> bool:
    """Return whether ranks are started again, and this job has saved a checkpoint.

    A checkpoint that is older than the job is of another run.
    """
    latest = output / "checkpoints" / "latest"
    return may_restart() and latest.is_file() and latest.stat().st_mtime >= job_started()


def check_resume(
    checkpoints: Path, config: Mapping[str, Any], world_size: int, model_ranks: int
) -> str | None:
    """Check that there is a checkpoint to continue from.

    Returns:
        Its tag if it has to be converted (`needs_conversion`), else None.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged.
        ConfigError: A universal checkpoint is asked for that is older than the newest one.
    """
    universal = bool(config.get("checkpoint", {}).get("load_universal"))
    latest = checkpoints / ("latest_universal" if universal else "latest")
    if not latest.is_file():
        reason = f"there is no checkpoint (no file {latest.name})"
        remedy = "Start without --resume, or name the run's folder as --output"
        raise CheckpointError("--resume", str(checkpoints), reason, remedy)
    if not universal:
        return needs_conversion(checkpoints, world_size, model_ranks)
    newest = checkpoints / "latest"
    if newest.is_file() and newest.stat().st_mtime > latest.stat().st_mtime:
        reason = "checkpoints have been saved since the universal one was made"
        remedy = "Remove the key to resume from the newest, or remove the file latest"
        raise ConfigError("checkpoint.load_universal", True, reason, remedy)
    return None


def needs_conversion(checkpoints: Path, world_size: int, model_ranks: int) -> str | None:
    """Return the newest checkpoint's tag if another number of data ranks saved it with ZeRO.

    Those of local steps load in another number of replicas as they are.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    tag = resolve_tag(checkpoints, None)
    manifest = read_manifest(checkpoints / tag) if tag is not None else None
    saved = manifest["topology"] if manifest is not None else {"zero_stage": 0}
    if not saved["zero_stage"] or "replicas" in saved:
        return None
    own = {"world_size": world_size, "data": world_size // model_ranks}
    other = any(saved[key] != size for key, size in own.items())
    return tag if other and saved["pipe"] * saved["model"] == model_ranks else None


def convert_checkpoint(checkpoints: Path, tag: str) -> None:
    """Make a universal checkpoint of one, in another process.

    Raises:
        CheckpointError: The program failed.
    """
    universal = checkpoints / f"{tag}_universal"
    remove_leftovers(checkpoints)
    partial = temporary_sibling(universal)
    command = [sys.executable, "-m", "wavemare.universal"]
    words = ["--input_folder", str(checkpoints / tag), "--output_folder", str(partial)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(_RANK_VARIABLES)}
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        reason = f"it cannot be converted for another number of ranks: {''.join(last)}"
        raise CheckpointError("checkpoint", str(checkpoints / tag), reason, "Use as many ranks")
    replace_folder(partial, universal)
    atomic_write_text(checkpoints / "latest_universal", universal.name)


def adapt_accumulation(config: dict[str, Any], data_ranks: int) -> None:
    """Let another number of ranks share the same batch, in place: they accumulate more or less."""
    batch, micro = config.get("train_batch_size"), config.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data_ranks) == 0:
        config.pop("gradient_accumulation_steps", None)


def load_run(setup: Setup, engine: Any, batches: Any, recording: Recording) -> None:
    """Go on from the newest checkpoint: engine, order of the data and training time.

    Args:
        setup: Of the run.
        engine: The engine.
        batches: A `wavemare.data.loader.ResumableLoader`.
        recording: Of the run.

    Raises:
        CheckpointError: The checkpoint is of another topology or of other data.
        ConfigError: The checkpoint is past the last step.
    """
    _, state = engine.load_checkpoint(str(setup.checkpoints))
    if engine.global_steps > setup.arguments.max_steps:
        reason = f"the checkpoint is at step {engine.global_steps} already"
        raise ConfigError("--max_steps", setup.arguments.max_steps, reason, "Give more steps")
    batches.load_state_dict({**state["loader"], "consumed_samples": engine.global_samples})
    recording.seconds = float(state.get("seconds", 0.0))
    recording.screen.note(f"resumed after step {engine.global_steps}")


def save_run(setup: Setup, engine: Any, batches: Any, recording: Recording) -> None:
    """Save a checkpoint of all that `load_run` needs, and the layout that was measured."""
    setup.balance.save(setup.rank)
    step = engine.global_steps
    state = {"loader": batches.state_dict(), "seconds": recording.training_seconds}
    with recording.saving(step, f"step-{step:06d}") as tag:
        engine.save_checkpoint(str(setup.checkpoints), tag, client_state=state)
