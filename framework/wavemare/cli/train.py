# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: a recipe as ranks, on this host or those of a hostfile."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import typer

from wavemare.cli.job import (
    Hostfile,
    Job,
    LauncherArguments,
    Nproc,
    PrintCommand,
    read_hosts,
    split_options,
    start,
)
from wavemare.engine.launch.environment import launcher_rank
from wavemare.errors import ConfigError, LaunchError, did_you_mean


class Recipe(NamedTuple):
    """A module of ``wavemare.recipes``, and its default JSON configuration."""

    module: str
    config: Path


_FOLDER = Path(str(files("wavemare.recipes")))
RECIPES = {
    name: Recipe(f"wavemare.recipes.{name.replace('/', '.')}", _FOLDER / f"{name}_{layout}.json")
    for name, layout in (
        ("gpt/pretrain", "pipemare"),
        ("gpt/finetune", "pipeline"),
        ("bert/pretrain", "pipeline"),
        ("bert/finetune", "pipeline"),
        ("llama/pretrain", "pipemare"),
        ("llama/sft", "zero"),
    )
}
_SHORT_NAMES = {name: f"{name}/pretrain" for name in ("gpt", "bert", "llama")}


def find_recipe(name: str) -> Recipe:
    """Return the recipe of that name; ``gpt``, ``bert`` and ``llama`` mean pretraining.

    Raises:
        ConfigError: There is none; the message has the nearest name.
    """
    full_name = _SHORT_NAMES.get(name, name)
    if full_name not in RECIPES:
        remedy = did_you_mean(name, [*RECIPES, *_SHORT_NAMES])
        raise ConfigError("RECIPE", name, "there is no such recipe", remedy)
    return RECIPES[full_name]


def default_config(recipe: Recipe, options: Sequence[str]) -> Path:
    """Return a recipe's JSON, a synchronous one where Megatron's sizes are given."""
    given = " ".join(options).replace("_", "-")
    found = re.findall(r"--(\S+-(?:parallel-size|pipeline-rank|pipeline-stage))[ =](\d+)", given)
    if not found:
        return recipe.config
    stages = int(dict(found).get("pipeline-model-parallel-size", 1))
    name = recipe.module.rpartition(".")[2]
    return recipe.config.with_name(f"{name}_{'pipeline' if stages > 1 else 'zero'}.json")


def train(
    context: typer.Context,
    recipe: Annotated[
        str, typer.Argument(help=f"gpt, bert, llama, {', '.join(RECIPES)}.", show_default=False)
    ],
    nproc: Nproc = None,
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
    hostfile: Hostfile = None,
    launcher_args: LauncherArguments = "",
    max_restarts: Annotated[
        int,
        typer.Option(min=0, help="How often to restart dead ranks from the last checkpoint."),
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
    refuse_options(options)
    file = config if config is not None else default_config(chosen, options)
    check_early(load_config(file, key="--config"))  # refused here, before any rank is started
    options = ["--deepspeed_config", str(file), *options]
    given = launcher_rank(os.environ)
    if given is not None and given.by_mpi and not print_command:
        for name, value in {
            "--nproc": nproc,
            "--hostfile": hostfile,
            "--launcher-args": launcher_args,
            "--max-restarts": max_restarts,
        }.items():
            if value:
                reason = "mpirun has started this process, which is one rank"
                raise LaunchError(name, str(value), reason, "Leave it out, or leave out mpirun")
        _become_rank(chosen.module, options)
    job = Job(
        program=chosen.module,
        options=options,
        module=True,
        num_processes=nproc,
        hosts=read_hosts(hostfile),
        hostfile=hostfile,
        launcher_options=split_options(launcher_args),
        max_restarts=max_restarts,
    )
    start(job, print_command=print_command)


def check_early(config: Mapping[str, Any]) -> None:
    """Refuse invalid keys and values before ranks are started.

    Raises:
        ConfigError: Naming the key.
    """
    from wavemare.engine.config.resolve import WavemareConfig
    from wavemare.engine.config.shape import SECTION, check_shape, fill_auto

    check_shape(config)
    config = copy.deepcopy(config)
    # The recipe derives it from its steps.
    fill_auto(config, {f"{SECTION}.pipeline.pipemare.warmup_steps": 0})
    WavemareConfig.of(config)


def _become_rank(module: str, options: Sequence[str]) -> NoReturn:
    """Replace this process of ``mpirun`` by a rank.

    Raises:
        LaunchError: mpi4py is missing.
    """
    from wavemare.cli.launch import extra_environment

    if find_spec("mpi4py") is None:
        reason = "mpirun has started this process, and mpi4py is not installed"
        raise LaunchError("mpi4py", None, reason, "Install MPI: pip install 'wavemare[mpi]'")
    # mpi4py's runner ends the other ranks when one fails.
    words = [sys.executable, "-u", "-m", "mpi4py", "-m", module, *options]
    os.execve(sys.executable, words, {**os.environ, **extra_environment()})


def refuse_options(options: list[str]) -> None:
    """Refuse ``--deepspeed_config`` and ``--launcher`` among the options of a recipe.

    Raises:
        ConfigError: One is among the options.
    """
    for option in options:
        name, _, value = option.partition("=")
        if name in {"--deepspeed_config", "--deepspeed-config"}:
            reason = "the configuration is passed on by the command itself"
            raise ConfigError(name, value, reason, "Give it as --config FILE")
        if name == "--launcher":
            remedy = "Start ranks by MPI with 'mpirun -n 4 wavemare train gpt'"
            raise ConfigError(name, value, "there is no such option", remedy)
