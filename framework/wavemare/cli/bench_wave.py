# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench wave``: optimizer steps of a tensor-parallel GPT under plans of waves."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from wavemare.cli.bench_shared import (
    Batch,
    Heads,
    Hidden,
    JsonFile,
    Layers,
    Plot,
    Rounds,
    SequenceLength,
    Vocabulary,
    Warmups,
    check_picture,
    check_results,
    check_writable,
    leave,
    print_lines,
    print_wide,
)

__all__ = ["wave"]

_step = partial(typer.Option, rich_help_panel="A tick-tock step, as files")


def wave(
    exposed: Annotated[
        str,
        typer.Option(
            help="Percentages of accumulation's time that collectives take, for which links are "
            "made (needs root); 0 for links as fast as they go."
        ),
    ] = "0,10,25,40",
    micro_batches: Annotated[int, typer.Option(help="Per optimizer step.")] = 8,
    ranks: Annotated[int, typer.Option(help="Over which the model is split.")] = 2,
    rounds: Rounds = 5,
    warmups: Warmups = 1,
    patience: Annotated[
        int,
        typer.Option(
            help="Seconds in all for which steps that other programs disturb are measured again."
        ),
    ] = 0,
    json_file: JsonFile = None,
    plot: Plot = None,
    trace: Annotated[Path | None, _step(help="Chrome trace of rank 0.")] = None,
    timeline: Annotated[Path | None, _step(help="Picture (PNG) of its first part.")] = None,
    memory: Annotated[Path | None, _step(help="Picture of the bytes that each wave keeps.")] = None,
    layers: Layers = 2,
    hidden: Hidden = 768,
    heads: Heads = 8,
    vocabulary: Vocabulary = 1024,
    sequence: SequenceLength = 64,
    batch: Batch = 4,
) -> None:
    """Measure gradient accumulation, two waves in phase, Domino's halves, and tick-tock.

    A GPT-2 is split by tensors over the ranks, whose collectives tick-tock hides behind the other
    wave. All systems live in the same processes and take turns. Ratios are to accumulation.

    For example: wavemare bench wave --exposed 25 --json result.json
    """
    from wavemare.bench.options import parse_numbers
    from wavemare.bench.wave.request import WaveRequest

    request = WaveRequest(
        ranks=ranks,
        exposed=parse_numbers("--exposed", exposed),
        micro_batches=micro_batches,
        rounds=rounds,
        warmups=warmups,
        patience=patience,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        batch=batch,
        trace=_text(trace),
        timeline=_text(timeline),
        memory=_text(memory),
    )
    request.check()
    check_results(json_file, plot)
    check_writable("--trace", trace)
    check_picture("--timeline", timeline, suffixes=[".png"])
    check_picture("--memory", memory)
    from wavemare.bench.wave.launch import measure
    from wavemare.bench.wave.show import draw, memory_table, remarks, result_table

    result = measure(request)
    print_wide(result_table(result), 100)
    print_wide(memory_table(result), 100)
    print_lines(remarks(result))
    leave(result, json_file, plot, draw)


def _text(file: Path | None) -> str | None:
    return None if file is None else str(file.absolute())
