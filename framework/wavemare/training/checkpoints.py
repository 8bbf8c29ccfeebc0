# SPDX-License-Identifier: Apache-2.0
"""How a recipe's run is saved, and continues."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.loader import ResumableLoader
from wavemare.engine.checkpoint.manifest import read_manifest, resolve_tag
from wavemare.engine.launch.group import job_started, may_restart
from wavemare.errors import CheckpointError, ConfigError
from wavemare.files import atomic_write_text, remove_leftovers, replace_folder, temporary_sibling
from wavemare.observe.recording import Recording
from wavemare.observe.screen import print_rank_0
from wavemare.training.balance import LAYOUT_FILE

if TYPE_CHECKING:
    from wavemare.training.setup import Setup

_RANK_VARIABLES = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMPI_", "PMI", "SLURM_")
"""Beginnings of the names by which launchers tell a process its place."""


def load_checkpoint(setup: Setup, engine: Any, loader: ResumableLoader) -> float:
    """Go on from the newest checkpoint: the engine and the order of the data.

    Returns:
        The training time of the run so far, in seconds.

    Raises:
        CheckpointError: The checkpoint is of another topology or of other data.
        ConfigError: The checkpoint is past the last step.
    """
    _, state = engine.load_checkpoint(str(setup.checkpoints))
    if engine.global_steps > setup.arguments.max_steps:
        reason = f"the checkpoint is at step {engine.global_steps} already"
        raise ConfigError("--max_steps", setup.arguments.max_steps, reason, "Give more steps")
    loader.load_state_dict({**state["loader"], "consumed_samples": engine.global_samples})
    print_rank_0(f"resumed after step {engine.global_steps}")
    return float(state.get("seconds", 0.0))


def save_checkpoint(
    setup: Setup,
    engine: Any,
    loader: ResumableLoader,
    recording: Recording,
) -> None:
    """Save all that `load_checkpoint` needs, and the layout of the run beside it if it has one."""
    if setup.layout is not None and setup.rank == 0:
        atomic_write_text(setup.folder / LAYOUT_FILE, setup.layout.to_json())
    step = engine.global_steps
    state = {"loader": loader.state_dict(), "seconds": recording.training_seconds}
    with recording.saving(step, f"step-{step:06d}") as tag:
        engine.save_checkpoint(str(setup.checkpoints), tag, client_state=state)


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
