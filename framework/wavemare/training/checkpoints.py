# SPDX-License-Identifier: Apache-2.0
"""Whether a recipe's run continues from a checkpoint, and whether it can."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavemare.engine.launch.group import job_started, may_restart
from wavemare.errors import CheckpointError, ConfigError


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
