"""``wavemare train``: a recipe under the ``deepspeed`` launcher."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.recipes import RECIPES, find_recipe
from wavemare.errors import ConfigError

__all__ = ["train"]


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"gpt, bert, {', '.join(RECIPES)}.", show_default=False)
    ],
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, help="Processes (on each host, with a hostfile).")
    ] = 2,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
    launcher_args: Annotated[
        str, typer.Option(help="More options of the deepspeed launcher, as one quoted text.")
    ] = "",
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Show the command and leave.")
    ] = False,
) -> None:
    """Train a recipe; options that are not listed here go to the recipe unchanged.

    For example: wavemare train gpt --nproc 4 --data corpus.txt --output runs/one

    The recipe's own options: wavemare train gpt -- --help
    """
    from wavemare.cli import launch
    from wavemare.engine.config import load_config

    chosen = find_recipe(recipe)
    options = list(context.args)
    _refuse_second_config(options)
    file = config if config is not None else chosen.config
    load_config(file, key="--config")  # refused here, before any rank is started
    command = launch.build_command(
        chosen.module,
        ["--deepspeed_config", str(file), *options],
        num_processes=nproc,
        launcher_options=_split(launcher_args),
    )
    variables = launch.extra_environment()
    if print_command:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
        typer.echo(" ".join([*assignments, shlex.join(command)]))
        return
    raise typer.Exit(launch.run(command, variables))


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        reason = f"its quotes are not closed ({error})"
        raise ConfigError("--launcher-args", text, reason, "Close them") from None


def _refuse_second_config(options: list[str]) -> None:
    for option in options:
        name, _, value = option.partition("=")
        if name in {"--deepspeed_config", "--deepspeed-config"}:
            reason = "the configuration is passed on by 'wavemare train' itself"
            raise ConfigError(name, value, reason, "Give it as --config FILE")
