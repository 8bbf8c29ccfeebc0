# SPDX-License-Identifier: Apache-2.0
"""Start and stop engines and loaders in one process of one rank; leave what it holds at times.

Arguments: result folder, number of engines, number of loaders.
"""

import gc
import multiprocessing
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import psutil
import torch
from common import LENGTH, MICRO, VOCABULARY, build_gpt2, configuration, leave

import wavemare
from wavemare.data.loader import ResumableLoader, evaluation_batches


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def held():
    """Return what the process has got from the system."""
    gc.collect()
    multiprocessing.active_children()  # reaps those that have ended
    targets = Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        targets[target.split(":")[0] if target.startswith(("socket:", "pipe:")) else target] += 1
    tasks = Path("/proc/self/task").iterdir()
    return {
        "threads": sorted(Counter((task / "comm").read_text().strip() for task in tasks).items()),
        "descriptors": sorted(targets.items()),
        "children": [child.name() for child in psutil.Process().children(recursive=True)],
        "environment": dict(os.environ),
    }


def engine_once(folder):
    section = {
        "checkpoint": {"background": True},
        "watchdog": {"timeout_s": 60.0, "folder": str(folder / "watchdog")},
    }
    config = configuration(1, wavemare=section)
    engine, _, loader, _ = wavemare.initialize(
        model=build_gpt2(), config=config, training_data=Texts()
    )
    assert len(loader) == len(Texts()) // MICRO
    engine.train_batch(iter(loader))
    engine.save_checkpoint(str(folder / "checkpoints"))
    engine.destroy()
    assert (folder / "checkpoints" / "latest").exists()
    shutil.rmtree(folder / "checkpoints")


def loader_once(seed):
    stream = ResumableLoader(
        Texts(), micro_batch_size=MICRO, data_rank=0, data_world_size=1, seed=seed
    )
    for batches in (stream, iter(evaluation_batches(Texts(), MICRO))):
        for _ in range(2):
            next(batches)


def main(folder, engines, loaders):
    early = engines // 4
    for _ in range(early):
        engine_once(folder)
    loader_once(0)
    found = [held()]
    for _ in range(engines - early):
        engine_once(folder)
    found.append(held())
    for seed in range(loaders):
        loader_once(seed)
    found.append(held())
    return {"early": found[0], "engines": found[1], "loaders": found[2]}


if __name__ == "__main__":
    # The collector finds a loader's iterator with the queues by which its workers would be told to
    # end: each is then waited for so long, and terminated.
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2
    wavemare.init_distributed()
    leave(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
