# SPDX-License-Identifier: Apache-2.0
"""Replicas that are far apart train alone, and exchange their weights every 32 steps.

Ranks of one job:                wavemare launch --nproc 2 recipes/examples/replicas.py
Jobs that come and go:           wavemare launch --replicas 4 --nproc 1 recipes/examples/replicas.py
One job on each of 4 machines:   docs/elastic.md
"""

import os
import sys
import sysconfig
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

import wavemare
from wavemare.data.loader import ResumableLoader

OUTPUT = "build/replicas"  # checkpoints, with a folder for each replica
# Jobs that come and go meet at a lighthouse. Without one, each rank of this job is a replica.
KIND = {"elastic": {"replicas": 4}} if "TORCHFT_LIGHTHOUSE" in os.environ else {"replica": "rank"}
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "steps_per_print": None,
    "wavemare": {"local_steps": {"mode": "diloco", "every": 32, **KIND}},
}


def main(steps: int) -> None:
    """Train a tiny GPT-2 on Python's standard library, byte by byte, and save it."""
    set_seed(1)
    config = GPT2Config(
        vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2, eos_token_id=None
    )
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray().join(map(Path.read_bytes, files)), dtype=torch.uint8)
    samples = [{"input_ids": row, "labels": row} for row in text.long().split(64)[:-1]]
    engine, *_ = wavemare.initialize(model=GPT2LMHeadModel(config), config=CONFIG)
    loader = ResumableLoader.of(engine, samples, seed=1)
    if os.path.exists(OUTPUT):  # needed if all replicas were gone; else a living one's state counts
        engine.load_checkpoint(OUTPUT)
    loader.consumed_samples = engine.global_samples
    loader.consumed_samples += engine.join_replicas()  # the samples that the others are ahead
    while engine.global_steps < steps:  # one that comes back goes on at the others' step
        loss = engine.train_batch(loader)
        step, found = engine.global_steps, engine.step_metrics()
        if step % 32 == 0 and engine.global_rank == 0:
            loss = found.get("replica_loss", loss)  # of all replicas, since the exchange before
            print(f"step {step}: loss {loss:.3f}, replicas {found.get('replicas')}", flush=True)
        if step % 320 == 0:
            engine.save_checkpoint(OUTPUT)
    engine.synchronize()
    wavemare.save_pretrained(engine, f"{OUTPUT}/model_{engine.replica}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 96)
