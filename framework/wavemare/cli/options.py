# SPDX-License-Identifier: Apache-2.0
"""What commands share: names of options, checks of their values, and results as files."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from wavemare.errors import ConfigError, did_you_mean
from wavemare.extras import require
from wavemare.files import atomic_write_text, check_writable


def option(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"


def check_names(
    option: str, names: Sequence[str], valid: Collection[str], kind: str = "system"
) -> None:
    """Check that there are names, and that all are known.

    Raises:
        ConfigError: There is no name, or an unknown one.
    """
    if not names:
        remedy = f"Name some of {', '.join(valid)}"
        raise ConfigError(option, "", "there is nothing to measure", remedy)
    for name in names:
        if name not in valid:
            raise ConfigError(option, name, f"there is no such {kind}", did_you_mean(name, valid))


def check_picture(option: str, path: Path | None) -> None:
    """Check the place of a picture, and that its name ends in a picture's suffix.

    Raises:
        ConfigError: Nothing can be written there, or the name is not a picture's.
        LaunchError: matplotlib is not installed.
    """
    check_writable(option, path)
    if path is None:
        return
    require("matplotlib", option)
    if path.suffix not in (".png", ".svg"):
        reason = "a picture's name ends in .png or .svg"
        raise ConfigError(option, str(path), reason, f"Name it {path.stem}.png")


def save(file: Path | None, program: Sequence[str], result: Mapping[str, Any]) -> None:
    """Write a result with the command of this process, if there is a file.

    Args:
        file: May be None.
        program: The words of the command before the options.
        result: What JSON can hold.
    """
    if file is not None:
        command = shlex.join([*program, *sys.argv[1:]])
        text = json.dumps({"command": command, **result}, indent=1)
        atomic_write_text(file, text + "\n")
