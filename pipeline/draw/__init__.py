# SPDX-License-Identifier: Apache-2.0
"""Show plans and timelines: a text grid, a Chrome trace, and Gantt charts as PNG or SVG.

In: a plan or a timeline. Out: text, JSON or a picture. Read `text.py` first.
"""

from wavemare.pipeline.draw.gantt import png, svg
from wavemare.pipeline.draw.text import grid
from wavemare.pipeline.draw.trace import chrome_trace

__all__ = ["chrome_trace", "grid", "png", "svg"]
