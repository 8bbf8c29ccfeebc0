# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan``: plans of schedules, checked, predicted and drawn without running them."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavemare.cli.memory import memory
from wavemare.cli.options import option
from wavemare.errors import ConfigError, os_errors
from wavemare.extras import require
from wavemare.files import atomic_write_bytes

if TYPE_CHECKING:
    from wavemare.pipeline.clock.simulate import Costs, Timeline
    from wavemare.pipeline.plan.check import Report
    from wavemare.pipeline.plan.plan import Plan
    from wavemare.pipeline.plan.schedules import ScheduleRow

app = typer.Typer(no_args_is_help=True, help="Look at the plan of a schedule without running it.")
app.command()(memory)
_MS_PER_S = 1e3
_OF_A_PASS = "--forward-ms", "--backward-ms", "--weight-ms"
_FILE = "file:"  # as in the configuration
_MOST_PASSES = 1_000_000  # minutes, and some gigabytes
_FILES = ("plan.txt", "trace.json", "plan.svg", "plan.png")
_TIMES = "forward_ms", "backward_ms", "weight_ms", "step_ms", "send_ms", "collective_ms"
_SIZES = "stages", "micro_batches", "steps"
_OF_A_PLAN = "warmup_steps", "drain_interval", "slack", "chunks"
_SCHEDULE = typer.Option(
    help="A pipeline: 1f1b, pipemare, inference, interleaved, zb-h1, zbv, auto or file:PATH "
    "(torch's if it ends in .csv). Waves on one rank: tick-tock, accumulation or in-phase."
)
_MEMORY_LIMIT = typer.Option(
    help="The most activations of a rank, as a share of 1f1b's. The schedule auto keeps to it (1 "
    "if omitted), others are checked."
)
_WEIGHT_MS = typer.Option(
    help="The part of a split backward pass that computes the gradients of the weights, likewise; "
    "half of it if omitted."
)


@app.command()
def show(
    context: typer.Context,
    schedule: Annotated[str, _SCHEDULE] = "pipemare",
    stages: Annotated[
        int, typer.Option(help="Ranks of the pipeline; of waves: segments, with the head.")
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
        int, typer.Option(min=0, help="PipeMare: extra micro-batches in flight per later stage.")
    ] = 0,
    chunks: Annotated[
        int | None, typer.Option(min=1, help="Interleaved: stages per rank; 2 if omitted.")
    ] = None,
    memory_limit: Annotated[float | None, _MEMORY_LIMIT] = None,
    forward_ms: Annotated[
        str, typer.Option(help="Forward pass: one number per rank, or for each stage (1,1,2,1).")
    ] = "1",
    backward_ms: Annotated[str, typer.Option(help="Backward pass, likewise.")] = "2",
    weight_ms: Annotated[str | None, _WEIGHT_MS] = None,
    step_ms: Annotated[
        str, typer.Option(help="Optimizer step: one number, or one for each rank.")
    ] = "0",
    send_ms: Annotated[
        str, typer.Option(help="Message to a neighbour: one number, or one per stage.")
    ] = "0",
    collective_ms: Annotated[
        str | None,
        typer.Option(help="Waves: all-reduce of a segment's output and of its input's gradient."),
    ] = None,
    csv: Annotated[
        bool, typer.Option("--csv", help="Print the passes of one step alone, in torch's CSV form.")
    ] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Print the plan's text form alone, for file:PATH.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for plan.txt, trace.json, plan.svg and plan.png."),
    ] = None,
) -> None:
    """Check a schedule, predict its times and draw it.

    The exit code is 2 if the plan cannot be run.
    """
    costs_ms = {option(n): context.params[n] for n in _TIMES if context.params[n] is not None}
    if csv and text:
        raise ConfigError("--csv", csv, "--text prints another form", "Leave out one of them")
    if output is not None:
        require("matplotlib", "--output")
    if schedule.startswith(_FILE):
        plan = _read_plan(context, Path(schedule.removeprefix(_FILE)))
    else:
        plan = _make_plan(schedule, context.params, costs_ms)
    _refuse_idle_times(plan, costs_ms)
    form = "csv" if csv else "text" if text else None
    _present(plan, costs_ms, memory_limit=memory_limit, form=form, folder=output)


def _read_plan(context: typer.Context, file: Path) -> Plan:
    from wavemare.pipeline.plan.files import read_plan

    for name in (*_SIZES, *_OF_A_PLAN):
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            key, reason = option(name), "the plan in the file has its own"
            raise ConfigError(key, context.params[name], reason, f"Leave out {key}")
    return read_plan(file, "--schedule")


