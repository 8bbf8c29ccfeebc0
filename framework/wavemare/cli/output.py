# SPDX-License-Identifier: Apache-2.0
"""The pictures that commands write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wavemare.errors import ConfigError
from wavemare.files import check_writable


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
