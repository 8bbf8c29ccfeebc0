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

_STYLE = """
:root { --text: #1b1f24; --soft: #59636e; --page: #ffffff; --box: #f4f6f8; --line: #d8dee4;
  --link: #0b5cad; --warn: #fff4d6; --warn-text: #5c4400; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ed; --soft: #a3adb8; --page: #14171b; --box: #1e2329; --line: #39414a;
    --link: #7cb8f5; --warn: #3a3014; --warn-text: #f3dfa6; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.2rem 0 .5rem; padding-top: .6rem;
  border-top: 1px solid var(--line); overflow-wrap: anywhere; }
h3 { font-size: 1.05rem; margin: 1.4rem 0 .2rem; overflow-wrap: anywhere; }
p { margin: .3rem 0 .6rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: .5rem 0; }
.note { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere; }
.missing { background: var(--box); border-left: 4px solid var(--line); padding: .4rem .8rem;
  font-size: .92rem; overflow-wrap: anywhere; }
.none { color: var(--soft); font-style: italic; }
.table { overflow-x: auto; margin: .4rem 0 1rem; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums;
  max-width: 34rem; overflow-wrap: anywhere; }
th { font-weight: 600; white-space: nowrap; }
td:first-child { color: var(--soft); min-width: 7.5rem; }
td + td { min-width: 6rem; }
details { margin: .4rem 0; }
summary { cursor: pointer; color: var(--link); padding: .2rem 0; overflow-wrap: anywhere; }
pre { background: var(--box); padding: .8rem; overflow-x: auto; font-size: .82rem; line-height: 1.4;
  max-height: 32rem; }
code { font-size: .85em; overflow-wrap: anywhere; }
.figure { width: 100%; margin: .2rem 0 .8rem; }
@media (max-width: 600px) { main { padding: .7rem; } h1 { font-size: 1.3rem; } }
"""

_SCRIPT = """
"use strict";
(function () {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  function colours() {
    const style = getComputedStyle(document.documentElement);
    const value = (name) => style.getPropertyValue(name).trim();
    return { text: value("--text"), line: value("--line"), box: value("--box") };
  }
  function layout(figure, width) {
    const colour = colours(), narrow = width < 600, axis = {};
    for (const name of Object.keys(figure.layout).filter((k) => /^[xy]axis/.test(k))) {
      axis[name] = Object.assign({}, figure.layout[name],
        { gridcolor: colour.line, linecolor: colour.line, zerolinecolor: colour.line,
          automargin: true });
    }
    return Object.assign({}, figure.layout, axis, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: colour.text, size: narrow ? 11 : 13 },
      hoverlabel: { bgcolor: colour.box, font: { color: colour.text } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour.text },
      margin: { l: narrow ? 44 : 64, r: 12, t: figure.zooms ? 34 : 12, b: 46 },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
      showlegend: figure.data.length > 1,
      dragmode: figure.zooms ? "zoom" : false,
    });
  }
  function draw() {
    figures.forEach(function (figure, number) {
      const place = document.getElementById("figure-" + number);
      Plotly.react(place, figure.data, layout(figure, place.clientWidth), {
        responsive: true, displaylogo: false, displayModeBar: figure.zooms,
        modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      });
    });
  }
  draw();
  dark.addEventListener("change", draw);
})();
"""


class Page:
    """Collects headings, tables and figures in their order."""

    def __init__(self, title: str, subtitle: str = "") -> None:
        self._title = title
        self._parts: list[str] = []
        self._figures: list[dict[str, Any]] = []
        self._contents: list[tuple[str, str]] = []
        self._subtitle = subtitle

    def section(self, title: str) -> None:
        """Begin a section, which the list at the top links to."""
        anchor = f"part-{len(self._contents) + 1}"
        self._contents.append((anchor, title))
        self._parts.append(f'<h2 id="{anchor}">{escape(title)}</h2>')

    def heading(self, title: str, note: str = "") -> None:
        """Begin a subsection."""
        self._parts.append(f"<h3>{escape(title)}</h3>")
        if note:
            self.text(note)

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append(f'<p class="note">{escape(text)}</p>')

    def missing(self, what: str, why: str) -> None:
        """Say that something is missing, and why."""
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
        """Add preformatted text that is folded at first."""
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
                f"<script>{_SCRIPT}</script>"
            )
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style></head><body><main>"
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
    """Return JSON in which no text can end the script element around it."""
    from plotly.utils import PlotlyJSONEncoder

    text = json.dumps(value, cls=PlotlyJSONEncoder, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
