# SPDX-License-Identifier: Apache-2.0
"""How a recipe goes on after a restart, also with another number of data-parallel ranks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.engine.launch.restart import agent_started, may_restart
from wavemare.errors import CheckpointError
from wavemare.files import (
    atomic_write_text,
    remove_leftovers,
    replace_folder,
    temporary_sibling,
)
from wavemare.recipes.arguments import JobArguments

__all__ = ["adapt_accumulation", "convert", "needs_conversion", "resume_after_restart"]

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_")
"""Beginnings of the names by which launchers tell a process its place."""
_FREE = ("world_size", "data")
"""Parts of a topology that a conversion changes."""

Arguments = TypeVar("Arguments", bound=JobArguments)


def resume_after_restart(arguments: Arguments) -> Arguments:
    """Return the options, with ``--resume`` if this job has saved a checkpoint before.

    A checkpoint that is older than the job's elastic agent is of another run.
    """
    latest = Path(arguments.output) / "checkpoints" / "latest"
    if arguments.resume or not may_restart() or not latest.is_file():
        return arguments
    if latest.stat().st_mtime < agent_started():
        return arguments
    resumed = replace(arguments, resume=True)
    resumed.megatron = arguments.megatron
    return resumed


def needs_conversion(checkpoints: Path, world_size: int, model_ranks: int) -> str | None:
    """Return the newest checkpoint's tag if it was saved by another number of data ranks.

    Without ZeRO every replica holds everything, and nothing has to be converted.

    Args:
        checkpoints: Folder of the checkpoints.
        world_size: Processes of this run.
        model_ranks: How many of them hold one model between them.

    Raises:
        CheckpointError: The checkpoint is damaged.
    """
    tag = resolve_tag(checkpoints, None)
    manifest = read_manifest(checkpoints / tag) if tag is not None else None
    if manifest is None or not manifest["topology"]["zero_stage"]:
        return None
    saved = manifest["topology"]
    own = {"world_size": world_size, "data": world_size // model_ranks}
    other = any(saved[key] != own[key] for key in _FREE)
    return tag if other and saved["pipe"] * saved["model"] == model_ranks else None


def convert(checkpoints: Path, tag: str) -> None:
    """Make a universal checkpoint of one, in a process of its own; one rank calls it.

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
    """Let fewer or more ranks share the same batch, in place: others accumulate more often.

    Args:
        config: The whole configuration.
        data_ranks: Processes that read different data.
    """
    sizes: Mapping[str, Any] = config
    batch, micro = sizes.get("train_batch_size"), sizes.get("train_micro_batch_size_per_gpu")
    if isinstance(batch, int) and isinstance(micro, int) and batch % (micro * data_ranks) == 0:
        config.pop("gradient_accumulation_steps", None)
