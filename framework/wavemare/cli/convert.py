# SPDX-License-Identifier: Apache-2.0
"""``wavemare convert``: checkpoints of Hugging Face and Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavemare.errors import ConfigError, did_you_mean

_TYPES = ("float32", "bfloat16", "float16")


def convert(
    source: Annotated[Path, typer.Argument(help="Folder to read; its format is recognised.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    to: Annotated[str, typer.Option(help="hf, megatron or universal (DeepSpeed's).")],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; as it is if omitted.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="From Megatron: folder with config.json, if the checkpoint lacks facts."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(min=1, help="From Megatron: vocabulary without padding, if not stored."),
    ] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option(min=1, help="From Megatron: heads, if not stored.")
    ] = None,
    iteration: Annotated[
        int | None, typer.Option(min=0, help="To Megatron: step; 0 is a release.")
    ] = None,
) -> None:
    """Convert a checkpoint; the target appears after it was read back and compared equal.

    Run the same command again to go on after it was stopped.

    For example: wavemare convert megatron-llama/ llama/ --to hf
    """
    if dtype is not None and dtype not in _TYPES:
        raise ConfigError("--dtype", dtype, "there is no such type", did_you_mean(dtype, _TYPES))
    import torch

    from wavemare.megatron.convert import Options
    from wavemare.megatron.convert import convert as run

    options = Options(
        dtype=getattr(torch, dtype) if dtype is not None else None,
        config=config,
        vocab_size=vocab_size,
        num_attention_heads=num_attention_heads,
        iteration=iteration,
    )
    typer.echo(run(source, target, to, options))
