# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan memory``: what each rank of a pipeline needs, predicted without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from wavemare.files import atomic_write_text, check_writable

_MB = 1e6
_COLUMNS = "frozen", "trained", "activations", "process", "total"


def memory(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json of transformers, its folder, or gpt2, gpt2-medium, gpt2-large, "
            "gpt2-xl, bert-base or bert-large."
        ),
    ],
    stages: Annotated[int, typer.Option(help="Ranks of the pipeline.")] = 2,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 4,
    samples: Annotated[int, typer.Option(help="Samples of a micro-batch.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.")] = 512,
    schedule: Annotated[str, typer.Option(help="Of the pipeline.")] = "1f1b",
    dtype: Annotated[str, typer.Option(help="fp32 or bf16.")] = "fp32",
    lora_r: Annotated[int, typer.Option(help="Rank of LoRA adapters; 0 for none.")] = 0,
    lora_targets: Annotated[
        str, typer.Option(help="Layers with adapters: all-linear, or names such as q_proj,v_proj.")
    ] = "all-linear",
    four_bit: Annotated[
        bool, typer.Option("--four-bit", help="Frozen linear layers in bitsandbytes' 4 bits.")
    ] = False,
    double_quant: Annotated[
        bool, typer.Option("--double-quant", help="Their scales in 8 bits.")
    ] = False,
    int8: Annotated[
        bool, typer.Option("--int8", help="Frozen linear layers in torchao's int8.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help="adamw, adam or sgd.")] = "adamw",
    zero_stage: Annotated[int, typer.Option(help="ZeRO: 0 or 1.")] = 0,
    replicas: Annotated[int, typer.Option(help="Of each stage.")] = 1,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Compute blocks again in the backward pass.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the bytes into this file.")
    ] = None,
) -> None:
    """Predict the memory of each rank of a pipeline, above what imports and connections take.

    The model's layers run on tensors without numbers: it takes seconds, and no weights are needed.
    A model is counted as from_folder reads it, each rank its own stage.

    For example: wavemare plan memory gpt2 --stages 2 --sequence 1024
    """
    from wavemare.parallel.planner.chains import as_config
    from wavemare.parallel.planner.memory import MemorySettings, rank_memory
    from wavemare.parallel.planner.search import read_model

    check_writable("--json", json_file)
    given = {**locals()}
    settings = MemorySettings(**{k: given[k] for k in MemorySettings.__dataclass_fields__})
    values = dict(read_model(model))
    ranks = rank_memory(as_config(values), settings)
    typer.echo(_table(ranks))
    if json_file is not None:
        found = [{name: getattr(rank, name) for name in ("layers", *_COLUMNS)} for rank in ranks]
        atomic_write_text(json_file, json.dumps(found, indent=1) + "\n")


def _table(ranks: list[Any]) -> str:
    lines = [f"MB by rank    layers   {''.join(f'{name:>13}' for name in _COLUMNS)}"]
    for number, rank in enumerate(ranks):
        layers = ",".join(f"{first}-{end - 1}" for first, end in rank.layers)
        sizes = "".join(f"{getattr(rank, name) / _MB:13.0f}" for name in _COLUMNS)
        lines.append(f"{number:<14}{layers:<9}{sizes}")
    return "\n".join(lines)
