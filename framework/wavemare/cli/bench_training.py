# SPDX-License-Identifier: Apache-2.0
"""``wavemare bench training``: whole optimizer steps, with gradients summed in several ways."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from wavemare.cli.bench_shared import (
    Heads,
    Hidden,
    JsonFile,
    Layers,
    Mbit,
    Plot,
    Ranks,
    Rounds,
    Vocabulary,
    Warmups,
    check_results,
    leave,
    print_wide,
    size_option,
)

__all__ = ["training"]

_quality = partial(typer.Option, rich_help_panel="What is learned")


def training(
    ranks: Ranks = 2,
    mbit: Mbit = None,
    systems: Annotated[
        str | None, typer.Option(help="Which; by default all, or three with --quality-steps.")
    ] = None,
    rounds: Rounds = 5,
    warmups: Warmups = 1,
    steps_per_round: Annotated[
        int, typer.Option(help="Optimizer steps of a system in a round.")
    ] = 4,
    json_file: JsonFile = None,
    plot: Plot = None,
    vocabulary: Vocabulary = 30_522,
    hidden: Hidden = 256,
    layers: Layers = 2,
    heads: Heads = 4,
    batch: Annotated[int, size_option(help="Texts per rank and step.")] = 8,
    sequence: Annotated[int, size_option(help="Tokens per text.")] = 64,
    block: Annotated[int, size_option(help="Elements per block of a gradient.")] = 256,
    data: Annotated[
        str | None, _quality(help="Table of texts and labels; by default texts are made up.")
    ] = None,
    quality_steps: Annotated[
        int | None, _quality(help="Train so many steps and compare held-out losses, not times.")
    ] = None,
    learning_rate: Annotated[float, _quality(help="Highest of the schedule.")] = 1e-3,
    ratio: Annotated[float, _quality(help="Share of wavemare-topk's blocks.")] = 0.01,
    compressor_warmup: Annotated[
        int, _quality(help="First steps in which wavemare-topk sends all.")
    ] = 0,
    seed: Annotated[int, _quality(help="Of weights and data.")] = 0,
) -> None:
    """Measure the time per optimizer step of a BERT classifier, trained on several ranks.

    Its word embedding is large, and the gradient of that is not zero in the rows of a batch's
    words alone. All systems live in the same processes and take turns. Ratios are to stock
    DeepSpeed's dense reduction.

    For example: wavemare bench training --mbit 1000 --json result.json
    """
    from wavemare.bench.options import parse_names
    from wavemare.bench.training.request import QUALITY_SYSTEMS, SYSTEMS, TrainingRequest

    usual = SYSTEMS if quality_steps is None else QUALITY_SYSTEMS
    request = TrainingRequest(
        ranks=ranks,
        mbit=mbit,
        systems=usual if systems is None else parse_names(systems),
        rounds=rounds,
        warmups=warmups,
        steps_per_round=steps_per_round,
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        batch=batch,
        sequence=sequence,
        data=data,
        ratio=ratio,
        block=block,
        quality_steps=quality_steps,
        learning_rate=learning_rate,
        compressor_warmup=compressor_warmup,
        seed=seed,
    )
    request.check()
    check_results(json_file, plot)
    from wavemare.bench.launch import measure
    from wavemare.bench.training.show import draw, result_table

    result = measure(request, "wavemare.bench.training.worker")
    print_wide(result_table(result), 110)
    leave(result, json_file, plot, draw)
