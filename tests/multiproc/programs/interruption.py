# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks get SIGTERM while they train.

Arguments: result folder, ``engines`` and their cases, or ``asynchronous``.
"""

import os
import signal
import sys
from itertools import islice
from pathlib import Path

import torch
from common import (
    build_gpt2,
    configuration,
    leave,
    sine_batches,
    start_stages,
    token_batches,
    weights_digest,
)
from torch import distributed

import wavemare
from wavemare.engine import Interruption


def build(case):
    pipeline, rank = case == "pipeline", distributed.get_rank()
    section = {"pipeline": {"stages": 2, "inputs": ["input_ids"]}} if pipeline else {}
    config = configuration(1 if pipeline else int(case), wavemare=section)
    engine, *_ = wavemare.initialize(model=build_gpt2(), config=config)
    torch.manual_seed(1000 + rank)
    data = token_batches(0 if pipeline else rank)
    return engine, ({"input_ids": batch, "labels": batch} for batch in data)


def train(case, folder):
    """Train some steps, and again with a stop and a resumption in between."""
    steps, losses, parted = 9, [], []
    engine, batches = build(case)
    for _ in range(steps):
        losses.append(engine.train_batch(batches).item())
    whole = weights_digest(engine)

    engine, batches = build(case)
    stopped = None
    with Interruption() as interruption:
        for step in range(1, steps + 1):
            if step == 3 and distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            parted.append(engine.train_batch(batches).item())
            if interruption.stops_after(step):
                stopped = step
                engine.save_checkpoint(str(folder))
                break
    engine, _ = build(case)
    engine.load_checkpoint(str(folder))
    begun = engine.global_steps
    parted += [engine.train_batch(batches).item() for _ in range(begun, steps)]
    return {
        "stopped": stopped,
        "begun": begun,
        "losses": [losses, parted],
        "weights": [whole, weights_digest(engine)],
    }


def build_asynchronous(micro_batches):
    torch.manual_seed(7)
    stages = distributed.get_world_size()
    layers = [torch.nn.Linear(16, 16) for _ in range(2 * stages)]
    section = {"schedule": "pipemare"}
    return start_stages(layers, stages=stages, micro_batches=micro_batches, section=section)


def asynchronous(signalled, micro_batches):
    """Stop and resume an asynchronous pipeline, and train one that drains where it stopped."""
    rank, steps = distributed.get_rank(), 40
    lead = (distributed.get_world_size() - 1) // micro_batches
    folder, ahead = Path(sys.argv[1]) / str(signalled), 0
    engine, batches, losses = build_asynchronous(micro_batches), sine_batches(16), []
    begun = distributed.FileStore(f"{folder} begun", distributed.get_world_size())
    with Interruption(lead=lead) as interruption:
        for step in range(1, steps + 1):
            if rank == 0:
                begun.set("step", str(step))
            if step == 10 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
            losses.append(float(engine.train_batch(batches)))
            ahead = max(ahead, step - int(begun.get("step")))
            if interruption.stops_after(step):
                break
    engine.save_checkpoint(str(folder))
    stopped = engine.global_steps
    engine = build_asynchronous(micro_batches)
    engine.load_checkpoint(str(folder))
    batches = islice(sine_batches(16), stopped * micro_batches, None)
    losses += [float(engine.train_batch(batches)) for _ in range(stopped, steps)]

    whole, batches, expected = build_asynchronous(micro_batches), sine_batches(16), []
    for step in range(steps):
        if step == stopped:
            whole.drain()
        expected.append(float(whole.train_batch(batches)))
    return {
        "stopped": stopped,
        "ahead": ahead,
        "losses": [expected, losses],
        "weights": [weights_digest(whole), weights_digest(engine)],
    }


def main(mode, *cases):
    if mode == "engines":
        return {case: train(case, Path(sys.argv[1]) / case) for case in cases}
    return {"1": asynchronous(0, 1), "2": asynchronous(3, 2)}


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(main(*sys.argv[2:]))
