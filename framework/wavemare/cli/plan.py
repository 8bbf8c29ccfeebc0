# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan``: schedules, checked, predicted and drawn without running them; layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.plan_search import search
from wavemare.cli.plan_show import DEFAULTS, Outputs, make_plan, present, read_plan

__all__ = ["app", "show"]

app = typer.Typer(
    no_args_is_help=True, help="Look at schedules without running them; find layouts of jobs."
)
app.command()(search)

_Schedule = Annotated[
    str | None,
    typer.Option(
        help="A pipeline: 1f1b, 1f1b-paired, pipemare or inference. Waves on one rank: tick-tock, "
        "accumulation or in-phase.",
        show_default=DEFAULTS["--schedule"],
    ),
]
_Stages = Annotated[
    int | None,
    typer.Option(
        help="Length of the pipeline; of waves: segments of the model, with its head.",
        show_default=str(DEFAULTS["--stages"]),
    ),
]
_MicroBatches = Annotated[
    int | None,
    typer.Option(help="Per optimizer step.", show_default=str(DEFAULTS["--micro-batches"])),
]
_Steps = Annotated[
    int | None, typer.Option(help="Optimizer steps.", show_default=str(DEFAULTS["--steps"]))
]
_WarmupSteps = Annotated[
    int | None, typer.Option(min=0, help="PipeMare: synchronous steps at the beginning.")
]
_DrainInterval = Annotated[
    int | None, typer.Option(min=0, help="PipeMare: steps between drains; 0 for none.")
]
_Slack = Annotated[
    int | None,
    typer.Option(min=0, help="PipeMare: micro-batches further ahead, by following stage."),
]
_ForwardMs = Annotated[
    str, typer.Option(help="Forward pass: one number, or one per stage (1,1,2,1).")
]
_BackwardMs = Annotated[str, typer.Option(help="Backward pass, in the same way.")]
_StepMs = Annotated[str, typer.Option(help="Optimizer step, too.")]
_SendMs = Annotated[str, typer.Option(help="Message to a neighbour, too.")]
_CollectiveMs = Annotated[
    str | None,
    typer.Option(
        help="Waves: sum over ranks of a segment's output, and of its input's gradient, too."
    ),
]
_Text = Annotated[
    bool, typer.Option("--text", help="Print the plan's text form alone, for --file.")
]
_Output = Annotated[
    Path | None,
    typer.Option(help="Folder for plan.txt, plan.csv, trace.json, plan.svg and plan.png."),
]
_Html = Annotated[
    Path | None, typer.Option(help="A page with the plan's timeline, which can be zoomed.")
]
_File = Annotated[
    Path | None, typer.Option(help="Read a plan's text form instead of making a plan.")
]


@app.command()
def show(
    schedule: _Schedule = None,
    stages: _Stages = None,
    micro_batches: _MicroBatches = None,
    steps: _Steps = None,
    warmup_steps: _WarmupSteps = None,
    drain_interval: _DrainInterval = None,
    slack: _Slack = None,
    forward_ms: _ForwardMs = "1",
    backward_ms: _BackwardMs = "2",
    step_ms: _StepMs = "0",
    send_ms: _SendMs = "0",
    collective_ms: _CollectiveMs = None,
    text: _Text = False,
    output: _Output = None,
    html: _Html = None,
    file: _File = None,
) -> None:
    """Check a schedule, predict its times and draw it.

    The exit code is 2 if the plan cannot be run.
    """
    costs = {
        "--forward-ms": forward_ms,
        "--backward-ms": backward_ms,
        "--step-ms": step_ms,
        "--send-ms": send_ms,
    }
    if collective_ms is not None:
        costs["--collective-ms"] = collective_ms
    options: dict[str, str | int | None] = {
        "--schedule": schedule,
        "--stages": stages,
        "--micro-batches": micro_batches,
        "--steps": steps,
        "--warmup-steps": warmup_steps,
        "--drain-interval": drain_interval,
        "--slack": slack,
    }
    plan = make_plan(options, costs) if file is None else read_plan(file, options)
    present(plan, costs, Outputs(text, output, html))
