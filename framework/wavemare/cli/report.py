# SPDX-License-Identifier: Apache-2.0
"""``wavemare report``: a run or a comparison of runs as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavemare.errors import ConfigError, os_errors
from wavemare.extras import require


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders (--output of training).")
    ],
    output: Annotated[Path, typer.Option(help="The HTML file; replaced if it exists.")],
    picture: Annotated[
        Path | None, typer.Option(help="Draw the measured timelines into this PNG file, too.")
    ] = None,
) -> None:
    """Write a report on a run, or on several side by side, into one HTML file.

    It is self-contained, so that it can be sent on and opened without a network.
    For example: wavemare report runs/gpt-pretrain --output report.html
    """
    require("plotly", "A report")
    from wavemare.files import atomic_write_bytes, atomic_write_text, check_writable
    from wavemare.report import read_run, run_page

    if picture is not None:
        require("matplotlib", "--picture")
        check_writable("--picture", picture)
    names = [run.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run) for run in runs]
    facts = [read_run(run, name=name) for run, name in zip(runs, names, strict=True)]
    page = run_page(facts)
    remedy = "Name another HTML file"
    with os_errors(ConfigError, "--output", str(output), "it cannot be written", remedy):
        atomic_write_text(output, page)
    if picture is not None:
        from wavemare.report.picture import timeline_picture

        atomic_write_bytes(picture, timeline_picture(facts))
    typer.echo(f"{output}: {len(page.encode()) / 1e6:.1f} MB", err=True)
