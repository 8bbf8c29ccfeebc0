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
        int, typer.Option(min=0, max=3, help="Megatron: decides order and names of weights.")
    ] = 3,
    make_vocab_size_divisible_by: Annotated[
        int, typer.Option(min=1, help="Megatron: pad the vocabulary to a multiple of this x ranks.")
    ] = 128,
    iteration: Annotated[int, typer.Option(min=0, help="Megatron: step; 0 is a release.")] = 0,
    vocab_size: Annotated[
        int | None, typer.Option(help="From Megatron: vocabulary without padding, if not stored.")
    ] = None,
    num_attention_heads: Annotated[
        int | None, typer.Option(help="From Megatron: heads, if the checkpoint does not say.")
    ] = None,
) -> None:
    """Convert a checkpoint; the target appears after it was read back and compared equal.

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
