# SPDX-License-Identifier: Apache-2.0
"""Gantt charts as PNG."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.draw.layout import gantt
from wavemare.pipeline.draw.picture import Anchor, Paint, Picture

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["png"]

# Drawn at this multiple of the size and then averaged, as Pillow's edges are not smooth.
_FINER = 2
_HATCH_STEP = 10
_ANCHORS: dict[Anchor, str] = {"start": "lm", "middle": "mm", "end": "rm"}


def png(
    timelines: Timeline | Sequence[Timeline],
    *,
    width: int = 1200,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str = "",
) -> bytes:
    """Draw timelines below each other on one time axis.

    Args:
        timelines: See `gantt`, as for the others.
        width: In pixels.
        start_s: Left end of the time axis.
        end_s: Right end.
        title: Above everything.

    Returns:
        A PNG file.

    Raises:
        PlanError: There is nothing to draw.
    """
    from PIL import Image

    picture = gantt(timelines, width=width, start_s=start_s, end_s=end_s, title=title)
    image = Image.new("RGB", (picture.width * _FINER, picture.height * _FINER), "#ffffff")
    _draw_shapes(picture, image)
    image = image.reduce(_FINER)
    _draw_labels(picture, image)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=False)
    return file.getvalue()


def _draw_shapes(picture: Picture, image: Image.Image) -> None:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(image)
    for line in picture.lines:
        ends = [round(number * _FINER) for number in line[:4]]
        draw.line(ends, line.colour, _FINER)
    hatches: dict[Paint, Image.Image] = {}
    for box in picture.boxes:
        left, right = round(box.left * _FINER), round(box.right * _FINER)
        top, bottom = round(box.top * _FINER), round((box.top + box.height) * _FINER)
        if box.paint.hatch is None:
            # Pillow counts the last pixel in.
            draw.rectangle((left, top, max(right - 1, left), bottom - 1), box.paint.fill)
            continue
        if box.paint not in hatches:
            hatches[box.paint] = _hatched(box.paint, image.size)
        area = left, top, max(right, left + 1), bottom
        image.paste(hatches[box.paint].crop(area), area)


def _hatched(paint: Paint, size: tuple[int, int]) -> Image.Image:
    """Return slanted lines all over a picture, so that they go on from box to box."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", size, paint.fill)
    draw = ImageDraw.Draw(image)
    width, height = size
    for x in range(0, width + height, _HATCH_STEP * _FINER):
        draw.line((x, 0, x - height, height), paint.hatch, _FINER)
    return image


def _draw_labels(picture: Picture, image: Image.Image) -> None:
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(image)
    fonts = {label.size: ImageFont.load_default(label.size) for label in picture.labels}
    for label in picture.labels:
        anchor = _ANCHORS[label.anchor]
        draw.text((label.x, label.y), label.text, label.colour, fonts[label.size], anchor)
