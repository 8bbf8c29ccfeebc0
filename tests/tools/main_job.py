# SPDX-License-Identifier: Apache-2.0
"""Compare the layouts of the GPT recipe in one process group: ZeRO 1, PipeMare and 1F1B.

    torchrun --nproc-per-node 2 tests/tools/main_job.py --vocabulary 4096

The systems take turns, some steps each, on random tokens; ratios are medians of rounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from transformers import AutoConfig, AutoModelForCausalLM

import wavemare

RECIPE = Path(__file__).parents[2] / "recipes" / "gpt"
LENGTH, MICRO = 128, 4
SYSTEMS = {"zero": None, "pipemare": {"pipemare": {"warmup_steps": 2}}, "1f1b": {}}


def configuration(name: str, changes: dict[str, Any] | None) -> dict[str, Any]:
    config = json.loads((RECIPE / "pretrain.json").read_text())
    config["scheduler"]["params"] |= {"total_num_steps": 1000, "warmup_num_steps": 20}
    pipeline = config["wavemare"].pop("pipeline")
    del pipeline["pipemare"]
    if changes is not None:
        config["wavemare"]["pipeline"] = {**pipeline, "schedule": name, **changes}
    return copy.deepcopy(config)


def build(name: str, changes: dict[str, Any] | None, vocabulary: int) -> tuple[Any, Any]:
    torch.manual_seed(1)
    shape = json.loads((RECIPE / "model.json").read_text())
    config = AutoConfig.for_model(**shape, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0)
    groups.mpu = None
    model = AutoModelForCausalLM.from_config(config)
    engine, *_ = wavemare.initialize(model=model, config=configuration(name, changes))
    draw = torch.Generator().manual_seed(engine.data_rank)

    def batches() -> Any:
        while True:
            tokens = torch.randint(0, vocabulary, (MICRO, LENGTH), generator=draw)
            yield {"input_ids": tokens, "labels": tokens}

    return engine, batches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=6, help="of each system per round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    systems = {name: build(name, each, args.vocabulary) for name, each in SYSTEMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(args.rounds + 2):
        for name, (engine, data) in systems.items():
            torch.distributed.barrier()
            started = time.perf_counter()
            for _ in range(args.steps):
                engine.train_batch(data)
            engine.synchronize()
            torch.distributed.barrier()
            seconds[name].append((time.perf_counter() - started) / args.steps)
    if torch.distributed.get_rank() == 0:
        for name, each in seconds.items():
            timed = list(zip(seconds["zero"], each, strict=True))[2:]
            rate = median(zero / own for zero, own in timed)
            print(f"{name}: {1e3 * median(each[2:]):.0f} ms, {rate:.3f} of zero's tokens/s")


if __name__ == "__main__":
    main()
