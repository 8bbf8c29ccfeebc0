# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: a recipe as ranks, on this host or those of a hostfile."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from wavemare.cli.recipes import RECIPES, find_recipe
from wavemare.cli.start import (
    Hostfile,
    LauncherArguments,
    LauncherName,
    Nproc,
    PrintCommand,
    start,
)
from wavemare.engine.launch.environment import mpi_place
from wavemare.errors import ConfigError, LaunchError

__all__ = [
    "check_early",
    "refuse_mpi_transport",
    "refuse_second_config",
    "refuse_second_launcher",
    "train",
]


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"gpt, bert, {', '.join(RECIPES)}.", show_default=False)
    ],
    nproc: Nproc = None,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
    hostfile: Hostfile = None,
    launcher: LauncherName = "deepspeed",
    launcher_args: LauncherArguments = "",
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Start again that often after ranks have died, from the last checkpoint."
        ),
    ] = 0,
    print_command: PrintCommand = False,
) -> None:
    """Train a recipe; options that are not listed here go to the recipe unchanged.

    For example: wavemare train gpt --nproc 4 --data corpus.txt --output runs/one

    Started by mpirun, each process becomes one rank: mpirun -n 4 wavemare train gpt

    The recipe's own options: wavemare train gpt -- --help
    """
    from wavemare.engine.config.resolve import load_config

    chosen = find_recipe(recipe)
    options = list(context.args)
    refuse_second_config(options)
    file = config if config is not None else chosen.config
    settings = load_config(file, key="--config")  # refused here, before any rank is started
    check_early(settings)
    options = ["--deepspeed_config", str(file), *options]
    place = None if print_command else mpi_place(os.environ)
    if place is not None:
        given = {"--nproc": nproc, "--hostfile": hostfile, "--launcher-args": launcher_args}
        refuse_second_launcher({"--launcher": launcher if launcher != "deepspeed" else "", **given})
        refuse_mpi_transport(settings)
        from wavemare.cli.supervisor import supervise

        command = [sys.executable, "-u", "-m", chosen.module, *options]
        raise typer.Exit(supervise(place, command, max_restarts))
    start(
        chosen.module,
        options,
        module=True,
        nproc=nproc,
        hostfile=hostfile,
        launcher=launcher,
        launcher_args=launcher_args,
        print_command=print_command,
        max_restarts=max_restarts,
    )


def check_early(config: Mapping[str, Any]) -> None:
    """Refuse keys and values that no option mends, without the seconds that launchers take.

    Raises:
        ConfigError: Naming the key.
    """
    from wavemare.engine.config.resolve import WavemareConfig
    from wavemare.engine.config.shape import SECTION, check_shape, section_of

    check_shape(config)
    ours = section_of(config, SECTION)
    pipeline = section_of(ours, "pipeline")
    pipemare = section_of(pipeline, "pipemare")
    if pipemare.get("warmup_steps") == "auto":  # the recipe derives it from its steps
        pipemare = {**pipemare, "warmup_steps": 0}
        config = {SECTION: {**ours, "pipeline": {**pipeline, "pipemare": pipemare}}}
    WavemareConfig.of(config)


def refuse_second_launcher(given: Mapping[str, object]) -> None:
    """Refuse options that say how ranks are started, as ``mpirun`` has done it.

    Raises:
        LaunchError: One is not empty.
    """
    for name, value in given.items():
        if value:
            reason = "mpirun has started this process, which is one rank"
            raise LaunchError(name, str(value), reason, "Leave it out, or leave out mpirun")


def refuse_mpi_transport(config: Mapping[str, Any]) -> None:
    """Refuse gradients over MPI: ranks are children of the processes of ``mpirun``.

    Raises:
        ConfigError: The sparse collective is to use MPI.
    """
    from wavemare.engine.config.shape import SECTION, section_of

    if section_of(section_of(config, SECTION), "sparse_collective").get("transport") == "mpi":
        raise ConfigError(
            f"{SECTION}.sparse_collective.transport",
            "mpi",
            "under mpirun `wavemare train` starts ranks that know nothing of MPI",
            'Set it to "auto", or run the recipe itself: mpirun -n N python -m wavemare.recipes...',
        )


def refuse_second_config(options: list[str]) -> None:
    """Refuse the option by which the configuration reaches a recipe.

    Raises:
        ConfigError: It is among the options.
    """
    for option in options:
        name, _, value = option.partition("=")
        if name in {"--deepspeed_config", "--deepspeed-config"}:
            reason = "the configuration is passed on by the command itself"
            raise ConfigError(name, value, reason, "Give it as --config FILE")
