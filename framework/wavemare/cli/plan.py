"""``wavemare plan``: schedules, checked, predicted and drawn without running them; layouts."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavemare.cli.plan_search import search
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.pipeline.plan import Plan
    from wavemare.pipeline.simulate import Costs
    from wavemare.pipeline.timeline import Timeline

__all__ = ["app", "show"]

app = typer.Typer(
    no_args_is_help=True, help="Look at schedules without running them; find layouts of jobs."
)
app.command()(search)

_SCHEDULE, _STAGES, _MICRO_BATCHES, _STEPS = "pipemare", 4, 8, 4
_MS_PER_S = 1e3
_MOST_PASSES = 1_000_000  # minutes, and some gigabytes


@app.command()
def show(
    schedule: Annotated[
        str | None,
        typer.Option(
            help="A pipeline: 1f1b, pipemare or inference. Waves on one rank: tick-tock, "
            "accumulation or in-phase.",
            show_default=_SCHEDULE,
        ),
    ] = None,
    stages: Annotated[
        int | None,
        typer.Option(
            help="Length of the pipeline; of waves: segments of the model, with its head.",
            show_default=str(_STAGES),
        ),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Per optimizer step.", show_default=str(_MICRO_BATCHES))
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps.", show_default=str(_STEPS))
    ] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="PipeMare: synchronous steps at the beginning.")
    ] = None,
    drain_interval: Annotated[
        int | None, typer.Option(min=0, help="PipeMare: steps between drains; 0 for none.")
    ] = None,
    slack: Annotated[
        int | None,
        typer.Option(min=0, help="PipeMare: micro-batches further ahead, by following stage."),
    ] = None,
    forward_ms: Annotated[
        str, typer.Option(help="Forward pass: one number, or one per stage (1,1,2,1).")
    ] = "1",
    backward_ms: Annotated[str, typer.Option(help="Backward pass, in the same way.")] = "2",
    step_ms: Annotated[str, typer.Option(help="Optimizer step, too.")] = "0",
    send_ms: Annotated[str, typer.Option(help="Message to a neighbour, too.")] = "0",
    collective_ms: Annotated[
        str | None,
        typer.Option(
            help="Waves: sum over ranks of a segment's output, and of its input's gradient, too."
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the plan's text form alone, for --file.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for plan.txt, plan.csv, trace.json, plan.svg and plan.png."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Read a plan's text form instead of making a plan.")
    ] = None,
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
    options = {
        "--schedule": schedule,
        "--stages": stages,
        "--micro-batches": micro_batches,
        "--steps": steps,
        "--warmup-steps": warmup_steps,
        "--drain-interval": drain_interval,
        "--slack": slack,
    }
    if file is not None:
        _refuse_beside_file(options)
        plan = _read(file)
    else:
        plan = _make(
            _SCHEDULE if schedule is None else schedule,
            _STAGES if stages is None else stages,
            _MICRO_BATCHES if micro_batches is None else micro_batches,
            _STEPS if steps is None else steps,
            {
                "warmup_steps": warmup_steps or 0,
                "drain_interval": drain_interval or 0,
                "slack": slack or 0,
            },
            costs,
        )
    _present(plan, costs, text=text, output=output)


def _refuse_beside_file(options: dict[str, str | int | None]) -> None:
    for key, value in options.items():
        if value is not None:
            reason = "the plan in the file of --file has its own"
            raise ConfigError(key, value, reason, f"Leave out {key} or --file")


def _read(file: Path) -> Plan:
    from wavemare.pipeline.plan import Plan

    remedy = "Name a file with the text that 'wavemare plan show --text' prints"
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError("--file", str(file), reason, remedy) from None
    except UnicodeDecodeError:
        raise ConfigError("--file", str(file), "this is not text", remedy) from None
    return Plan.parse(text)


def _make(
    schedule: str,
    stages: int,
    micro_batches: int,
    steps: int,
    asynchronous: dict[str, Any],
    costs_ms: dict[str, str],
) -> Plan:
    from wavemare.pipeline import schedules

    passes = stages * micro_batches * max(steps, 1)
    if passes > _MOST_PASSES:
        reason = f"{stages} x {micro_batches} x {steps} forward passes are more than can be shown"
        remedy = f"Give numbers whose product is at most {_MOST_PASSES}"
        raise ConfigError("--stages", stages, reason, remedy)
    if schedule == "pipemare":
        return schedules.pipemare(stages, micro_batches, steps, **asynchronous)
    plan = schedules.build_plan(schedule, stages, micro_batches, steps)
    if schedule in {"tick-tock", "in-phase"}:
        plan = _woven(plan, _costs(plan, costs_ms))
    for name, value in asynchronous.items():
        key = f"--{name.replace('_', '-')}"
        if value:
            reason = f"the schedule {schedule!r} never has two steps under way"
            raise ConfigError(key, value, reason, f"Leave it out, or give {key} with pipemare")
    return plan


def _woven(plan: Plan, costs: Costs) -> Plan:
    """Return the plan anew: its order depends on which segments have collectives."""
    from wavemare.pipeline.wave import in_phase, tick_tock
    from wavemare.pipeline.wave_gain import sums_of

    make = tick_tock if plan.schedule == "tick-tock" else in_phase
    up, down = sums_of(costs, plan.num_stages)
    numbers = plan.num_stages, plan.micro_batches, plan.num_steps
    return make(*numbers, sums_output=up, sums_gradient=down)


def _present(plan: Plan, costs_ms: dict[str, str], *, text: bool, output: Path | None) -> None:
    from wavemare.pipeline.check import check
    from wavemare.pipeline.simulate import simulate

    costs = _costs(plan, costs_ms)
    report = check(plan)
    timeline = simulate(plan, costs)
    if text:
        typer.echo(str(plan), nl=False)
    else:
        typer.echo(str(report))
        typer.echo(_prediction(plan, timeline, costs_ms))
        typer.echo(_hidden(plan, timeline, costs))
        _print_grid(plan)
    if output is not None:
        _write(plan, timeline, output)
        # Not into the plan's text, which is read back.
        names = ", ".join(_FILES)
        typer.echo(f"{'' if text else chr(10)}{output}: {names}", err=text)


def _costs(plan: Plan, texts: dict[str, str]) -> Costs:
    from wavemare.pipeline.simulate import Costs

    seconds = {key: _seconds(key, text, plan.num_stages) for key, text in texts.items()}
    sums = seconds.get("--collective-ms")
    if sums is not None and not plan.on_one_rank:
        reason = f"the schedule {plan.schedule!r} has no collectives between its passes"
        remedy = "Leave it out, or give it with tick-tock, accumulation or in-phase"
        raise ConfigError("--collective-ms", texts["--collective-ms"], reason, remedy)
    sums = sums or (0.0,) * plan.num_stages
    return Costs(
        forward_s=seconds["--forward-ms"],
        backward_s=seconds["--backward-ms"],
        step_s=seconds["--step-ms"],
        send_s=seconds["--send-ms"],
        # The first segment's input needs no gradient, and the head's output is the loss.
        sum_output_s=(*sums[:-1], 0.0),
        sum_gradient_s=(0.0, *sums[1:]),
    )


def _seconds(key: str, text: str, num_stages: int) -> tuple[float, ...]:
    """Read one number of milliseconds for all stages, or one for each."""
    remedy = f"Give one number of milliseconds, or one for each of the {num_stages} stages: 1,2,..."
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(key, text, "these are no numbers", remedy) from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ConfigError(key, text, "a time is 0 or more, and finite", remedy)
    if len(numbers) not in {1, num_stages}:
        reason = f"there are {len(numbers)} numbers for {num_stages} stages"
        raise ConfigError(key, text, reason, remedy)
    if len(numbers) == 1:
        numbers *= num_stages
    return tuple(number / _MS_PER_S for number in numbers)


def _prediction(plan: Plan, timeline: Timeline, costs_ms: dict[str, str]) -> str:
    """Return how long the plan takes, and how busy the ranks are meanwhile."""
    from wavemare.pipeline.utilisation import bubble, steady_utilisation, utilisation

    passes = ", ".join(
        f"{key.removeprefix('--').removesuffix('-ms')} {text} ms" for key, text in costs_ms.items()
    )
    total_ms = timeline.makespan_s * _MS_PER_S
    per_step = f", {total_ms / plan.num_steps:.4g} ms per step" if plan.num_steps else ""
    shares = utilisation(timeline)
    steady = steady_utilisation(timeline)
    lines = [
        f"predicted for {passes}:",
        f"time: {total_ms:.6g} ms{per_step}",
        f"bubble: {bubble(timeline):.1%} of the ranks' time",
        f"busy: {_spread(shares)}" + (f"; in steady state {_spread(steady)}" if steady else ""),
    ]
    return "\n".join(lines)


def _hidden(plan: Plan, timeline: Timeline, costs: Costs) -> str:
    """Return what becomes of collectives, if there are any, with a line feed."""
    from wavemare.pipeline.wave import accumulation
    from wavemare.pipeline.wave_gain import step_time

    sums_s = timeline.collectives_s
    if not sums_s:
        return ""
    hidden = 1 - timeline.exposed_s / sums_s
    text = f"collectives: {sums_s * _MS_PER_S:.6g} ms, {hidden:.1%} of it behind passes"
    if plan.num_steps and plan.schedule != "accumulation":
        plain = accumulation(plan.num_stages, plan.micro_batches)
        gain = step_time(plain, costs).step_s / step_time(plan, costs).step_s
        text += f"; {gain:.3f} times as fast as accumulation"
    return f"{text}\n"


def _spread(shares: Sequence[float]) -> str:
    mean = sum(shares) / len(shares)
    return f"{mean:.1%} (by rank {min(shares):.1%} to {max(shares):.1%})"


def _print_grid(plan: Plan) -> None:
    from wavemare.pipeline.draw import grid

    text = grid(plan, width=shutil.get_terminal_size().columns)
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    from rich.console import Console
    from rich.text import Text

    coloured = Text(text)
    for code, style in {"F": "blue", "B": "yellow", "S": "bold"}.items():
        coloured.highlight_regex(rf"\b\d*{code}\d\S*", style)
    Console(highlight=False).print(coloured, soft_wrap=True)


_FILES = ("plan.txt", "plan.csv", "trace.json", "plan.svg", "plan.png")


def _write(plan: Plan, timeline: Timeline, folder: Path) -> None:
    from wavemare.files import atomic_write_bytes
    from wavemare.pipeline import draw

    contents = (
        str(plan).encode(),
        draw.to_csv(plan).encode(),
        draw.chrome_trace(timeline).encode(),
        draw.svg(timeline).encode(),
        draw.png(timeline),
    )
    try:
        for name, content in zip(_FILES, contents, strict=True):
            atomic_write_bytes(folder / name, content)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError("--output", str(folder), reason, "Name another folder") from None
