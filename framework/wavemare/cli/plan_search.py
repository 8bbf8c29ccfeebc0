# SPDX-License-Identifier: Apache-2.0
"""``wavemare plan search``: the fastest layouts of a training job, by prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["search"]


def search(
    model: Annotated[
        str,
        typer.Option(
            help="A config.json of transformers, its folder, or gpt2, gpt2-medium, gpt2-large, "
            "gpt2-xl, bert-base or bert-large."
        ),
    ],
    cluster: Annotated[
        str,
        typer.Option(help="A cluster file, or cards by node such as 8xV100,2x4xP100."),
    ],
    global_batch: Annotated[int, typer.Option(help="Samples of one optimizer step.")],
    sequence: Annotated[int, typer.Option(help="Tokens of a sample.")],
    dtype: Annotated[str, typer.Option(help="fp32, fp16 or bf16.")] = "fp32",
    head: Annotated[
        str | None,
        typer.Option(help="Class of the model, for example BertForSequenceClassification."),
    ] = None,
    margin: Annotated[
        float, typer.Option(help="Part of each device's memory that stays free.")
    ] = 0.05,
    pipemare: Annotated[
        bool, typer.Option("--pipemare", help="Offer asynchronous pipelines, too.")
    ] = False,
    max_stages: Annotated[int, typer.Option(help="The longest pipeline.")] = 16,
    max_tensor_parallel: Annotated[int, typer.Option(help="The most ranks to a layer.")] = 8,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all plans into this file.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the best plan into this file.")] = None,
) -> None:
    """Find stages, splits, replicas, shares and memory settings for devices, like or unlike.

    The five best plans and the best one with equal parts are printed. The exit code is 2 where
    nothing fits.

    For example: wavemare plan search --model gpt2 --cluster 8xV100,8xP100 --global-batch 512
    --sequence 1024 --output plan.json
    """
    from wavemare.cli.output import check_writable
    from wavemare.files import atomic_write_text
    from wavemare.parallel.planner.api import plan

    check_writable("--json", json_file)
    check_writable("--output", output)
    found = plan(
        model,
        cluster,
        global_batch=global_batch,
        sequence_length=sequence,
        dtype=dtype,
        head=head,
        margin=margin,
        pipemare=pipemare,
        max_stages=max_stages,
        max_tensor_parallel=max_tensor_parallel,
    )
    typer.echo(str(found))
    if json_file is not None:
        atomic_write_text(json_file, found.to_json())
    if output is not None:
        atomic_write_text(output, found.best.to_json())
