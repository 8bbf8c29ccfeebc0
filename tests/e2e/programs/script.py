# SPDX-License-Identifier: Apache-2.0
"""A script as a user writes it: it trains a line, and then may come to one of several ends.

Usage: script.py FOLDER [END], END being one of those below, which befalls the last rank.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

import wavemare

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
}
STEPS = 3


def come_to(end):
    """End this process in a bad way."""
    if end == "raise":
        raise ValueError("this rank's own fault")
    if end == "exit":
        sys.exit(3)
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


options = [word for word in sys.argv[1:] if not word.startswith("--local_rank")]
folder, end = Path(options[0]), options[1] if len(options) > 1 else ""
torch.manual_seed(7)
model = torch.nn.Linear(3, 1)
engine, *_ = wavemare.initialize(model=model, config=CONFIG)
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
inputs = torch.arange(12.0).view(4, 3) / (rank + 1)
losses = []
for _ in range(STEPS):
    loss = engine(inputs).square().mean()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
found = {"losses": losses, "host": os.uname().nodename, **{n: os.environ[n] for n in names}}
(folder / f"rank_{rank}.json").write_text(json.dumps(found))
(folder / f"rank_{rank}.pid").write_text(str(os.getpid()))
if rank == size - 1:
    come_to(end)
if end:
    while end == "wait":
        time.sleep(0.1)
    torch.distributed.all_reduce(torch.ones(1))  # waits for the last rank, which is not to come
torch.distributed.destroy_process_group()
