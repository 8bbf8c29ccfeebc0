# SPDX-License-Identifier: Apache-2.0
"""Packages that only some features need, and the extra of wavemare that installs each."""

from __future__ import annotations

from importlib.util import find_spec

from wavemare.errors import LaunchError

EXTRAS = {"matplotlib": "report", "numba": "sparse", "peft": "peft", "plotly": "report"}
"""The extra that brings a package."""


def is_installed(package: str) -> bool:
    """Whether a package of `EXTRAS` can be imported."""
    return find_spec(package) is not None


def require(package: str, feature: str) -> None:
    """Check that the package of a feature is installed.

    Args:
        package: One of `EXTRAS`.
        feature: What needs it, in words that begin a sentence.

    Raises:
        LaunchError: It is not installed; the remedy names the extra.
    """
    if not is_installed(package):
        remedy = f"Install it: pip install 'wavemare[{EXTRAS[package]}]'"
        raise LaunchError(package, None, f"{feature} needs it, and it is not installed", remedy)
