# SPDX-License-Identifier: Apache-2.0
"""A page of HTML with tables and figures, complete in one file.

Figures are those of plotly, whose script is put into the page once. Colours follow the reader's
choice of light or dark.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from wavemare.report.look import SCRIPT, STYLE

__all__ = ["Page"]


class Page:
    """Collects headings, tables and figures in their order.

    Args:
        title: Of the page.
        subtitle: Below it.
    """

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts: list[str] = []
        self._figures: list[dict[str, Any]] = []
        self._contents: list[tuple[str, str]] = []
        self._subtitle = subtitle

    def section(self, title: str) -> None:
        """Begin a part that stands in the list at the page's top."""
        anchor = f"part-{len(self._contents) + 1}"
        self._contents.append((anchor, title))
        self._parts.append(f'<h2 id="{anchor}">{escape(title)}</h2>')

    def heading(self, title: str, note: str = "") -> None:
        """Begin a smaller part.

        Args:
            title: Its heading.
            note: What is shown, and from which file.
        """
        self._parts.append(f"<h3>{escape(title)}</h3>")
        if note:
            self.text(note)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def missing(self, what: str, why: str) -> None:
        """Say that something is not known, in the place where it would stand."""
        self._parts.append(f'<p class="missing"><b>{escape(what)}:</b> {escape(why)}</p>')

    def table(self, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table; the first column holds the rows' names."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(cell)}</td>" for cell in row) + "</tr>" for row in rows
        )
        self._parts.append(
            f'<div class="table" tabindex="0"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def details(self, summary: str, text: str) -> None:
        """Add text as it is, which is shown on demand."""
        self._parts.append(
            f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"
        )

    def figure(self, figure: Any, *, label: str, height: int = 320, zooms: bool = False) -> None:
        """Add a figure.

        Args:
            figure: Of plotly.
            label: What it shows, for those who do not see it.
            height: In pixels.
            zooms: Whether its buttons are shown, and it is zoomed by drawing a frame.
        """
        content = figure.to_plotly_json()
        content["layout"].pop("template", None)
        number = len(self._figures)
        self._figures.append({"zooms": zooms, **content})
        self._parts.append(
            f'<div class="figure" id="figure-{number}" role="img" aria-label="{escape(label)}" '
            f'style="height:{height}px"></div>'
        )

    def html(self) -> str:
        """Return the whole page."""
        links = " ".join(f'<a href="#{a}">{escape(title)}</a>' for a, title in self._contents)
        script = ""
        if self._figures:
            from plotly.offline import get_plotlyjs

            script = (
                f"<script>{get_plotlyjs()}</script>"
                f'<script type="application/json" id="figures">{_json(self._figures)}</script>'
                f"<script>{SCRIPT}</script>"
            )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title><style>{STYLE}</style></head><body><main>"
            f"<h1>{escape(self._title)}</h1><p>{escape(self._subtitle)}</p>"
            f"<nav>{links}</nav>\n" + "\n".join(self._parts) + f"\n</main>{script}</body></html>\n"
        )


def _cell(value: object) -> str:
    if value is None:
        return '<span class="none">not known</span>'
    if isinstance(value, float):
        return escape(f"{value:.5g}")
    if isinstance(value, Mapping | list):
        return f"<code>{escape(json.dumps(value, default=str))}</code>"
    return escape(str(value))


def _json(value: Any) -> str:
    """Return JSON that can stand within a script: no text in it can end the element."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
