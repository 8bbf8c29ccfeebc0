# SPDX-License-Identifier: Apache-2.0
"""``wavemare convert``: checkpoints of Hugging Face and Megatron."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    source: Annotated[Path, typer.Argument(help="Folder to read; its format is recognised.")],
    target: Annotated[Path, typer.Argument(help="Folder to write, which must not exist.")],
    to: Annotated[str, typer.Option(help="hf or megatron.")],
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Megatron: ranks that share each layer.")
    ] = 1,
    pipeline_parallel: Annotated[
        int, typer.Option(min=1, help="Megatron: stages of the pipeline.")
    ] = 1,
    checkpoint_version: Annotated[
        int, typer.Option(min=0, max=3, help="Megatron: order and names of the weights.")
    ] = 3,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(min=1, help="Megatron: the vocabulary is padded to it, times the ranks.")
    ] = 128,
    iteration: Annotated[int, typer.Option(min=0, help="Megatron: 0 writes a release.")] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(help="From Megatron: tokens without padding, if it is not said.")
    ] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option(help="From Megatron, if the checkpoint has no arguments.")
    ] = None,
) -> None:
    """Convert a checkpoint; the target appears once it has been read back without a difference.

    For example: wavemare convert gpt2/ megatron-gpt2/ --to megatron --tensor-parallel 2
    """
    from wavemare.megatron.convert import Options
    from wavemare.megatron.convert import convert as run

    options = Options(
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        version=checkpoint_version,
        divisible_by=make_vocab_size_divisible_by,
        iteration=iteration,
        vocab_size=vocab_size,
        num_attention_heads=num_attention_heads,
    )
    typer.echo(run(source, target, to, options))
