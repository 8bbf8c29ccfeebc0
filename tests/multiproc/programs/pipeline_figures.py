# SPDX-License-Identifier: Apache-2.0
"""What pipelines report: the sample counts of the CSV monitor, and the times of messages.

Arguments: result folder. The data of PipeMare end within the last step.
"""

import csv
import sys
from itertools import islice
from pathlib import Path

import torch
from common import leave, sine_batches, start_stages
from deepspeed.runtime.pipe import engine as stock

import wavemare

STEPS, MICRO_BATCHES = 3, 4
TIMERS = {
    "batch": stock.BATCH_INPUT_TIMER,
    "send_output": stock.PIPE_SEND_OUTPUT_TIMER,
    "send_grad": stock.PIPE_SEND_GRAD_TIMER,
    "receive_input": stock.PIPE_RECV_INPUT_TIMER,
    "receive_grad": stock.PIPE_RECV_GRAD_TIMER,
}


def run(folder, schedule):
    torch.manual_seed(0)
    engine = start_stages(
        [torch.nn.Linear(4, 4) for _ in range(4)],
        section={"schedule": schedule},
        micro_batches=MICRO_BATCHES,
        csv_monitor={"enabled": True, "output_path": str(folder), "job_name": schedule},
        wall_clock_breakdown=True,
        steps_per_print=100,
    )
    short = 2 if schedule == "pipemare" else 0
    data = islice(sine_batches(4), STEPS * MICRO_BATCHES - short)
    for _ in range(STEPS):
        engine.train_batch(data)
    times = {name: engine.timers(timer).elapsed(reset=False) for name, timer in TIMERS.items()}
    engine.destroy()
    counts = {}
    for file in sorted((folder / schedule).glob("*.csv")):
        with file.open() as lines:
            counts[file.stem] = [int(row[0]) for row in list(csv.reader(lines))[1:]]
    return {"times": times, "counts": counts}


if __name__ == "__main__":
    wavemare.init_distributed()
    folder = Path(sys.argv[1])
    leave({schedule: run(folder, schedule) for schedule in ("1f1b", "zb-h1", "pipemare")})
