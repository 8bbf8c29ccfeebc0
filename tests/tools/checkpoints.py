# SPDX-License-Identifier: Apache-2.0
"""Measure how long a killed job is away, and how fast a checkpoint loads at other sizes.

::

    python tests/tools/checkpoints.py restart --folder /tmp/made --json restart.json
    torchrun --nproc-per-node 2 tests/tools/checkpoints.py load --folder /tmp/made --json load.json

Both save 1 GB: a GPT-2 of 9 layers and width 768 in fp32, with Adam and ZeRO 1. ``restart`` kills a
rank of ``wavemare train``, and takes the line that rank 0 prints after the first repeated step.
``load`` reads the files of a save by ZeRO 1 with one process, and then has all ranks load them by
ZeRO 3 and as two stages. Each prints a JSON object, and writes it into a file.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZES = {"n_layer": 9, "n_embd": 768, "n_head": 12, "n_positions": 64, "tie_word_embeddings": False}
VOCABULARY, INTERVAL, SAMPLES = 300, 5, 2
PARTS = "until this process started|of imports|until the engine was made|until the load"
PARTS += "|of the load|until the end of the step"


def train(folder: Path) -> list[str]:
    """Write a text and the model's configuration; return the command that trains it."""
    folder.mkdir(parents=True, exist_ok=True)
    text, model = folder / "text.txt", folder / "model.json"
    text.write_text("".join(f"line {n} of a text, and {n * n % 97}.\n" for n in range(20_000)))
    model.write_text(json.dumps({"model_type": "gpt2", **SIZES}))
    words = ["wavemare", "train", "gpt", "--nproc", "2", "--max-restarts", "1"]
    for change in (
        "wavemare.pipeline=null",
        "train_batch_size=null",
        f"train_micro_batch_size_per_gpu={SAMPLES}",
        "gradient_accumulation_steps=1",
        "zero_optimization.stage=1",
    ):
        words += ["--set", change]
    options = {"data": text, "model_config": model, "output": folder / "run"}
    options |= {"cache": folder / "cache", "sequence_length": 64, "vocab_size": VOCABULARY}
    options |= {"max_steps": 3 * INTERVAL - 1, "save_interval": INTERVAL, "eval_interval": 1000}
    options |= {"eval_samples": 4, "final_eval_samples": 4, "log_interval": 1}
    return words + [word for name, value in options.items() for word in (f"--{name}", str(value))]


def restart(folder: Path) -> dict[str, Any]:
    """Kill a rank after a checkpoint; return the parts of the time until the step after it."""
    import psutil

    shutil.rmtree(folder / "run", ignore_errors=True)
    command, log = train(folder), folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    metrics = folder / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count('"loss"') < INTERVAL + 2:
        if process.poll() is not None:
            raise SystemExit(log.read_text()[-4000:])
        time.sleep(0.05)
    state = sum(path.stat().st_size for path in (folder / "run" / "checkpoints").rglob("*.pt"))
    ranks = psutil.Process(process.pid).children(recursive=True)
    last = [p for p in ranks if p.environ().get("RANK") == "1"]
    last[0].send_signal(signal.SIGKILL)
    code, told = process.wait(), log.read_text()
    (line,) = re.findall(r"^.*restart: step .*$", told, re.MULTILINE) or [told[-4000:]]
    found = {words: float(s) for s, words in re.findall(rf"([\d.]+) s ({PARTS})", line)}
    beyond = sum(s for words, s in found.items() if words != "of imports")
    return {"code": code, "bytes": state, "line": line, "seconds": found, "beyond imports": beyond}


def build(zero: int, stages: int = 1) -> Any:
    """Return an engine."""
    import torch
    import transformers

    import wavemare

    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **SIZES)
    )
    section = {"stages": stages, "schedule": "1f1b", "inputs": ["input_ids"]}
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": zero},
        "steps_per_print": None,
        "wavemare": {"pipeline": section} if stages > 1 else {},
    }
    return wavemare.initialize(model=model, config=config)[0]


def read(folder: Path) -> float:
    """Return how long it takes to read the files into one buffer."""
    files = list(folder.rglob("*.pt"))
    buffer = memoryview(bytearray(max(path.stat().st_size for path in files)))
    started = time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started


def load(folder: Path, rounds: int) -> dict[str, Any]:
    """Load a checkpoint at its own sizes and at others; return medians, and those of reading."""
    import torch
    from torch import distributed as dist

    import wavemare

    wavemare.init_distributed()
    saved, first = folder / "saved", dist.get_rank() == 0
    if first:
        shutil.rmtree(saved, ignore_errors=True)
    dist.barrier()
    engine = build(1)
    tokens = torch.randint(VOCABULARY, (SAMPLES, 64))
    rows = {"input_ids": tokens, "labels": tokens}
    engine.train_batch(iter([rows, rows]))
    engine.save_checkpoint(str(saved), "tag")
    engine.destroy()
    size = sum(path.stat().st_size for path in saved.rglob("*.pt"))
    result: dict[str, Any] = {"bytes": size, "seconds": {}}
    for name, zero, stages in (("ZeRO 1", 1, 1), ("ZeRO 3", 3, 1), ("two stages", 0, 2)):
        engine = build(zero, stages)
        loads: list[float] = []
        reads: list[float] = []
        for _ in range(rounds):
            dist.barrier()
            if first:
                reads.append(read(saved))
            dist.barrier()
            started = time.perf_counter()
            engine.load_checkpoint(str(saved))
            dist.barrier()
            loads.append(time.perf_counter() - started)
        engine.destroy()
        if first:
            of = {"load": loads, "read": reads}
            result["seconds"][name] = {
                key: {"median": median(each), "least": min(each), "most": max(each)}
                for key, each in of.items()
            }
    return result if first else {}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["restart", "load"])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found: dict[str, Any]
    if given.what == "restart":
        found = {"rounds": [restart(given.folder) for _ in range(given.rounds)]}
    else:
        found = load(given.folder, given.rounds)
    if found:
        text = json.dumps(found, indent=1)
        sys.stdout.write(text + "\n")
        if given.json is not None:
            given.json.write_text(text + "\n")
