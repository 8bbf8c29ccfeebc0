# SPDX-License-Identifier: Apache-2.0
"""Results as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["drawing"]


@contextmanager
def drawing(file: Path, **layout: Any) -> Iterator[Any]:
    """Write a picture of what is drawn meanwhile.

    Args:
        file: PNG or SVG.
        layout: As for ``matplotlib.pyplot.subplots``.

    Yields:
        The axes, as ``subplots`` makes them.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**layout)
    try:
        yield axes
        figure.tight_layout()
        figure.savefig(file, dpi=110)
    finally:
        pyplot.close(figure)
