# SPDX-License-Identifier: Apache-2.0
"""What this machine has for ranks: DeepSpeed's launcher, devices, and variables to set."""

from __future__ import annotations

import glob
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from wavemare.errors import LaunchError

# CUDA, CUDA in WSL, ROCm, Intel, Habana, Ascend and Cambricon.
_DEVICE_FILES = (
    "/dev/nvidia[0-9]*",
    "/dev/dxg",
    "/dev/kfd",
    "/dev/dri/renderD*",
    "/dev/accel*",
    "/dev/davinci[0-9]*",
    "/dev/cambricon_dev*",
)


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


def accelerator_visible() -> bool:
    """Whether this machine may have an accelerator; torch is not imported."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return False
    except metadata.PackageNotFoundError:
        return False
    if os.environ.get("CUDA_VISIBLE_DEVICES") in {"", "-1"}:
        return False
    return sys.platform == "darwin" or any(glob.glob(pattern) for pattern in _DEVICE_FILES)


def device_count() -> int:
    """Return how many accelerators the ranks of this host will see, by torch; 0 without any."""
    if not accelerator_visible() or os.environ.get("DS_ACCELERATOR") == "cpu":
        return 0  # torch takes seconds to import

    import torch

    return torch.accelerator.device_count()
