# SPDX-License-Identifier: Apache-2.0
"""Train with stages on any ranks, and go on from their checkpoints.

Usage: placements.py FOLDER ACTION...; each rank leaves the results by action.
"""

import hashlib
import os
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from chunked_engine import weights
from common import configuration, leave, own_groups, refusal, sine_batches, start_stages
from plan_engine import CHANGES, MODELS, batches, go_on, start

import wavemare
import wavemare.universal
from wavemare.engine.pipe.chunks import ChunkedPipelineModule

TURNED = """
plan schedule=turned stages=3 micro_batches=4 steps=1 send_slots=0 homes=1,0,1
0: 1F0 1F1 1B0 1F2 1I1 1F3 1W1 1B2 1B3
1: 0F0 0F1 2F0 2B0 0F2 2F1 2I1 0I0 0F3 2F2 2I2 2W1 0W0 0B1 2W2 2F3 2B3 0B2 0B3
"""

UNEVEN = """
plan schedule=uneven stages=3 micro_batches=4 steps=1 send_slots=0 homes=0,1,1
0: 0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1: 1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1 1F2 2F2 2B2 1B2 1F3 2F3 2B3 1B3
"""


def contents(folder):
    files = sorted(file for file in Path(folder).rglob("*") if file.is_file())
    return [(str(file), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]


def go_on_from_universal(model, saves, *loads):
    """Go on with other schedules, or with stock DeepSpeed's engine of one stage."""
    case, folder = f"{model}/universal", Path(model, saves)
    engine, data = start(case, saves), batches(0)
    go_on(engine, data)
    engine.save_checkpoint(folder, "first")
    found = {"whole": go_on(engine, data)["losses"]}
    if torch.distributed.get_rank() == 0:
        folders = ["--input_folder", f"{folder}/first", "--output_folder", f"{folder}/second"]
        alone = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        with mock.patch.object(sys, "argv", ["universal", *folders, *alone]):
            wavemare.universal.main()
        Path(folder, "latest_universal").write_text("second")
    torch.distributed.barrier()
    before = contents(folder)
    for schedule in loads:
        data = islice(batches(0), 8, None)
        if schedule == "stock":
            module = wavemare.to_pipeline(MODELS[model](), num_stages=1)
            config = configuration(0, gradient_accumulation_steps=4, **CHANGES["universal"])
            engine = deepspeed.initialize(model=module, config=config)[0]
            data = map(module.split_batch, data)
        else:
            engine = start(case, schedule)
        engine.load_checkpoint(folder)
        found[schedule] = [float(engine.train_batch(data)) for _ in range(2)]
    return found | {"damaged": before != contents(folder)}


def universal():
    Path("turned.txt").write_text(TURNED)
    torch.distributed.barrier()
    return {
        "of a V": go_on_from_universal("gpt2-quiet", "zbv", "1f1b", "stock"),
        "of 1F1B": go_on_from_universal("gpt2-quiet-untied", "1f1b", "zbv"),
        "tied on rank 1": go_on_from_universal("gpt2-quiet", "file:turned.txt", "1f1b"),
    }


def train(engine):
    data = batches(engine.data_rank)
    losses = [float(engine.train_batch(data)) for _ in range(3)]
    return {
        "own": list(engine.module.own_stages),
        "losses": losses,
        "evaluation": float(engine.eval_batch(batches(9), num_micro_batches=2)),
        "weights": weights(engine),
    }


def four(case, stages):
    """Four ranks: four with several stages each, or two replicas of two."""
    schedules = ("1f1b", "interleaved", "zbv", "auto")
    return {schedule: train(start(case, schedule, stages=stages)) for schedule in schedules}


def uneven():
    """Hand-made stages, of which one rank has more; a weight is tied over both ranks."""
    Path("uneven.txt").write_text(UNEVEN)
    torch.distributed.barrier()
    case, engines = "gpt2-quiet/fp32", [start("gpt2-quiet/fp32", "file:uneven.txt")]
    data = batches(0)
    before = go_on(engines[0], data)["losses"]
    engines[0].save_checkpoint("uneven")
    engines.append(start(case, "file:uneven.txt"))
    engines[1].load_checkpoint("uneven")
    whole, resumed = (go_on(engine, islice(batches(0), 8, None)) for engine in engines)
    expected = go_on(start(case), batches(0), 4)["losses"]
    losses = [*before, *whole["losses"]]
    return {"resumed": resumed == whole, "losses": losses, "expected": expected}


def own_layers():
    """A model of one's own: how it is cut, and trains."""
    torch.manual_seed(7)
    sizes = [(16, 64), (64, 16), *[(16, 16)] * 8]
    layers = [torch.nn.Linear(*size) for size in sizes]
    make = partial(ChunkedPipelineModule, layers, num_stages=2, homes=(0, 1, 1, 0))
    methods = ("parameters", "type:Linear", "uniform", (0, 1, 2, 5, 10))
    cuts = [make(partition_method=method).parts for method in methods]
    return {"cuts": cuts, "refused": refusal(lambda: make(partition_method="profile"))}


def alone():
    """A rank that has all stages hands over all activations."""

    def engine(schedule, homes, **options):
        torch.manual_seed(7)
        layers = [torch.nn.Linear(8, 8) for _ in range(4)]
        kind, section = partial(ChunkedPipelineModule, homes=homes), {"schedule": schedule}
        return start_stages(
            layers, stages=1, micro_batches=4, section=section, kind=kind, **options
        )

    def losses(schedule, homes):
        trained, data = engine(schedule, homes), sine_batches(8)
        return [float(trained.train_batch(data)) for _ in range(3)]

    def pair(outputs, labels):
        return (outputs - labels).square().mean(), outputs.sum()

    found = {schedule: losses(schedule, (0, 0)) for schedule in ("interleaved", "zbv", "auto")}
    found |= {schedule: losses(schedule, (0,)) for schedule in ("1f1b", "zb-h1")}
    refuses = engine("zbv", (0, 0), loss_fn=pair)
    return {"losses": found, "refused": refusal(lambda: refuses.train_batch(sine_batches(8)))}


if __name__ == "__main__":
    wavemare.init_distributed()
    os.chdir(sys.argv[1])
    actions = {
        "universal": universal,
        "four": partial(four, "gpt2-deep/fp32", 4),
        "replicas": partial(four, "gpt2-quiet-untied/universal", 2),
        "uneven": uneven,
        "own layers": own_layers,
        "alone": alone,
    }
    results = {}
    for name in sys.argv[2:]:
        with own_groups():
            results[name] = actions[name]()
    leave(results)
