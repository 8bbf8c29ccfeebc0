# SPDX-License-Identifier: Apache-2.0
"""What ``wavemare plan show`` does: makes or reads a plan, checks it, predicts it, draws it."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from wavemare.cli.report import write_page
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.pipeline.clock.simulate import Costs
    from wavemare.pipeline.clock.timeline import Timeline
    from wavemare.pipeline.plan.plan import Plan

__all__ = ["make_plan", "present", "read_plan"]

_MS_PER_S = 1e3
_MOST_PASSES = 1_000_000  # minutes, and some gigabytes
_FILES = ("plan.txt", "plan.csv", "trace.json", "plan.svg", "plan.png")


def read_plan(file: Path) -> Plan:
    """Read a plan's text form.

    Raises:
        ConfigError: The file cannot be read.
        PlanError: The text is no plan.
    """
    from wavemare.pipeline.plan.plan import Plan

    remedy = "Name a file with the text that 'wavemare plan show --text' prints"
    try:
        return Plan.parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError("--file", str(file), reason, remedy) from None
    except UnicodeDecodeError:
        raise ConfigError("--file", str(file), "this is not text", remedy) from None


def make_plan(
    schedule: str,
    sizes: tuple[int, int, int],
    asynchronous: Mapping[str, Any],
    costs_ms: Mapping[str, str],
) -> Plan:
    """Make a plan.

    Args:
        schedule: Its name.
        sizes: Stages, micro-batches and steps.
        asynchronous: Options of PipeMare alone, by name.
        costs_ms: Times in milliseconds by option, by which waves are interleaved.

    Raises:
        ConfigError: The plan is too large, or an option is not one of this schedule.
        PlanError: There is no such schedule, or no such plan.
    """
    from wavemare.pipeline.plan import schedules

    stages, micro_batches, steps = sizes
    if stages * micro_batches * max(steps, 1) > _MOST_PASSES:
        reason = f"{stages} x {micro_batches} x {steps} forward passes are more than can be shown"
        remedy = f"Give numbers whose product is at most {_MOST_PASSES}"
        raise ConfigError("--stages", stages, reason, remedy)
    if schedule == "pipemare":
        return schedules.pipemare(*sizes, **asynchronous)
    plan = schedules.build_plan(schedule, *sizes)
    if schedule in {"tick-tock", "in-phase"}:
        plan = _interleave(plan, _costs(plan, costs_ms))
    for name, value in asynchronous.items():
        if value:
            key = f"--{name.replace('_', '-')}"
            reason = f"the schedule {schedule!r} never overlaps two steps"
            raise ConfigError(key, value, reason, f"Leave it out, or give {key} with pipemare")
    return plan


def _interleave(plan: Plan, costs: Costs) -> Plan:
    """Return waves in the order that suits the segments that have collectives."""
    from wavemare.pipeline.wave.gain import sums_of
    from wavemare.pipeline.wave.schedule import in_phase, tick_tock

    make = tick_tock if plan.schedule == "tick-tock" else in_phase
    up, down = sums_of(costs, plan.num_stages)
    numbers = plan.num_stages, plan.micro_batches, plan.num_steps
    return make(*numbers, sums_output=up, sums_gradient=down)


def present(
    plan: Plan,
    costs_ms: Mapping[str, str],
    *,
    text_only: bool,
    folder: Path | None,
    html: Path | None,
) -> None:
    """Check a plan, simulate it, and show both.

    Args:
        plan: The plan.
        costs_ms: Times in milliseconds by option.
        text_only: Whether to print the plan's text form alone.
        folder: Folder for files of all kinds, if any.
        html: File for a page, if any.

    Raises:
        ConfigError: A cost is invalid, or a file cannot be written.
        PlanError: The plan cannot be run.
    """
    from wavemare.pipeline.clock.simulate import simulate
    from wavemare.pipeline.plan.check import check

    costs = _costs(plan, costs_ms)
    report = check(plan)
    timeline = simulate(plan, costs)
    prediction = [_prediction(plan, timeline, costs_ms), _hidden(plan, timeline, costs)]
    if text_only:
        typer.echo(str(plan), nl=False)
    else:
        typer.echo("\n".join([str(report), *prediction]))
        _print_grid(plan)
    if folder is not None:
        _write(plan, timeline, folder)
        # Not into the plan's text, which is read back.
        start = "" if text_only else "\n"
        typer.echo(f"{start}{folder}: {', '.join(_FILES)}", err=text_only)
    if html is not None:
        from wavemare.report import plan_page

        facts = "\n".join(prediction).splitlines()
        write_page(plan_page(plan, report, timeline, facts), html, key="--html")


def _costs(plan: Plan, texts: Mapping[str, str]) -> Costs:
    from wavemare.pipeline.clock.simulate import Costs

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


def _prediction(plan: Plan, timeline: Timeline, costs_ms: Mapping[str, str]) -> str:
    """Return how long the plan takes, and how busy the ranks are meanwhile."""
    from wavemare.pipeline.clock.timeline import bubble, steady_utilisation, utilisation

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
    """Return how much of the collectives is hidden, with a line feed; empty without any."""
    from wavemare.pipeline.wave.gain import step_time
    from wavemare.pipeline.wave.schedule import accumulation

    sums_s = timeline.collectives_s
    if not sums_s:
        return ""
    hidden = 1 - timeline.exposed_s / sums_s
    text = f"collectives: {sums_s * _MS_PER_S:.6g} ms, {hidden:.1%} of it behind passes"
    if plan.num_steps and plan.schedule != "accumulation":
        plain = accumulation(plan.num_stages, plan.micro_batches)
        gain = step_time(plain, costs).step_s / step_time(plan, costs).step_s
        text += f"; speedup over accumulation: {gain:.3f}x"
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
