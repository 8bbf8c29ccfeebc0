# SPDX-License-Identifier: Apache-2.0
"""How long a save stops training: written at once, and behind the steps that follow.

``torchrun --nproc-per-node 2 -m wavemare.bench.checkpoints FOLDER`` trains a GPT-2, saves it in
both ways and prints the seconds as JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

__all__ = ["measure_stalls"]


def measure_stalls(engine: Any, batches: Iterator[Any], folder: Path, saves: int) -> dict[str, Any]:
    """Train and save, and return seconds.

    Args:
        engine: Of this rank; every rank calls this.
        batches: Micro-batches of its training.
        folder: Where to; each checkpoint replaces the one before.
        saves: How many of each way.

    Returns:
        ``bytes`` of a checkpoint; seconds of a ``step``; for ``foreground`` and ``background`` the
        seconds of each ``stall`` (the call of ``save_checkpoint``), of the ``step`` after it, and
        until it was ``complete``; ``copy_bytes``, by which the process grew in the background.
    """
    result: dict[str, Any] = {"step": _seconds(lambda: engine.train_batch(batches), saves + 2)[2:]}
    for name in ("foreground", "background"):
        settings = {"background": name == "background"}
        engine.checkpoint_settings = engine.checkpoint_settings.model_copy(update=settings)
        stalls, steps, complete, grown = [], [], [], []
        for _ in range(saves):
            torch.distributed.barrier()
            before, start = psutil.Process().memory_info().rss, time.perf_counter()
            stalls += _seconds(lambda: engine.save_checkpoint(str(folder), "bench"), 1)
            grown.append(psutil.Process().memory_info().rss - before)
            steps += _seconds(lambda: engine.train_batch(batches), 1)
            engine.finish_saving()
            complete.append(time.perf_counter() - start)
        result[name] = {"stall": stalls, "step": steps, "complete": complete}
        result["copy_bytes"] = max(grown)
    files = (folder / "bench").rglob("*")
    return {**result, "bytes": sum(path.stat().st_size for path in files if path.is_file())}


def _seconds(action: Any, times: int) -> list[float]:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return found


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m wavemare.bench.checkpoints")
    parser.add_argument("folder", type=Path, help="a new folder on the disk to measure")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--zero", type=int, default=1, help="stage")
    parser.add_argument("--saves", type=int, default=5, help="of each way")
    options = parser.parse_args()
    if options.folder.exists():  # it is removed at the end
        parser.error(f"{options.folder} exists already: name a new folder")

    import wavemare
    from wavemare.bench.gpt import build_gpt

    wavemare.init_distributed()
    model = build_gpt(options)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": options.zero},
        "steps_per_print": None,
    }
    engine = wavemare.initialize(model=model, config=config)[0]
    ids = torch.randint(0, options.vocabulary, (1, options.sequence))
    batches = iter(lambda: {"input_ids": ids, "labels": ids}, None)
    found = measure_stalls(engine, batches, options.folder, options.saves)
    engine.destroy()
    if torch.distributed.get_rank() == 0:
        print(json.dumps(found))
        for name in ("foreground", "background"):
            middle = {key: statistics.median(values) for key, values in found[name].items()}
            print(name, ", ".join(f"{key} {value:.3f} s" for key, value in middle.items()))
        shutil.rmtree(options.folder)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main()
