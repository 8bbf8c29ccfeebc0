# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench whale``: plans for unlike devices, made of one machine's cores."""

from __future__ import annotations

from functools import partial
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
    check_results,
    leave,
    print_wide,
    size_option,
)

__all__ = ["whale"]

_devices = partial(typer.Option, rich_help_panel="The devices")


def whale(
    parts: Annotated[str, typer.Option(help="What is measured.")] = "shares,cuts,choice",
    ranks: Annotated[str, typer.Option(help="Processes, one or several numbers.")] = "2,4",
    schedules: Annotated[str, typer.Option(help="Of the pipelines.")] = "1f1b,pipemare",
    rounds: Rounds = 5,
    warmups: Warmups = 1,
    patience: Annotated[
        int,
        typer.Option(
            help="Seconds, for each group of ranks, for which steps that other programs disturb "
            "are measured again."
        ),
    ] = 0,
    json_file: JsonFile = None,
    plot: Plot = None,
    factor: Annotated[
        float, _devices(help="How many times as fast as the slow ranks the others are.")
    ] = 2.0,
    load: Annotated[float, _devices(help="Part of all cores that the ranks use together.")] = 0.675,
    clusters: Annotated[
        str, _devices(help="For the choice; hosts are made of namespaces (needs root).")
    ] = "like,unlike,hosts",
    mbit: Annotated[float, _devices(help="Speed of the hosts' links in Mbit/s.")] = 200.0,
    layers: Layers = 12,
    hidden: Hidden = 128,
    heads: Heads = 4,
    vocabulary: Vocabulary = 32,
    sequence: SequenceLength = 64,
    batch: Batch = 12,
    micro_steps: Annotated[
        int, size_option(help="Micro-batches per optimizer step where ranks share samples.")
    ] = 4,
    micro_batches: Annotated[
        int, size_option(help="Micro-batches per optimizer step of a pipeline.")
    ] = 8,
) -> None:
    """Measure plans for unlike devices beside equal parts.

    Quotas make devices of different speed of one machine's processes. Shares of samples (half of
    the ranks are slow) and cuts of a pipeline (its first rank is slow, then its last) are made from
    speeds that are measured first; both systems live in the same processes and take turns. Then
    the planner's choice among all axes of four ranks stands beside the measured steps of all.

    For example: wavemare bench whale --parts shares --ranks 2 --json result.json
    """
    from wavemare.bench.options import parse_names, parse_numbers
    from wavemare.bench.whale.request import WhaleRequest

    request = WhaleRequest(
        parts=parse_names(parts),
        ranks=parse_numbers("--ranks", ranks),
        schedules=parse_names(schedules),
        rounds=rounds,
        warmups=warmups,
        patience=patience,
        factor=factor,
        load=load,
        clusters=parse_names(clusters),
        mbit=mbit,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=vocabulary,
        sequence=sequence,
        batch=batch,
        micro_steps=micro_steps,
        micro_batches=micro_batches,
    )
    request.check()
    check_results(json_file, plot)
    from wavemare.bench.whale.launch import measure
    from wavemare.bench.whale.show import draw, result_table

    result = measure(request)
    print_wide(result_table(result), 110)
    leave(result, json_file, plot, draw)
