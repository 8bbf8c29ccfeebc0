"""``wavemare bench``: systems side by side, in one run."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavemare.cli.bench_kernels import kernels
from wavemare.cli.bench_training import training
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.bench.request import PipelineRequest

__all__ = ["bench", "check_writable"]

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure systems side by side, in one run.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WORKER = "wavemare.bench.worker"
_FORWARD_MS, _BACKWARD_MS = 7.0, 13.0
_MODEL = "Size of the GPT"
_WAITS = "Layers that wait instead"


@bench.callback()
def _group() -> None:
    # With a callback a single command keeps its name.
    return None


@bench.command()
def pipeline(
    stages: Annotated[int, typer.Option(help="Pipeline ranks, one process each.")] = 2,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches per optimizer step, one or several numbers.")
    ] = "1,2,4,8",
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    steps_per_round: Annotated[
        int | None, typer.Option(help="Optimizer steps of a system in a round.")
    ] = None,
    systems: Annotated[str | None, typer.Option(help="Which; by default all.")] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the last round's timelines to this folder.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Blocks.", rich_help_panel=_MODEL)] = 8,
    hidden: Annotated[int, typer.Option(help="Width.", rich_help_panel=_MODEL)] = 256,
    heads: Annotated[int, typer.Option(help="Heads.", rich_help_panel=_MODEL)] = 4,
    vocabulary: Annotated[int, typer.Option(help="Tokens.", rich_help_panel=_MODEL)] = 256,
    sequence: Annotated[
        int, typer.Option(help="Tokens per sequence.", rich_help_panel=_MODEL)
    ] = 128,
    batch: Annotated[
        int, typer.Option(help="Sequences per micro-batch.", rich_help_panel=_MODEL)
    ] = 2,
    synthetic: Annotated[
        bool,
        typer.Option(
            "--synthetic",
            help="Stages sleep, so that many share few cores.",
            rich_help_panel=_WAITS,
        ),
    ] = False,
    forward_ms: Annotated[
        float | None,
        typer.Option(help=f"Of a stage's forward pass [{_FORWARD_MS:g}].", rich_help_panel=_WAITS),
    ] = None,
    backward_ms: Annotated[
        float | None,
        typer.Option(
            help=f"Of a stage's backward pass [{_BACKWARD_MS:g}].", rich_help_panel=_WAITS
        ),
    ] = None,
) -> None:
    """Measure the time per optimizer step of pipelines on the same model.

    All systems live in the same processes and take turns. Ratios are to stock DeepSpeed's 1F1B.

    For example: wavemare bench pipeline --stages 2 --micro-batches 1,4 --json result.json
    """
    from wavemare.bench.request import PipelineRequest, parse_names, parse_numbers
    from wavemare.bench.systems import SYSTEMS

    if not synthetic and (forward_ms is not None or backward_ms is not None):
        option = "--forward-ms" if forward_ms is not None else "--backward-ms"
        value = forward_ms if forward_ms is not None else backward_ms
        raise ConfigError(option, value, "only timed waits have it", "Add --synthetic")
    request = PipelineRequest(
        stages=stages,
        micro_batches=parse_numbers("--micro-batches", micro_batches),
        rounds=rounds,
        steps_per_round=steps_per_round,
        systems=tuple(SYSTEMS) if systems is None else parse_names(systems),
        forward_ms=_wait(synthetic, forward_ms, _FORWARD_MS),
        backward_ms=_wait(synthetic, backward_ms, _BACKWARD_MS),
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        batch=batch,
    )
    request.check()
    check_writable("--json", json_file.parent if json_file else None)
    check_writable("--trace", trace, make=True)
    result = _measure(request, trace)
    _show(result)
    if json_file is not None:
        from wavemare.files import atomic_write_text

        atomic_write_text(json_file, json.dumps(result, indent=2) + "\n")


@bench.command()
def sparse(
    ranks: Annotated[int, typer.Option(help="Processes.")] = 4,
    mbit: Annotated[
        float | None,
        typer.Option(
            help="Speed of each rank's link in Mbit/s, on hosts made of namespaces (needs root); "
            "by default the ranks share this machine's memory."
        ),
    ] = None,
    mib: Annotated[float, typer.Option(help="Size of the gradient in MiB.")] = 100.0,
    block: Annotated[int, typer.Option(help="Elements per block.")] = 256,
    densities: Annotated[
        str, typer.Option(help="Shares of blocks that are not zero.")
    ] = "1,0.4,0.1,0.04,0.01",
    patterns: Annotated[str, typer.Option(help="Masks.")] = "random,identical,zipf",
    systems: Annotated[str | None, typer.Option(help="Which; by default all over MPI.")] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    warmups: Annotated[int, typer.Option(help="Rounds before them.")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw ratios over densities into this file.")
    ] = None,
) -> None:
    """Measure ways to sum a sparse gradient over ranks.

    Dense reductions of MPI and gloo, the sparse ones of torch and DeepSpeed, and wavemare's
    executors take turns in the same processes. Ratios are to the fastest dense one.

    For example: wavemare bench sparse --mbit 1000 --densities 0.1,0.01 --json result.json
    """
    from wavemare.bench.request import parse_names
    from wavemare.bench.sparse.request import DEFAULT_SYSTEMS, SparseRequest

    request = SparseRequest(
        ranks=ranks,
        mbit=mbit,
        mebibytes=mib,
        block=block,
        densities=_shares("--densities", densities),
        patterns=parse_names(patterns),
        rounds=rounds,
        warmups=warmups,
        systems=DEFAULT_SYSTEMS if systems is None else parse_names(systems),
    )
    request.check()
    check_writable("--json", json_file.parent if json_file else None)
    check_writable("--plot", picture.parent if picture else None)
    from rich.console import Console

    from wavemare.bench.sparse.launch import measure
    from wavemare.bench.sparse.show import plot, result_table
    from wavemare.files import atomic_write_text

    result = {"command": shlex.join(["wavemare", *sys.argv[1:]]), **measure(request)}
    console = Console(highlight=False)
    # Narrower, the names would be cut off.
    console.print(result_table(result), width=max(console.width, 100))
    if json_file is not None:
        atomic_write_text(json_file, json.dumps(result, indent=1) + "\n")
    if picture is not None:
        plot(result, picture)


bench.command()(training)
bench.command()(kernels)


def _shares(option: str, text: str) -> tuple[float, ...]:
    from wavemare.bench.request import parse_names

    try:
        return tuple(dict.fromkeys(map(float, parse_names(text))))
    except ValueError:
        reason = "these are no numbers between commas"
        raise ConfigError(option, text, reason, "Write them as in 1,0.1,0.01") from None


def _wait(synthetic: bool, given: float | None, default: float) -> float | None:
    if not synthetic:
        return None
    return default if given is None else given


def _measure(request: PipelineRequest, trace: Path | None) -> dict[str, Any]:
    """Run the ranks; what they measured comes with the command of this process."""
    from wavemare.cli import launch

    with tempfile.TemporaryDirectory(prefix="wavemare-bench-") as folder:
        asked, answered = Path(folder, "request.json"), Path(folder, "result.json")
        asked.write_text(request.to_json(), encoding="utf-8")
        options = ["--request", str(asked), "--result", str(answered)]
        if trace is not None:
            options += ["--trace", str(trace.absolute())]
        command = launch.build_command(_WORKER, options, num_processes=request.stages)
        code = launch.run(command, launch.extra_environment())
        if code:
            raise typer.Exit(code)
        measured = json.loads(answered.read_text(encoding="utf-8"))
    words = ["wavemare", *sys.argv[1:]]
    return {"command": shlex.join(words), **measured}


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console

    from wavemare.bench.table import result_table, skipped_lines

    console = Console(highlight=False)
    console.print(result_table(result))
    for line in skipped_lines(result):
        console.print(line, soft_wrap=True)


def check_writable(option: str, folder: Path | None, *, make: bool = False) -> None:
    """Check a folder before minutes of measuring rather than afterwards.

    Args:
        option: Names the folder.
        folder: None if the option was not given.
        make: Whether to make the folder.

    Raises:
        ConfigError: Nothing can be written there.
    """
    if folder is None:
        return
    try:
        if make:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"this folder cannot be made ({error.strerror})"
        raise ConfigError(option, str(folder), reason, "Name another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        reason = "there is no such folder that can be written"
        raise ConfigError(option, str(folder), reason, "Name another folder")
