# SPDX-License-Identifier: Apache-2.0
"""Gantt charts as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from wavemare.pipeline.clock.timeline import Timeline
from wavemare.pipeline.draw.layout import gantt
from wavemare.pipeline.draw.picture import Box, Label, Line, Paint, Picture

__all__ = ["svg"]

_FONT = "Helvetica, Arial, Liberation Sans, sans-serif"


def svg(
    timelines: Timeline | Sequence[Timeline],
    *,
    width: int = 1200,
    start_s: float = 0.0,
    end_s: float | None = None,
    title: str = "",
) -> str:
    """Draw timelines below each other on one time axis.

    Args:
        timelines: See `gantt`, as for the others.
        width: In pixels.
        start_s: Left end of the time axis.
        end_s: Right end.
        title: Above everything.

    Returns:
        An SVG file. Each box has the name of its kind as its class (``forward``, ...), and the
        action as a text under the mouse.

    Raises:
        PlanError: There is nothing to draw.
    """
    picture = gantt(timelines, width=width, start_s=start_s, end_s=end_s, title=title)
    return "\n".join([*_document(picture), "</svg>", ""])


def _document(picture: Picture) -> Iterator[str]:
    size = f'width="{picture.width}" height="{picture.height}"'
    box = f'viewBox="0 0 {picture.width} {picture.height}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="{_FONT}">'
    yield '<rect width="100%" height="100%" fill="#ffffff"/>'
    yield from _definitions(dict.fromkeys(box.paint for box in picture.boxes))
    yield from map(_line, picture.lines)
    yield from map(_box, picture.boxes)
    yield from map(_label, picture.labels)


def _definitions(paints: Iterable[Paint]) -> Iterator[str]:
    yield "<style>"
    for paint in paints:
        fill = f"url(#{_class(paint)})" if paint.hatch else paint.fill
        yield f".{_class(paint)} {{ fill: {fill}; }}"
    yield "</style>"
    for paint in paints:
        if paint.hatch:
            yield (
                f'<pattern id="{_class(paint)}" width="7" height="7" '
                'patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
                f'<rect width="7" height="7" fill="{paint.fill}"/>'
                f'<rect width="1.6" height="7" fill="{paint.hatch}"/></pattern>'
            )


def _class(paint: Paint) -> str:
    return paint.name.replace(" ", "-")


def _line(line: Line) -> str:
    ends = f'x1="{line.x1:.6g}" y1="{line.y1:.6g}" x2="{line.x2:.6g}" y2="{line.y2:.6g}"'
    return f'<line {ends} stroke="{line.colour}"/>'


def _box(box: Box) -> str:
    place = f'x="{box.left:.6g}" y="{box.top:.6g}" width="{box.width:.6g}"'
    shape = f'<rect class="{_class(box.paint)}" {place} height="{box.height:.6g}"'
    return f"{shape}><title>{escape(box.hint)}</title></rect>" if box.hint else f"{shape}/>"


def _label(label: Label) -> str:
    # A third of the size below the middle is where most fonts have their base line; the property
    # for it is not understood by every viewer.
    place = f'x="{label.x:.6g}" y="{label.y + label.size * 0.35:.6g}"'
    style = f'font-size="{label.size:.3g}" fill="{label.colour}"'
    anchor = "" if label.anchor == "start" else f' text-anchor="{label.anchor}"'
    return f"<text {place} {style}{anchor}>{escape(label.text)}</text>"
