# SPDX-License-Identifier: Apache-2.0
"""The files that commands write."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from wavemare.errors import ConfigError


def check_writable(option: str, path: Path | None, *, is_folder: bool = False) -> None:
    """Check that a file or folder can be written, before the work is done.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if path is None:
        return
    folder = path if is_folder else path.parent
    try:
        if is_folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"this folder cannot be made ({error.strerror})"
        raise ConfigError(option, str(folder), reason, "Name another folder") from None
    if not is_folder and path.is_dir():
        raise ConfigError(option, str(path), "there is a folder of that name", "Name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = "there is no such folder that can be written"
        raise ConfigError(option, str(folder), reason, "Name another folder")


def check_picture(
    option: str, path: Path | None, *, suffixes: Sequence[str] = (".png", ".svg")
) -> None:
    """Check the place of a picture, and that its name ends in a picture's suffix.

    Raises:
        ConfigError: Nothing can be written there, or the name is not a picture's.
    """
    check_writable(option, path)
    if path is not None and path.suffix not in suffixes:
        reason = f"a picture's name ends in {' or '.join(suffixes)}"
        raise ConfigError(option, str(path), reason, f"Name it {path.stem}.png")
