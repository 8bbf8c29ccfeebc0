# SPDX-License-Identifier: Apache-2.0
"""The ``wavemare`` command: one file per sub-command, which imports what it needs as it runs.

Read this file first: it lists them.
"""

from __future__ import annotations

from typing import Annotated

import typer

from wavemare import __version__
from wavemare.cli.convert import convert
from wavemare.cli.data import app as data
from wavemare.cli.doctor import doctor
from wavemare.cli.inspect import inspect
from wavemare.cli.job import launch_script
from wavemare.cli.layout import app as layout
from wavemare.cli.plan import app as plan
from wavemare.cli.report import report
from wavemare.cli.simulate import simulate
from wavemare.cli.train import train
from wavemare.failure import run_main

__all__ = ["app", "main"]

app = typer.Typer(
    name="wavemare",
    no_args_is_help=True,
    add_completion=False,
    # An unexpected exception keeps Python's own traceback, which can be searched and pasted.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(
    # Unknown options go to the recipe.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)(train)
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(simulate)
app.command(
    "launch",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        # Words after the script are its options.
        "allow_interspersed_args": False,
    },
)(launch_script)
app.command()(doctor)
app.command()(convert)
app.command()(inspect)
app.command()(report)
app.add_typer(plan, name="plan")
app.add_typer(layout, name="layout")
app.add_typer(data, name="data")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"wavemare {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and leave.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Train with DeepSpeed's engines and wavemare's features."""


def main() -> None:
    """Run the command line; a `WavemareError` becomes one message and an exit code."""
    run_main(lambda: app(prog_name="wavemare"))
