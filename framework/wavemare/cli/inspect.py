# SPDX-License-Identifier: Apache-2.0
"""``wavemare inspect``: what a checkpoint is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def inspect(
    folder: Annotated[
        Path, typer.Argument(help="Checkpoint of Megatron, Hugging Face or DeepSpeed.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Of the run that is to load an engine's checkpoint.")
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="Pipeline stages of that run.")] = None,
    zero_stage: Annotated[int | None, typer.Option(min=0, max=3, help="Its ZeRO stage.")] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option(min=1, help="Its wavemare.tensor_parallel.size.")
    ] = None,
    expert_parallel: Annotated[
        int | None, typer.Option(min=1, help="Its wavemare.expert_parallel.size.")
    ] = None,
) -> None:
    """Print what a checkpoint is: format, iteration, sizes, parallelism, what is missing.

    Of an engine's checkpoint it says whether a run of other sizes can load it. Nothing of its
    content is run. For example: wavemare inspect checkpoints/llama --ranks 4 --stages 2
    """
    from wavemare.megatron.inspect import inspect as describe

    given = {
        "world_size": ranks,
        "pipe": stages,
        "zero_stage": zero_stage,
        "model": tensor_parallel,
        "experts": expert_parallel,
    }
    sizes = {name: number for name, number in given.items() if number is not None}
    facts = describe(folder, sizes)
    if as_json:
        typer.echo(json.dumps(facts))
        return
    keys = facts.pop("keys", {})
    width = max(map(len, facts))
    for name, value in facts.items():
        typer.echo(f"{name:<{width}}  {_shown(value)}")
    for key, shape in keys.items():
        typer.echo(f"  {key} {shape}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {number}" for name, number in value.items()) or "not known"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:,}" if isinstance(value, int) else str(value)
