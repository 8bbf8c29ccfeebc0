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
) -> None:
    """Print what a checkpoint is: format, iteration, sizes, parallelism, what is missing.

    Nothing of its content is run. For example: wavemare inspect checkpoints/llama
    """
    from wavemare.megatron.inspect import inspect as describe

    facts = describe(folder)
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
