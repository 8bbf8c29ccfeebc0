# SPDX-License-Identifier: Apache-2.0
"""Train with stages on any ranks, and go on from their checkpoints.

Usage: placements.py FOLDER ACTION; each rank leaves the results.
"""

import hashlib
import os
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import torch
from common import configuration, leave
from plan_engine import CHANGES, MODELS, batches, go_on, start

import wavemare
import wavemare.universal

TURNED = """
plan schedule=turned stages=3 micro_batches=4 steps=1 send_slots=0 homes=1,0,1
0: 1F0 1F1 1B0 1F2 1I1 1F3 1W1 1B2 1B3
1: 0F0 0F1 2F0 2B0 0F2 2F1 2I1 0I0 0F3 2F2 2I2 2W1 0W0 0B1 2W2 2F3 2B3 0B2 0B3
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
        data = batches(0)
        if schedule == "stock":
            module = wavemare.to_pipeline(MODELS[model](), num_stages=1)
            config = configuration(0, gradient_accumulation_steps=4, **CHANGES["universal"])
            engine = deepspeed.initialize(model=module, config=config)[0]
            data = map(module.split_batch, data)
        else:
            engine = start(case, schedule)
        for _ in range(8):
            next(data)
        engine.load_checkpoint(folder)
        found[schedule] = [float(engine.train_batch(data)) for _ in range(2)]
    return found | {"damaged": before != contents(folder)}


def universal():
    Path("turned.txt").write_text(TURNED)
    torch.distributed.barrier()
    return {
        "of a V": go_on_from_universal("gpt2-quiet", "zbv", "1f1b", "interleaved", "stock"),
        "of 1F1B": go_on_from_universal("gpt2-quiet-untied", "1f1b", "zbv"),
        "tied on rank 1": go_on_from_universal("gpt2-quiet", "file:turned.txt", "1f1b"),
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    os.chdir(sys.argv[1])
    leave({"universal": universal}[sys.argv[2]]())
