"""``wavemare bench training``: whole optimizer steps, with gradients summed in several ways."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from wavemare.bench.training.request import TrainingRequest

__all__ = ["training"]

_MODEL = "Size of the BERT"
_QUALITY = "What is learned"


def training(
    ranks: Annotated[int, typer.Option(help="Processes.")] = 2,
    mbit: Annotated[
        float | None,
        typer.Option(
            help="Speed of each rank's link in Mbit/s, on hosts made of namespaces (needs root); "
            "by default the ranks share this machine's memory."
        ),
    ] = None,
    systems: Annotated[
        str | None, typer.Option(help="Which; by default all, or three with --quality-steps.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 5,
    warmups: Annotated[int, typer.Option(help="Rounds before them.")] = 1,
    steps_per_round: Annotated[
        int, typer.Option(help="Optimizer steps of a system in a round.")
    ] = 4,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the result to this file.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw times or losses into this file.")
    ] = None,
    vocabulary: Annotated[int, typer.Option(help="Tokens.", rich_help_panel=_MODEL)] = 30_522,
    hidden: Annotated[int, typer.Option(help="Width.", rich_help_panel=_MODEL)] = 256,
    layers: Annotated[int, typer.Option(help="Blocks.", rich_help_panel=_MODEL)] = 2,
    heads: Annotated[int, typer.Option(help="Heads.", rich_help_panel=_MODEL)] = 4,
    batch: Annotated[
        int, typer.Option(help="Texts per rank and step.", rich_help_panel=_MODEL)
    ] = 8,
    sequence: Annotated[int, typer.Option(help="Tokens per text.", rich_help_panel=_MODEL)] = 64,
    block: Annotated[
        int, typer.Option(help="Elements per block of a gradient.", rich_help_panel=_MODEL)
    ] = 256,
    data: Annotated[
        str | None,
        typer.Option(
            help="Table of texts and labels; by default texts are made up.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    quality_steps: Annotated[
        int | None,
        typer.Option(
            help="Train so many steps and compare held-out losses, not times.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    learning_rate: Annotated[
        float, typer.Option(help="Highest of the schedule.", rich_help_panel=_QUALITY)
    ] = 1e-3,
    ratio: Annotated[
        float, typer.Option(help="Share of wavemare-topk's blocks.", rich_help_panel=_QUALITY)
    ] = 0.01,
    compressor_warmup: Annotated[
        int,
        typer.Option(
            help="First steps in which wavemare-topk sends all.", rich_help_panel=_QUALITY
        ),
    ] = 0,
    seed: Annotated[int, typer.Option(help="Of weights and data.", rich_help_panel=_QUALITY)] = 0,
) -> None:
    """Measure the time per optimizer step of a BERT classifier, trained on several ranks.

    Its word embedding is large, and the gradient of that is not zero in the rows of a batch's
    words alone. All systems live in the same processes and take turns. Ratios are to stock
    DeepSpeed's dense reduction.

    For example: wavemare bench training --mbit 1000 --json result.json
    """
    from wavemare.bench.request import parse_names
    from wavemare.bench.training.request import DEFAULT_SYSTEMS, QUALITY_SYSTEMS, TrainingRequest
    from wavemare.cli.bench import check_writable

    usual = DEFAULT_SYSTEMS if quality_steps is None else QUALITY_SYSTEMS
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
    check_writable("--json", json_file.parent if json_file else None)
    check_writable("--plot", picture.parent if picture else None)
    _measure(request, json_file, picture)


def _measure(request: TrainingRequest, json_file: Path | None, picture: Path | None) -> None:
    from rich.console import Console

    from wavemare.bench.sparse.launch import measure
    from wavemare.bench.training.show import plot, result_table
    from wavemare.files import atomic_write_text

    measured = measure(request, "wavemare.bench.training.worker")
    result = {"command": shlex.join(["wavemare", *sys.argv[1:]]), **measured}
    # Narrower, the names would be cut off.
    console = Console(highlight=False, width=max(Console().width, 110))
    console.print(result_table(result))
    if json_file is not None:
        atomic_write_text(json_file, json.dumps(result, indent=1) + "\n")
    if picture is not None:
        plot(result, picture)
