# SPDX-License-Identifier: Apache-2.0
"""``wavemare layout``: where a job's stages, splits and replicas go, predicted without devices."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wavemare.files import atomic_write_text, check_writable

app = typer.Typer(no_args_is_help=True, help="Find layouts of jobs on described devices.")


@app.command()
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
    dtype: Annotated[
        str | None,
        typer.Option(help="fp32, fp16 or bf16; of the configuration if omitted, or else fp32."),
    ] = None,
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
    leave_out: Annotated[
        bool, typer.Option(help="Offer layouts that leave devices out, too.")
    ] = True,
    max_stages: Annotated[int, typer.Option(help="The longest pipeline.")] = 16,
    max_tensor_parallel: Annotated[int, typer.Option(help="The most ranks per layer.")] = 8,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all layouts into this file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the best layout into this file.")
    ] = None,
) -> None:
    """Find stages, splits, replicas, shares and memory settings for the given devices.

    The best layouts, at most five, and the best one with equal parts are printed. The exit code
    is 2 where nothing fits.

    For example: wavemare layout search --model gpt2 --cluster 8xV100,8xP100 --global-batch 512
    --sequence 1024 --output layout.json
    """
    from wavemare.parallel.planner import find_layouts

    check_writable("--json", json_file)
    check_writable("--output", output)
    found = find_layouts(
        model,
        cluster,
        global_batch=global_batch,
        sequence_length=sequence,
        dtype=dtype,
        head=head,
        margin=margin,
        pipemare=pipemare,
        leave_out=leave_out,
        max_stages=max_stages,
        max_tensor_parallel=max_tensor_parallel,
    )
    typer.echo(str(found))
    if json_file is not None:
        atomic_write_text(json_file, found.to_json())
    if output is not None:
        atomic_write_text(output, found.best.to_json())


@app.command()
def local_steps(
    model: Annotated[str, typer.Option(help="See layout search.")],
    replicas: Annotated[int, typer.Option(help="Hosts, or ranks, that step alone.")],
    mbit: Annotated[float, typer.Option(help="Mbit/s of a replica in each direction.")],
    step_seconds: Annotated[
        float, typer.Option(help="Computation of a step, with reductions inside a replica.")
    ],
    ranks: Annotated[int, typer.Option(help="Ranks of a replica.")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")] = 1,
    dtype: Annotated[str, typer.Option(help="Gradients: fp32 or bf16.")] = "fp32",
    zero: Annotated[
        bool, typer.Option(help="Ordinary training is ZeRO 1 or 2, which also gathers weights.")
    ] = True,
    failures_per_day: Annotated[
        float, typer.Option(help="How often one of all replicas is lost, which ends the job.")
    ] = 0.0,
    restart_seconds: Annotated[
        float, typer.Option(help="From a failure to the first repeated step.")
    ] = 60.0,
    checkpoint_seconds: Annotated[
        float, typer.Option(help="Training between two checkpoints.")
    ] = 600.0,
) -> None:
    """Say whether local steps pay over a slow link, and how often replicas should synchronize.

    For example: wavemare layout local-steps --model gpt2 --replicas 4 --mbit 200 --step-seconds 1
    """
    from wavemare.parallel.planner.local_steps import Failures, SlowLink, advise
    from wavemare.parallel.planner.model import model_costs
    from wavemare.parallel.planner.search import read_model

    failures = Failures(
        per_day=failures_per_day, restart_s=restart_seconds, checkpoint_s=checkpoint_seconds
    )
    link = SlowLink(
        parameters=model_costs(read_model(model), 1, dtype=dtype).parameters,
        replicas=replicas,
        ranks=ranks,
        mbit=mbit,
        step_s=step_seconds,
        micro_batches=micro_batches,
        bits=32 if dtype == "fp32" else 16,
        zero=zero,
    )
    advice = advise(link)
    typer.echo(str(advice))
    if failures.per_day:
        typer.echo(failures.told(replicas, advice.period_s))
