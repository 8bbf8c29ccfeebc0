# SPDX-License-Identifier: Apache-2.0
"""How a recipe's run is saved, and continues."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.loader import ResumableLoader
from wavemare.engine.launch.group import job_started, may_restart
from wavemare.errors import CheckpointError, ConfigError
from wavemare.files import atomic_write_text
from wavemare.observe.recording import Recording
from wavemare.observe.screen import print_rank_0
from wavemare.training.balance import LAYOUT_FILE

if TYPE_CHECKING:
    from wavemare.training.setup import Setup


def load_checkpoint(
    setup: Setup,
    engine: Any,
    loader: ResumableLoader,
    recording: Recording,
) -> None:
    """Go on from the newest checkpoint: engine, order of the data, and the training time so far.

    Raises:
        CheckpointError: The checkpoint does not fit the engine, or is of other data.
        ConfigError: The checkpoint is past the last step.
    """
    _, state = engine.load_checkpoint(str(setup.checkpoints))
    if engine.global_steps > setup.arguments.max_steps:
        reason = f"the checkpoint is at step {engine.global_steps} already"
        raise ConfigError("--max_steps", setup.arguments.max_steps, reason, "Give more steps")
    loader.load_state_dict({**state["loader"], "consumed_samples": engine.global_samples})
    print_rank_0(f"resumed after step {engine.global_steps}")
    recording.earlier_seconds = float(state.get("seconds", 0.0))


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


def check_resume(checkpoints: Path, config: Mapping[str, Any]) -> None:
    """Check that there is a checkpoint to continue from.

    Raises:
        CheckpointError: There is no checkpoint.
        ConfigError: A universal checkpoint is asked for that is older than the newest one.
    """
    universal = bool(config.get("checkpoint", {}).get("load_universal"))
    latest = checkpoints / ("latest_universal" if universal else "latest")
    if not latest.is_file():
        reason = f"there is no checkpoint (no file {latest.name})"
        remedy = "Start without --resume, or name the run's folder as --output"
        raise CheckpointError("--resume", str(checkpoints), reason, remedy)
    newest = checkpoints / "latest"
    if universal and newest.is_file() and newest.stat().st_mtime > latest.stat().st_mtime:
        reason = "checkpoints have been saved since the universal one was made"
        remedy = "Remove the key to resume from the newest, or remove the file latest"
        raise ConfigError("checkpoint.load_universal", True, reason, remedy)
