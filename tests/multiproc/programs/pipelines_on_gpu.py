# SPDX-License-Identifier: Apache-2.0
"""Train a GPT of 124 million weights on two stages by several schedules, on GPUs.

Usage: pipelines_on_gpu.py FOLDER SCHEDULE...; each rank leaves the losses by schedule.
"""

import sys
from itertools import cycle

import torch
from common import QUIET, build_gpt2, configuration, leave

import wavemare

LENGTH, MICRO_BATCHES, STEPS, VOCABULARY = 512, 4, 5, 50_304
SIZES = {"n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": LENGTH}


def start(schedule):
    untied = {"tie_word_embeddings": False, "vocab_size": VOCABULARY, "use_cache": False}
    ours = {"pipeline": {"stages": 2, "schedule": schedule, "inputs": ["input_ids"]}}
    changes = {"gradient_accumulation_steps": MICRO_BATCHES, "bf16": {"enabled": True}}
    config = configuration(0, wavemare=ours, **changes)
    config["optimizer"]["params"]["lr"] = 1e-3
    return wavemare.initialize(model=build_gpt2(**SIZES, **QUIET, **untied), config=config)[0]


def batches():
    """Give the same micro-batches in each step."""
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(0, VOCABULARY, (MICRO_BATCHES, 2, LENGTH), generator=generator)
    return cycle({"input_ids": tokens, "labels": tokens} for tokens in texts)


def train(schedule):
    engine, data = start(schedule), batches()
    losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
    engine.destroy()
    return losses


if __name__ == "__main__":
    wavemare.init_distributed()
    leave({schedule: train(schedule) for schedule in sys.argv[2:]})
