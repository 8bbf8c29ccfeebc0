# SPDX-License-Identifier: Apache-2.0
"""What the ``wavemare bench`` commands have in common: options, and results as files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavemare.errors import ConfigError
from wavemare.files import atomic_write_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Batch",
    "Heads",
    "Hidden",
    "JsonFile",
    "Layers",
    "Mbit",
    "Plot",
    "Ranks",
    "Rounds",
    "SequenceLength",
    "Vocabulary",
    "Warmups",
    "check_picture",
    "check_results",
    "check_writable",
    "leave",
    "print_lines",
    "print_wide",
    "save",
    "size_option",
]

Ranks = Annotated[int, typer.Option(help="Processes.")]
Mbit = Annotated[
    float | None,
    typer.Option(
        help="Speed of each rank's link in Mbit/s, on hosts made of namespaces (needs root); "
        "by default the ranks share this machine's memory."
    ),
]
Rounds = Annotated[int, typer.Option(help="Timed rounds.")]
Warmups = Annotated[int, typer.Option(help="Rounds before them.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the result into this file.")]

size_option = partial(typer.Option, rich_help_panel="Size of the model")
Layers = Annotated[int, size_option(help="Blocks.")]
Hidden = Annotated[int, size_option(help="Width.")]
Heads = Annotated[int, size_option(help="Heads.")]
Vocabulary = Annotated[int, size_option(help="Tokens.")]
SequenceLength = Annotated[int, size_option(help="Tokens per sequence.")]
Batch = Annotated[int, size_option(help="Sequences per micro-batch.")]


def check_writable(option: str, path: Path | None, *, is_folder: bool = False) -> None:
    """Check a place before minutes of measuring rather than afterwards.

    Args:
        option: Names it.
        path: Of a file, or of a folder, which is made; None if the option was not given.
        is_folder: Which of the two.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if path is None:
        return
    folder = path if is_folder else path.parent
    try:
        if is_folder:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"this folder cannot be made ({error.strerror})"
        raise ConfigError(option, str(folder), reason, "Name another folder") from None
    if not is_folder and path.is_dir():
        raise ConfigError(option, str(path), "there is a folder of that name", "Name a file")
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = "there is no such folder that can be written"
        raise ConfigError(option, str(folder), reason, "Name another folder")


def check_picture(
    option: str, path: Path | None, *, suffixes: Sequence[str] = (".png", ".svg")
) -> None:
    """Check the place of a picture, as `check_writable`, and that it is named as one.

    Args:
        option: Names it.
        path: None if the option was not given.
        suffixes: What it can be.

    Raises:
        ConfigError: Nothing can be written there, or no picture.
    """
    check_writable(option, path)
    if path is not None and path.suffix not in suffixes:
        reason = f"this picture's name ends in {' or '.join(suffixes)}"
        raise ConfigError(option, str(path), reason, f"Name it {path.stem}.png")


def check_results(json_file: Path | None, plot: Path | None) -> None:
    """Check the files that `leave` writes.

    Raises:
        ConfigError: Nothing can be written there, or no picture.
    """
    check_writable("--json", json_file)
    check_picture("--plot", plot)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines as they are, whatever the width of the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in lines:
        console.print(line, soft_wrap=True)


def print_wide(table: Table, width: int) -> None:
    """Print a table in at least so many columns: in fewer, its names would be cut off."""
    from rich.console import Console

    Console(highlight=False, width=max(Console().width, width)).print(table)


def save(file: Path | None, result: Mapping[str, Any], *, indent: int = 1) -> None:
    """Write a result, with the command of this process, if a file was asked for."""
    if file is not None:
        command = shlex.join(["wavemare", *sys.argv[1:]])
        text = json.dumps({"command": command, **result}, indent=indent)
        atomic_write_text(file, text + "\n")


def leave(
    result: Mapping[str, Any],
    json_file: Path | None,
    plot: Path | None,
    draw: Callable[[Mapping[str, Any], Path], None],
) -> None:
    """Write and draw a result into the files that were asked for.

    Args:
        result: Of a measurement.
        json_file: For the result.
        plot: For its drawing.
        draw: Draws it.
    """
    save(json_file, result)
    if plot is not None:
        draw(result, plot)
