# SPDX-License-Identifier: Apache-2.0
"""Continuing a run, also after a restart with another number of data-parallel ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.engine.launch.restart import agent_started, may_restart
from wavemare.errors import CheckpointError, ConfigError
from wavemare.files import atomic_write_text, remove_leftovers, replace_folder, temporary_sibling

__all__ = [
    "adapt_accumulation",
    "check_resume",
    "convert_checkpoint",
    "load_run",
    "needs_conversion",
    "resumes_after_restart",
]

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_")
"""Beginnings of the names by which launchers tell a process its place."""


def resumes_after_restart(output: Path) -> bool:
    """Return whether torch's elastic agent restarts ranks, and this job has saved a checkpoint.

    A checkpoint that is older than the agent is of another run.
    """
    latest = output / "checkpoints" / "latest"
    return may_restart() and latest.is_file() and latest.stat().st_mtime >= agent_started()


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

    Args:
        checkpoints: Folder of the checkpoints.
        world_size: Processes of this run.
        model_ranks: How many of them hold one model together.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    tag = resolve_tag(checkpoints, None)
    manifest = read_manifest(checkpoints / tag) if tag is not None else None
    if manifest is None or not manifest["topology"]["zero_stage"]:
        return None
    saved = manifest["topology"]
    own = {"world_size": world_size, "data": world_size // model_ranks}
    other = any(saved[key] != size for key, size in own.items())
    return tag if other and saved["pipe"] * saved["model"] == model_ranks else None


def convert_checkpoint(checkpoints: Path, tag: str, rank: int) -> None:
    """Make a universal checkpoint of one, in a process of rank 0; all ranks call this.

    Raises:
        CheckpointError: The program failed.
    """
    from torch import distributed

    if rank == 0:
        _convert(checkpoints, tag)
    distributed.barrier()


def _convert(checkpoints: Path, tag: str) -> None:
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
    """Let another number of ranks share the same batch, in place: they accumulate more or less.

    Args:
        config: The whole configuration.
        data_ranks: Processes that read different data.
    """
    sizes: Mapping[str, Any] = config
    batch, micro = sizes.get("train_batch_size"), sizes.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data_ranks) == 0:
        config.pop("gradient_accumulation_steps", None)


def load_run(engine: Any, checkpoints: str | Path, batches: Any, steps: int) -> float:
    """Load the newest checkpoint into an engine and a loader.

    Args:
        engine: Of `wavemare.initialize`.
        checkpoints: Folder of the checkpoints.
        batches: A `wavemare.data.ResumableLoader`.
        steps: The last optimizer step of the run.

    Returns:
        Seconds that the run has trained before.

    Raises:
        CheckpointError: The checkpoint is of another topology or of other data.
        ConfigError: No step is left.
    """
    _, state = engine.load_checkpoint(str(checkpoints))
    if engine.global_steps >= steps:
        reason = f"the checkpoint is at step {engine.global_steps} already"
        raise ConfigError("--max_steps", steps, reason, "Give more steps")
    batches.load_state_dict({**state["loader"], "consumed_samples": engine.global_samples})
    return float(state.get("seconds", 0.0))
