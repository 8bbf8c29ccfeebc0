# SPDX-License-Identifier: Apache-2.0
"""``wavemare train``: a recipe as ranks, on this host or those of a hostfile."""

from __future__ import annotations

import copy
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

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

if TYPE_CHECKING:
    from wavemare.engine.config.resolve import WavemareConfig


class Recipe(NamedTuple):
    """A module of ``wavemare.recipes``, and its JSON configuration."""

    module: str
    config: Path


_FOLDER = Path(str(files("wavemare.recipes")))
RECIPES = {
    name: Recipe(f"wavemare.recipes.{name.replace('/', '.')}", _FOLDER / f"{name}.json")
    for name in (
        "gpt/pretrain",
        "gpt/finetune",
        "bert/pretrain",
        "bert/finetune",
        "llama/pretrain",
        "llama/sft",
        "llama/dpo",
    )
}
WHOLE_MODELS = ("wavemare={}", "train_micro_batch_size_per_gpu=null")
"""Changes of a recipe's JSON that train a whole model on each process."""
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


def _given_sizes(options: Sequence[str]) -> dict[str, int]:
    """Return Megatron's sizes of a layout that are among the options of a recipe."""
    given = " ".join(options).replace("_", "-")
    found = re.findall(r"--(\S+-(?:parallel-size|pipeline-rank|pipeline-stage))[ =](\d+)", given)
    return {name: int(size) for name, size in found}


def changes_for_sizes(options: Sequence[str]) -> tuple[str, ...]:
    """Return how Megatron's sizes change a recipe's own JSON: to its synchronous layouts."""
    sizes = _given_sizes(options)
    if not sizes:
        return ()
    if sizes.get("pipeline-model-parallel-size", 1) > 1:
        return ("wavemare.pipeline.schedule=1f1b", "wavemare.pipeline.partition=compute")
    return WHOLE_MODELS


def given_changes(options: Sequence[str]) -> list[str]:
    """Return the changes of the JSON that are among the options of a recipe, after ``--set``."""
    changes: list[str] = []
    inside = False
    for word in options:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            inside = name == "--set"
            changes += [value] * (inside and bool(equals))
        elif inside:
            changes.append(word)
    return changes


def check_processes(section: WavemareConfig, options: Sequence[str], processes: int) -> None:
    """Check that the ranks of a job make whole models, before any is started.

    Args:
        section: Our section of the configuration, from `check_early`.
        options: Of the recipe; Megatron's sizes replace those of the configuration.
        processes: Ranks of the job.

    Raises:
        ConfigError: The stages, times the ranks that share a layer, do not divide the ranks.
    """
    sizes = _given_sizes(options)
    stages = sizes.get("pipeline-model-parallel-size", section.pipeline.stages)
    shared = sizes.get("tensor-model-parallel-size", section.tensor_parallel.size)
    needed = stages * shared
    if not needed or processes % needed == 0:
        return
    key, value = "wavemare.pipeline.stages", stages
    if stages == 1:
        key, value = "wavemare.tensor_parallel.size", shared
    reason = f"a model takes {needed} processes, one on each GPU, and this job would have"
    remedy = f"Train whole models: --set {' '.join(map(shlex.quote, WHOLE_MODELS))}"
    if processes > needed:
        remedy += f"; or give --nproc {processes // needed * needed}"
    raise ConfigError(key, value, f"{reason} {processes}", remedy)


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

    Another schedule: wavemare train gpt --set wavemare.pipeline.schedule=1f1b

    Started by mpirun, each process becomes one rank: mpirun -n 4 wavemare train gpt

    The recipe's own options: wavemare train gpt -- --help
    """
    from wavemare.engine.config.resolve import load_config
    from wavemare.training.config import change_config

    chosen = find_recipe(recipe)
    options = list(context.args)
    refuse_options(options)
    file = config or chosen.config
    if config is None and (changes := changes_for_sizes(options)):
        options = ["--set", *changes, *options]
    changed = change_config(load_config(file, key="--config"), given_changes(options))
    section = check_early(changed)  # before any rank is started
    own, options = options, ["--deepspeed_config", str(file), *options]
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
    if (processes := job.processes()) is not None:
        check_processes(section, own, processes)
    start(job, print_command=print_command)


def check_early(config: Mapping[str, Any]) -> WavemareConfig:
    """Refuse invalid keys and values before ranks are started, and return our section.

    Raises:
        ConfigError: Naming the key.
    """
    from wavemare.engine.config.resolve import WavemareConfig
    from wavemare.engine.config.shape import SECTION, check_shape, fill_auto

    check_shape(config)
    config = copy.deepcopy(config)
    # The recipe derives it from its steps.
    fill_auto(config, {f"{SECTION}.pipeline.pipemare.warmup_steps": 0})
    return WavemareConfig.of(config)


def _become_rank(module: str, options: Sequence[str]) -> NoReturn:
    """Replace this process of ``mpirun`` by a rank.

    Raises:
        LaunchError: mpi4py is missing.
    """
    from wavemare.cli.launch import extra_environment

    if find_spec("mpi4py") is None:
        reason = "mpirun has started this process, and mpi4py is not installed"
        raise LaunchError("mpi4py", None, reason, "Install it: pip install mpi4py")
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
