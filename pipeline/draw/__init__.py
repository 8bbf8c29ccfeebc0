# SPDX-License-Identifier: Apache-2.0
"""Plans and timelines for people and for other programs: text, tables, traces and pictures."""

from wavemare.pipeline.draw.cells import grid
from wavemare.pipeline.draw.raster import png
from wavemare.pipeline.draw.table import to_csv
from wavemare.pipeline.draw.trace import chrome_trace
from wavemare.pipeline.draw.vector import svg

__all__ = ["chrome_trace", "grid", "png", "svg", "to_csv"]
