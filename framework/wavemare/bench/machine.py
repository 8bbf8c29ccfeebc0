# SPDX-License-Identifier: Apache-2.0
"""The machine that a result was measured on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from deepspeed.accelerator import get_accelerator

__all__ = ["describe_machine"]

_PACKAGES = ("wavemare", "torch", "deepspeed", "transformers")


def describe_machine() -> dict[str, Any]:
    """Return what decides how fast this machine is, and the versions of what ran on it."""
    return {
        "system": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "accelerator": get_accelerator().device_name(),
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in _PACKAGES},
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
