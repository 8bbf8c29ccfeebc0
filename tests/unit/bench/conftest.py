# SPDX-License-Identifier: Apache-2.0
"""How tests look at the tables and pictures of a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console


@pytest.fixture
def shown() -> Callable[..., str]:
    """Return the text of a table on a screen."""

    def show(table: Any, width: int = 130) -> str:
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    return show


@pytest.fixture
def check_picture(tmp_path: Path) -> Callable[[Callable[[Path], object]], None]:
    """Draw a PNG and check that it is a picture."""

    def check(draw: Callable[[Path], object]) -> None:
        file = tmp_path / "plot.png"
        draw(file)
        with Image.open(file) as picture:
            assert picture.width > 300

    return check
