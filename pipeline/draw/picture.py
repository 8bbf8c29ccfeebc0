# SPDX-License-Identifier: Apache-2.0
"""What a picture consists of; `svg` and `png` draw the same parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

__all__ = ["Box", "Label", "Line", "Paint", "Picture"]

Anchor = Literal["start", "middle", "end"]


class Paint(NamedTuple):
    """How boxes of one kind look.

    Args:
        name: For people: the legend's text.
        fill: ``#rrggbb``.
        text: Colour of the label inside.
        hatch: Colour of slanted lines over the fill; None for none.
    """

    name: str
    fill: str
    text: str = "#ffffff"
    hatch: str | None = None


class Box(NamedTuple):
    """A filled rectangle; lengths in pixels from the top left corner of the picture."""

    left: float
    top: float
    width: float
    height: float
    paint: Paint
    hint: str = ""
    """Shown under the mouse, where the format can."""

    @property
    def right(self) -> float:
        """Its right edge."""
        return self.left + self.width


class Line(NamedTuple):
    """A straight line, one pixel wide."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str


class Label(NamedTuple):
    """A line of text; ``y`` is the middle of its height."""

    x: float
    y: float
    text: str
    size: float
    colour: str
    anchor: Anchor = "start"


@dataclass
class Picture:
    """Parts in the order in which they are drawn: lines, then boxes, then labels.

    Args:
        width: In pixels.
        height: In pixels.
    """

    width: int
    height: int
    lines: list[Line] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
