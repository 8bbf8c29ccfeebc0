# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench``: systems side by side, in one run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wavemare.cli.bench_quality import quality
from wavemare.cli.bench_shared import (
    Batch,
    Heads,
    Hidden,
    JsonFile,
    Layers,
    Mbit,
    Plot,
    Ranks,
    Rounds,
    SequenceLength,
    Vocabulary,
    Warmups,
    check_results,
    check_writable,
    leave,
    print_lines,
    print_wide,
    save,
)
from wavemare.cli.bench_training import training
from wavemare.cli.bench_wave import wave
from wavemare.cli.bench_whale import whale
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.bench.request import PipelineRequest

__all__ = ["bench"]

bench = typer.Typer(
    no_args_is_help=True,
    help="Measure systems side by side, in one run.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_WORKER = "wavemare.bench.worker"
_FORWARD_MS, _BACKWARD_MS = 7.0, 13.0
_waits = partial(typer.Option, rich_help_panel="Layers that wait instead")


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
    rounds: Rounds = 7,
    steps_per_round: Annotated[
        int | None, typer.Option(help="Optimizer steps of a system in a round.")
    ] = None,
    systems: Annotated[str | None, typer.Option(help="Which; by default the usual.")] = None,
    json_file: JsonFile = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the last round's timelines to this folder.")
    ] = None,
    layers: Layers = 8,
    hidden: Hidden = 256,
    heads: Heads = 4,
    vocabulary: Vocabulary = 256,
    sequence: SequenceLength = 128,
    batch: Batch = 2,
    synthetic: Annotated[
        bool, _waits("--synthetic", help="Stages sleep, so that many share few cores.")
    ] = False,
    forward_ms: Annotated[
        float | None, _waits(help=f"Of a stage's forward pass [{_FORWARD_MS:g}].")
    ] = None,
    backward_ms: Annotated[
        float | None, _waits(help=f"Of a stage's backward pass [{_BACKWARD_MS:g}].")
    ] = None,
) -> None:
    """Measure the time per optimizer step of pipelines on the same model.

    All systems live in the same processes and take turns. Ratios are to stock DeepSpeed's 1F1B.

    For example: wavemare bench pipeline --stages 2 --micro-batches 1,4 --json result.json
    """
    from wavemare.bench.options import parse_names, parse_numbers
    from wavemare.bench.request import PipelineRequest
    from wavemare.bench.systems import DEFAULT_SYSTEMS
    from wavemare.bench.table import result_table, skipped_lines

    if not synthetic and (forward_ms is not None or backward_ms is not None):
        option = "--forward-ms" if forward_ms is not None else "--backward-ms"
        value = forward_ms if forward_ms is not None else backward_ms
        raise ConfigError(option, value, "only timed waits have it", "Add --synthetic")
    request = PipelineRequest(
        stages=stages,
        micro_batches=parse_numbers("--micro-batches", micro_batches),
        rounds=rounds,
        steps_per_round=steps_per_round,
        systems=DEFAULT_SYSTEMS if systems is None else parse_names(systems),
        forward_ms=_wait(synthetic, forward_ms, _FORWARD_MS),
        backward_ms=_wait(synthetic, backward_ms, _BACKWARD_MS),
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        batch=batch,
        trace=str(trace.absolute()) if trace is not None else None,
    )
    request.check()
    check_writable("--json", json_file)
    check_writable("--trace", trace, is_folder=True)
    result = _measure(request)
    print_wide(result_table(result), 80)
    print_lines(skipped_lines(result))
    save(json_file, result, indent=2)


@bench.command()
def sparse(
    ranks: Ranks = 4,
    mbit: Mbit = None,
    mib: Annotated[float, typer.Option(help="Size of the gradient in MiB.")] = 100.0,
    block: Annotated[int, typer.Option(help="Elements per block.")] = 256,
    densities: Annotated[
        str, typer.Option(help="Shares of blocks that are not zero.")
    ] = "1,0.4,0.1,0.04,0.01",
    patterns: Annotated[str, typer.Option(help="Masks.")] = "random,identical,zipf",
    systems: Annotated[str | None, typer.Option(help="Which; by default all over MPI.")] = None,
    rounds: Rounds = 5,
    warmups: Warmups = 2,
    json_file: JsonFile = None,
    plot: Plot = None,
) -> None:
    """Measure ways to sum a sparse gradient over ranks.

    Dense reductions of MPI and gloo, the sparse ones of torch and DeepSpeed, and wavemare's
    executors take turns in the same processes. Ratios are to the fastest dense one.

    For example: wavemare bench sparse --mbit 1000 --densities 0.1,0.01 --json result.json
    """
    from wavemare.bench.options import parse_names
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
    check_results(json_file, plot)
    from wavemare.bench.launch import measure
    from wavemare.bench.sparse.show import draw, result_table

    result = measure(request, "wavemare.bench.sparse.worker")
    print_wide(result_table(result), 100)
    leave(result, json_file, plot, draw)


bench.command()(training)
bench.command()(wave)
bench.command()(whale)
bench.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(quality)


def _shares(option: str, text: str) -> tuple[float, ...]:
    from wavemare.bench.options import parse_names

    try:
        return tuple(dict.fromkeys(map(float, parse_names(text))))
    except ValueError:
        reason = "these are no numbers between commas"
        raise ConfigError(option, text, reason, "Write them as in 1,0.1,0.01") from None


def _wait(synthetic: bool, given: float | None, default: float) -> float | None:
    if not synthetic:
        return None
    return default if given is None else given


def _measure(request: PipelineRequest) -> dict[str, Any]:
    """Run the ranks and return what they measured."""
    from wavemare.bench.launch import exchange, read_answer
    from wavemare.cli import launch

    with exchange(request) as (options, answered):
        command = launch.build_command(_WORKER, options, num_processes=request.stages)
        code = launch.run(command, launch.extra_environment())
        return read_answer(answered, code, request.stages)
