# SPDX-License-Identifier: Apache-2.0
"""What this machine has for ranks: DeepSpeed's launcher, devices, and variables to set."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from wavemare.engine.launch.devices import accelerator_visible
from wavemare.errors import LaunchError


def find_deepspeed() -> str:
    """Return the ``deepspeed`` script of this environment, else the one in PATH.

    Raises:
        LaunchError: There is none.
    """
    return find_script("deepspeed", "deepspeed")


def find_script(name: str, package: str) -> str:
    """Return a script of this environment, else the one in PATH.

    Args:
        name: Of the script.
        package: What brings it.

    Raises:
        LaunchError: There is none.
    """
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        reason = f"neither beside {sys.executable} nor in PATH"
        raise LaunchError(name, None, reason, f"Install it: pip install {package}")
    return found


def extra_environment() -> dict[str, str]:
    """Return the variables that the ranks need and the user has not set."""
    variables = {}
    if not accelerator_visible():
        # Otherwise DeepSpeed warns on every rank that it has found no accelerator.
        variables["DS_ACCELERATOR"] = "cpu"
    if os.environ.get("DS_ACCELERATOR", variables.get("DS_ACCELERATOR")) == "cpu":
        # By default every rank would start as many threads as there are cores.
        variables["OMP_NUM_THREADS"] = "1"
    return {name: value for name, value in variables.items() if name not in os.environ}


def device_count() -> int:
    """Return how many accelerators the ranks of this host will see, by torch; 0 without any."""
    if not accelerator_visible() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0  # torch takes seconds to import

    import torch

    return torch.accelerator.device_count()
