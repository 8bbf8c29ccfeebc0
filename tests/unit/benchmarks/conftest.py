# SPDX-License-Identifier: Apache-2.0
"""How tests look at the tables and pictures of a benchmark."""

import pytest
from PIL import Image
from rich.console import Console


@pytest.fixture
def shown():
    """Return the text of a table on a screen."""

    def show(table, width=130):
        console = Console(width=width)
        with console.capture() as capture:
            console.print(table)
        return capture.get()

    return show


@pytest.fixture
def check_picture(tmp_path):
    """Draw a PNG and check that it is a picture."""

    def check(draw):
        file = tmp_path / "plot.png"
        draw(file)
        with Image.open(file) as picture:
            assert picture.width > 300

    return check
