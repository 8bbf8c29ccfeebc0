# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan``: schedules, checked, predicted and drawn without running them; layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.plan_search import search
from wavemare.cli.plan_show import make_plan, present, read_plan
from wavemare.errors import ConfigError

__all__ = ["app", "show"]

app = typer.Typer(
    no_args_is_help=True, help="Look at schedules without running them; find layouts of jobs."
)
app.command()(search)

_MAKE_A_PLAN = (
    "schedule",
    "stages",
    "micro_batches",
    "steps",
    "warmup_steps",
    "drain_interval",
    "slack",
)


@app.command()
def show(
    context: typer.Context,
    schedule: Annotated[
        str,
        typer.Option(
            help="A pipeline: 1f1b, 1f1b-paired, pipemare or inference. Waves on one rank: "
            "tick-tock, accumulation or in-phase."
        ),
    ] = "pipemare",
    stages: Annotated[
        int, typer.Option(help="Stages of the pipeline; of waves: segments, with the head.")
    ] = 4,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 8,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 4,
    warmup_steps: Annotated[
        int, typer.Option(min=0, help="PipeMare: synchronous steps at the beginning.")
    ] = 0,
    drain_interval: Annotated[
        int, typer.Option(min=0, help="PipeMare: steps between drains; 0 for none.")
    ] = 0,
    slack: Annotated[
        int, typer.Option(min=0, help="PipeMare: micro-batches further ahead, by following stage.")
    ] = 0,
    forward_ms: Annotated[
        str, typer.Option(help="Forward pass: one number, or one per stage (1,1,2,1).")
    ] = "1",
    backward_ms: Annotated[str, typer.Option(help="Backward pass, likewise.")] = "2",
    step_ms: Annotated[str, typer.Option(help="Optimizer step, likewise.")] = "0",
    send_ms: Annotated[str, typer.Option(help="Message to a neighbour, likewise.")] = "0",
    collective_ms: Annotated[
        str | None,
        typer.Option(help="Waves: all-reduce of a segment's output and of its input's gradient."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the plan's text form alone, for --file.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for plan.txt, plan.csv, trace.json, plan.svg and plan.png."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Page with a timeline to zoom into.")] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read a plan's text form instead of making a plan.")
    ] = None,
) -> None:
    """Check a schedule, predict its times and draw it.

    The exit code is 2 if the plan cannot be run.
    """
    costs_ms = {
        "--forward-ms": forward_ms,
        "--backward-ms": backward_ms,
        "--step-ms": step_ms,
        "--send-ms": send_ms,
    }
    if collective_ms is not None:
        costs_ms["--collective-ms"] = collective_ms
    if file is not None:
        _refuse_beside_file(context)
        plan = read_plan(file)
    else:
        plan = make_plan(
            schedule,
            (stages, micro_batches, steps),
            {"warmup_steps": warmup_steps, "drain_interval": drain_interval, "slack": slack},
            costs_ms,
        )
    present(plan, costs_ms, text_only=text, folder=output, html=html)


def _refuse_beside_file(context: typer.Context) -> None:
    for name in _MAKE_A_PLAN:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            key = f"--{name.replace('_', '-')}"
            reason = "the plan in the file of --file has its own"
            raise ConfigError(key, context.params[name], reason, f"Leave out {key} or --file")