def _make_plan(schedule: str, params: Mapping[str, Any], costs_ms: Mapping[str, str]) -> Plan:
    from wavemare.pipeline.plan.plan import check_numbers
    from wavemare.pipeline.plan.schedules import SCHEDULES, build_plan

    row = SCHEDULES.get(schedule)  # else `build_plan` refuses it
    for name in _OF_A_PLAN:
        if params[name] and row is not None and name not in row.options:
            others = [other for other, row in SCHEDULES.items() if name in row.options]
            reason = f"the schedule {schedule!r} does not have it"
            remedy = f"Leave it out, or give {option(name)} with {' or '.join(others)}"
            raise ConfigError(option(name), params[name], reason, remedy)
    stages, *_ = sizes = [params[name] for name in _SIZES]
    numbers = [*sizes, params["chunks"] or 1]
    if math.prod(max(number, 1) for number in numbers) > _MOST_PASSES:
        reason = f"{' x '.join(map(str, numbers))} forward passes are more than can be shown"
        remedy = f"Give numbers whose product is at most {_MOST_PASSES}"
        raise ConfigError("--stages", stages, reason, remedy)
    check_numbers(*sizes)
    options = {} if row is None else _options_of(row, params, costs_ms)
    return build_plan(schedule, *sizes, **options)


