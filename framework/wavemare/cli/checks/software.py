# SPDX-License-Identifier: Apache-2.0
"""Python and the packages against the floors that our own metadata states."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from wavemare.cli.checks.finding import Finding

__all__ = ["check_accelerator", "check_compiler", "check_packages", "check_python"]

_SHOWN = ("torch", "deepspeed", "transformers", "datasets", "mpi4py")


def check_python() -> Iterator[Finding]:
    """Check the interpreter against ``requires-python``."""
    version = platform.python_version()
    wanted = metadata.metadata("wavemare")["Requires-Python"]
    if SpecifierSet(wanted).contains(version, prereleases=True):
        yield Finding("python", "ok", f"{version} ({sys.executable})")
    else:
        yield Finding("python", "fail", version, f"Use Python {wanted}")


def check_packages() -> Iterator[Finding]:
    """Check the packages that decide whether a run works."""
    yield Finding("wavemare", "ok", metadata.version("wavemare"))
    requirements = [Requirement(text) for text in metadata.requires("wavemare") or []]
    floors = {item.name: item.specifier for item in requirements if item.marker is None}
    for name in _SHOWN:
        yield check_version(name, floors.get(name, SpecifierSet()))


def check_version(name: str, wanted: SpecifierSet) -> Finding:
    """Check one package.

    Args:
        name: Its name on PyPI.
        wanted: Versions that work; a local build such as ``2.13.0+cpu`` counts as 2.13.0.
    """
    remedy = f'pip install "{name}{wanted}"'
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(name, "fail", "not installed", remedy)
    if not wanted.contains(version, prereleases=True):
        return Finding(name, "fail", f"{version}, but {wanted} is needed", remedy)
    return Finding(name, "ok", version)


def check_accelerator() -> Iterator[Finding]:
    """Name the devices that torch sees; a CPU alone is fine."""
    try:
        import torch
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        yield Finding(
            "accelerator", "fail", f"torch cannot be imported: {reason}", "Reinstall torch"
        )
        return
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        yield Finding("accelerator", "ok", "none, runs use the CPU")
        return
    count = torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if device.type == "cuda" else device.type
    yield Finding("accelerator", "ok", f"{count} x {name}")


def check_compiler() -> Iterator[Finding]:
    """Tell whether DeepSpeed's optional C++ and CUDA parts could be compiled."""
    programs = ("c++", "ninja", "nvcc")
    found = [name for name in programs if shutil.which(name)]
    yield Finding("compiler", "ok", f"{', '.join(found) or 'none'} (optional, not needed to train)")
