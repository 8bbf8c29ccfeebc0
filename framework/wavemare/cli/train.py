"""``wavemare train``: a recipe as ranks, on this host or those of a hostfile."""

from __future__ import annotations

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
        int | None,
        typer.Option("--nproc", min=1, help="Processes on each host. (Default: slots, or 2.)"),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="DeepSpeed hostfile: run on its hosts.")
    ] = None,
    launcher: Annotated[
        str, typer.Option(help="deepspeed (several hosts: by pdsh) or mpirun.")
    ] = "deepspeed",
    launcher_args: Annotated[
        str, typer.Option(help="More options of the launcher, as one quoted text.")
    ] = "",
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Show the command and leave.")
    ] = False,
) -> None:
    """Train a recipe; options that are not listed here go to the recipe unchanged.

    For example: wavemare train gpt --nproc 4 --data corpus.txt --output runs/one

    The recipe's own options: wavemare train gpt -- --help
    """
    from wavemare.cli.job import Job, check_launcher, read_hosts, split_options
    from wavemare.cli.start import show
    from wavemare.engine.config import load_config

    chosen = find_recipe(recipe)
    options = list(context.args)
    _refuse_second_config(options)
    file = config if config is not None else chosen.config
    load_config(file, key="--config")  # refused here, before any rank is started
    job = Job(
        program=chosen.module,
        options=["--deepspeed_config", str(file), *options],
        module=True,
        num_processes=nproc,
        hosts=read_hosts(hostfile),
        hostfile=hostfile,
        launcher=check_launcher(launcher),
        launcher_options=split_options(launcher_args),
    )
    if print_command:
        show(job.command(), job.variables())
        return
    raise typer.Exit(job.run())


def _refuse_second_config(options: list[str]) -> None:
    for option in options:
        name, _, value = option.partition("=")
        if name in {"--deepspeed_config", "--deepspeed-config"}:
            reason = "the configuration is passed on by 'wavemare train' itself"
            raise ConfigError(name, value, reason, "Give it as --config FILE")