def _options_of(
    row: ScheduleRow, params: Mapping[str, Any], costs_ms: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options of a schedule that are given, or follow from the times that are."""
    from wavemare.pipeline.plan.schedules import CHUNKS
    from wavemare.pipeline.wave.gain import sums_of

    names, stages = row.options, params["stages"]
    given = (name for name in names if params.get(name) is not None)
    options = {name: params[name] for name in given}
    if "costs" in names:
        of_passes = {key: text for key, text in costs_ms.items() if key != "--collective-ms"}
        options["costs"] = _costs(row.homes(stages, CHUNKS), of_passes)
    if "sums_output" in names:
        sums = sums_of(_costs(range(stages), costs_ms), stages)
        options["sums_output"], options["sums_gradient"] = sums
    return options


def _is_waves(plan: Plan) -> bool:
    from wavemare.pipeline.plan.schedules import SCHEDULES

    return plan.schedule in SCHEDULES and SCHEDULES[plan.schedule].is_waves


def _refuse_idle_times(plan: Plan, costs_ms: Mapping[str, str]) -> None:
    """Refuse the times of what a plan does not do."""
    for key, idle, others in (
        ("--weight-ms", not plan.is_split, "zb-h1, zbv or auto"),
        ("--collective-ms", not _is_waves(plan), "tick-tock or accumulation or in-phase"),
    ):
        if idle and key in costs_ms:
            reason = f"the schedule {plan.schedule!r} does not have it"
            raise ConfigError(key, costs_ms[key], reason, f"Leave it out, or give it with {others}")


def _present(
    plan: Plan,
    costs_ms: Mapping[str, str],
    *,
    memory_limit: float | None,
    form: str | None,
    folder: Path | None,
) -> None:
    """Check a plan, simulate it, and show both; with a form, "text" or "csv", the plan alone."""
    from wavemare.pipeline.clock.simulate import simulate
    from wavemare.pipeline.draw import grid
    from wavemare.pipeline.plan.check import Memory, check
    from wavemare.pipeline.plan.files import to_csv

    memory = None
    if memory_limit is not None:
        limit = memory_limit * min(len(plan.ranks), plan.micro_batches)
        memory = Memory.in_micro_batches(plan, limit)
    report = check(plan, memory)
    costs = _costs(range(plan.num_stages) if _is_waves(plan) else plan.rank_of, costs_ms)
    timeline = simulate(plan, costs)
    prediction = [
        _prediction(plan, timeline, costs_ms) + _gap(plan, timeline, costs),
        _collectives(plan, timeline, costs),
    ]
    if form is not None:
        typer.echo(str(plan) if form == "text" else to_csv(plan), nl=False)
    else:
        typer.echo("\n".join([str(report), *prediction, *_expectation(plan, report)]))
        typer.echo(grid(plan, width=shutil.get_terminal_size().columns))
    if folder is not None:
        _write(plan, timeline, folder)
        # Not into the plan's text, which is read back.
        start = "\n" if form is None else ""
        typer.echo(f"{start}{folder}: {', '.join(_FILES)}", err=form is not None)


def _expectation(plan: Plan, report: Report) -> Iterator[str]:
    """Yield what staleness does to the loss, if there is any."""
    from wavemare.pipeline.plan.orders import SEND_SLOTS
    from wavemare.pipeline.staleness.staleness import largest_staleness, policy_offer

    if not any(report.max_staleness):
        return
    # Of a long run: the few steps of the plan begin without any.
    sizes = plan.num_stages, plan.micro_batches, plan.send_slots - SEND_SLOTS
    offer = policy_offer(*largest_staleness(*sizes))
    if offer is not None:
        yield f"loss: {offer}\n"


def _costs(homes: Sequence[int], texts: Mapping[str, str]) -> Costs:
    """Read the times of stages, given the rank of each; each segment of waves counts as a rank."""
    from wavemare.pipeline.clock.simulate import Costs

    seconds = {key: _seconds(key, text, homes) for key, text in texts.items()}
    sums = seconds.get("--collective-ms", (0.0,) * len(homes))
    backward = seconds["--backward-ms"]
    weight = seconds.get("--weight-ms", tuple(number / 2 for number in backward))
    if any(part > whole for part, whole in zip(weight, backward, strict=True)):
        reason = "it is a part of --backward-ms, and longer"
        remedy = f"Give at most the {texts['--backward-ms']} milliseconds of --backward-ms"
        raise ConfigError("--weight-ms", texts["--weight-ms"], reason, remedy)
    return Costs(
        forward_s=seconds["--forward-ms"],
        backward_s=backward,
        weight_s=weight,
        step_s=seconds["--step-ms"],
        send_s=seconds["--send-ms"],
        # The first segment's input needs no gradient, and the head's output is the loss.
        sum_output_s=(*sums[:-1], 0.0),
        sum_gradient_s=(0.0, *sums[1:]),
    )


def _seconds(key: str, text: str, homes: Sequence[int]) -> tuple[float, ...]:
    """Read one number of milliseconds, or one for each stage, or of a step for each rank."""
    stages = Counter(homes)
    by_rank = key == "--step-ms" and len(stages) < len(homes)
    count, of = (len(stages), "ranks") if by_rank else (len(homes), "stages")
    remedy = f"Give one number of milliseconds, or one for each of the {count} {of}: 1,2,..."
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(key, text, "these are no numbers", remedy) from None
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ConfigError(key, text, "a time is 0 or more, and finite", remedy)
    if len(numbers) not in {1, count}:
        raise ConfigError(key, text, f"there are {len(numbers)} numbers for {count} {of}", remedy)
    if len(numbers) == 1:
        # The stages of a rank share the one number of a pass.
        numbers = [numbers[0] / (stages[r] if key in _OF_A_PASS else 1) for r in homes]
    elif by_rank:
        numbers = [numbers[rank] for rank in homes]
    return tuple(number / _MS_PER_S for number in numbers)


def _prediction(plan: Plan, timeline: Timeline, costs_ms: Mapping[str, str]) -> str:
    """Return how long the plan takes, and how busy the ranks are meanwhile."""
    from wavemare.pipeline.clock.simulate import bubble, utilisation

    passes = ", ".join(
        f"{key.removeprefix('--').removesuffix('-ms')} {text} ms" for key, text in costs_ms.items()
    )
    total_ms = timeline.makespan_s * _MS_PER_S
    per_step = f", {total_ms / plan.num_steps:.4g} ms per step" if plan.num_steps else ""
    shares = utilisation(timeline)
    mean = sum(shares) / len(shares)
    lines = [
        f"predicted for {passes}:",
        f"time: {total_ms:.6g} ms{per_step}",
        f"bubble: {bubble(timeline):.1%} of the ranks' time",
        f"busy: {mean:.1%} (by rank {min(shares):.1%} to {max(shares):.1%})",
    ]
    return "\n".join(lines)


def _gap(plan: Plan, timeline: Timeline, costs: Costs) -> str:
    """Return how far a plan with norms and without collectives is from its passes' lower bound."""
    from wavemare.pipeline.clock.simulate import simulate
    from wavemare.pipeline.plan.automatic import lower_bound

    # Without the norms, ranks begin the next step while others still do this one.
    if not plan.has_norms or timeline.collectives_s:
        return ""
    passes_s = simulate(plan, replace(costs, step_s=0.0)).makespan_s / plan.num_steps
    bound_s = lower_bound(plan.rank_of, plan.micro_batches, costs, split=plan.is_split)
    gap = passes_s / bound_s - 1 if bound_s else 0.0
    text = f"lower bound of the passes: {bound_s * _MS_PER_S:.4g} ms per step"
    return f"\n{text}, which the plan exceeds by {gap:.1%}"


def _collectives(plan: Plan, timeline: Timeline, costs: Costs) -> str:
    """Return the collectives' time and what waves gain, with a line feed; empty without any."""
    from wavemare.pipeline.wave.gain import step_time
    from wavemare.pipeline.wave.schedule import accumulation

    sums_s = timeline.collectives_s
    if not sums_s:
        return ""
    text = f"collectives: {sums_s * _MS_PER_S:.6g} ms"
    if plan.num_steps and plan.schedule != "accumulation":
        plain = accumulation(plan.num_stages, plan.micro_batches)
        gain = step_time(plain, costs) / step_time(plan, costs)
        text += f"; speedup over accumulation: {gain:.3f}x"
    return f"{text}\n"


def _write(plan: Plan, timeline: Timeline, folder: Path) -> None:
    from wavemare.pipeline import draw

    contents = (
        str(plan).encode(),
        draw.chrome_trace(timeline).encode(),
        draw.svg(timeline).encode(),
        draw.png(timeline),
    )
    remedy = "Name another folder"
    with os_errors(ConfigError, "--output", str(folder), "it cannot be written", remedy):
        for name, content in zip(_FILES, contents, strict=True):
            atomic_write_bytes(folder / name, content)
