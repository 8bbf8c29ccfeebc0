# SPDX-License-Identifier: Apache-2.0
"""``wavemare simulate``: a recipe's model as a pipeline of any length, in one process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.recipes import find_recipe
from wavemare.cli.train import refuse_second_config

__all__ = ["simulate"]


def simulate(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or bert.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
) -> None:
    """Show what an asynchronous pipeline of many stages learns, without its processes.

    Weight versions are exactly those of the real pipeline. For example:

    wavemare simulate gpt --stages 8 --micro_batches 8 --output runs/eight
    --set wavemare.pipeline.pipemare.optimizer_policy=auto optimizer.params.lr=1e-3

    All options: wavemare simulate gpt -- --help
    """
    options = list(context.args)
    refuse_second_config(options)
    chosen = find_recipe(recipe)
    file = config if config is not None else chosen.config
    sys.argv = ["wavemare simulate", recipe, "--deepspeed_config", str(file), *options]
    runpy.run_module("wavemare.recipes.simulate", run_name="__main__")
