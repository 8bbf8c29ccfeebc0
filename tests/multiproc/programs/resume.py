# SPDX-License-Identifier: Apache-2.0
"""Train with a checkpoint half-way, or resume from it for the second half; leave the losses.

Arguments: result folder, checkpoint folder, ``whole`` or ``resumed``, steps of a half, then cases.
"""

import sys
from itertools import islice
from pathlib import Path

import torch
from common import ACCUMULATION, build_gpt2, configuration, leave, token_batches, weights_digest

import wavemare

STEPS = int(sys.argv[4])


def train(case, folder, resumed):
    pipeline = case in ("pipeline", "asynchronous")
    rank = torch.distributed.get_rank()
    section = {"pipeline": {"stages": 2, "inputs": ["input_ids"]}} if pipeline else {}
    if case == "asynchronous":
        settings = {"discrepancy_correction": {"mode": "predict"}, "error_feedback": True}
        settings |= {"drain_interval": STEPS}
        section["pipeline"] |= {"schedule": "pipemare", "pipemare": settings}
    config = configuration(1 if pipeline else int(case), wavemare=section)
    engine, *_ = wavemare.initialize(model=build_gpt2(), config=config)
    torch.manual_seed(1000 + rank)
    data = token_batches(0 if pipeline else rank)
    batches = ({"input_ids": batch, "labels": batch} for batch in data)
    losses = []
    if resumed:
        path, state = engine.load_checkpoint(str(folder))
        assert path is not None
        assert state["position"] == STEPS
        next(islice(batches, STEPS * ACCUMULATION - 1, None))
    else:
        losses += [engine.train_batch(batches).item() for _ in range(STEPS)]
        engine.save_checkpoint(str(folder), client_state={"position": STEPS})
    losses += [engine.train_batch(batches).item() for _ in range(STEPS)]
    return {"losses": losses, "weights": weights_digest(engine), "steps": engine.global_steps}


if __name__ == "__main__":
    wavemare.init_distributed()
    leave(
        {
            case: train(case, Path(sys.argv[2]) / case, sys.argv[3] == "resumed")
            for case in sys.argv[5:]
        }
    )
