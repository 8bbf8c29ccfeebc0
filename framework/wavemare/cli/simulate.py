# SPDX-License-Identifier: Apache-2.0
"""``wavemare simulate``: a recipe's model as a pipeline of any length, in one process."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.train import find_recipe, refuse_options
from wavemare.errors import ConfigError


def simulate(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="gpt or bert.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(help="DeepSpeed JSON, with our section. By default the recipe's own."),
    ] = None,
    systems: Annotated[
        str | None,
        typer.Option(help="Compare methods, with commas between (or all), by validation loss."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="With --systems: seeds of each.", min=1)] = 3,
    runs: Annotated[
        Path, typer.Option(help="With --systems: run folders; runs in it are not repeated.")
    ] = Path("runs/quality"),
    json_file: Annotated[
        Path | None, typer.Option("--json", help="With --systems: write the result to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="With --systems: draw the losses into this file.")
    ] = None,
) -> None:
    """Train an asynchronous pipeline of many stages, simulated in one process.

    Weight versions are exactly those of the real pipeline. For example:

    wavemare simulate gpt --stages 8 --micro_batches 8 --output runs/eight
    --set wavemare.pipeline.pipemare.optimizer_policy=auto optimizer.params.lr=1e-3

    wavemare simulate gpt --stages 4 --micro_batches 4 --systems flush,naive,auto

    All options: wavemare simulate gpt -- --help
    """
    options = list(context.args)
    refuse_options(options)
    chosen = find_recipe(recipe)
    if systems is not None:
        if config is not None:
            reason = "each system has its own changes of the recipe's configuration"
            raise ConfigError("--config", str(config), reason, "Leave it out, or --systems")
        _compare(recipe, systems, seeds, options, runs=runs, json_file=json_file, plot=plot)
        return
    for name, value in (("--json", json_file), ("--plot", plot)):
        if value is not None:
            raise ConfigError(name, str(value), "it needs systems to compare", "Add --systems")
    file = config if config is not None else chosen.config
    sys.argv = ["wavemare simulate", recipe, "--deepspeed_config", str(file), *options]
    runpy.run_module("wavemare.recipes.simulate", run_name="__main__")


def _compare(
    recipe: str,
    systems: str,
    seeds: int,
    options: Sequence[str],
    *,
    runs: Path,
    json_file: Path | None,
    plot: Path | None,
) -> None:
    """Simulate systems with several seeds, and print, write and draw their validation losses."""
    from wavemare.cli.options import check_names, check_picture, save
    from wavemare.files import check_writable
    from wavemare.observe.run import describe_machine
    from wavemare.observe.tables import make_table, print_table
    from wavemare.simulation.quality import COLUMNS, SYSTEMS, Shape, draw, simulate_all, to_row

    names = tuple(SYSTEMS) if systems == "all" else tuple(filter(None, systems.split(",")))
    check_names("--systems", names, SYSTEMS)
    check_writable("--json", json_file)
    check_picture("--plot", plot)
    check_writable("--runs", runs, is_folder=True)
    parser = argparse.ArgumentParser("wavemare simulate", allow_abbrev=False, add_help=False)
    for option, default in (("--stages", 8), ("--micro_batches", 8), ("--max_steps", 800)):
        parser.add_argument(option, option.replace("_", "-"), type=int, default=default)
    of_systems = ("set", "seed", "output", "delays")
    for option in of_systems:
        parser.add_argument(f"--{option}", nargs="*")
    sizes, rest = parser.parse_known_args(options)
    for option in of_systems:
        if (value := getattr(sizes, option)) is not None:
            raise ConfigError(f"--{option}", value, "each system has its own", "Leave it out")
    shape = Shape(recipe, sizes.stages, sizes.micro_batches, sizes.max_steps)
    found = simulate_all(names, range(seeds), shape, options=rest, folder=runs, note=typer.echo)
    parameters = {"stages": shape.stages, "micro_batches": shape.micro_batches}
    rows = [to_row(name, found, steps=shape.steps, **parameters) for name in names]
    title = f"{recipe}, {shape.stages} stages, {shape.micro_batches} micro-batches per step"
    print_table(make_table(title, COLUMNS, rows))
    if plot is not None:
        draw(plot, found, title)
    result = {"machine": describe_machine(), "baseline": "flush", "bigram": found[0]["bigram"]}
    save(json_file, ("wavemare",), {**result, "rows": rows, "runs": found})
