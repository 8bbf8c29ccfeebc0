# SPDX-License-Identifier: Apache-2.0
"""A device of an emulated cluster: it runs its rank of one trial after the other.

``python -m benchmarks.layouts.device FOLDER`` waits there for jobs. Each trial is a process of its
own, forked from this one once all imports are done: a trial's ranks have another order, and begin
in a second.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any


def main() -> None:
    """Run this process's ranks of all trials of all jobs, in their order, until there is an end."""
    folder = Path(sys.argv[1])
    process = int(os.environ["RANK"])
    for name in ("deepspeed", "transformers", "wavemare", "wavemare.models"):
        __import__(name)
    for number in count():
        asked = folder / f"job-{number}.json"
        while not asked.exists():
            time.sleep(0.05)
        job = json.loads(asked.read_text(encoding="utf-8"))
        if process not in job["processes"] or not job["trials"]:
            return
        device = job["processes"].index(process)
        for place, trial in enumerate(job["trials"]):
            if device in trial["order"]:
                _run_forked(job, trial, trial["order"].index(device), folder, f"{number}-{place}")


def _run_forked(
    job: dict[str, Any], trial: dict[str, Any], rank: int, folder: Path, name: str
) -> None:
    child = os.fork()
    if child:
        _wait(child, job["timeout_s"])
        return
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(len(trial["order"])),
            "MASTER_ADDR": trial["meet"],
            "MASTER_PORT": str(trial["port"]),
        }
        found = _measure(job, trial, rank)
        if rank == 0:
            written = folder / f"trial-{name}.json"
            written.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
            written.with_suffix(".part").rename(written)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(child: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return
        time.sleep(0.01)


def _measure(job: dict[str, Any], trial: dict[str, Any], rank: int) -> dict[str, Any]:
    from wavemare.engine.launch.group import init_distributed
    from wavemare.observe import quiet_libraries

    quiet_libraries()
    init_distributed()
    quiet_libraries()
    return _probe(trial) if "layout" not in trial else _train(job, trial, rank)


def _probe(trial: dict[str, Any]) -> dict[str, Any]:
    """Return latency and rate of the links between pairs of ranks, by the median of their times."""
    from statistics import median

    import torch
    import torch.distributed as dist

    small, large, rounds = 1 << 10, 1 << 20, 7
    rank, found = dist.get_rank(), []
    for one, two in trial["pairs"]:
        times: dict[int, list[float]] = {small: [], large: []}
        dist.barrier()
        for size in (large, small, large) + (small, large) * rounds:
            message, answer = torch.zeros(size // 4), torch.zeros(1)
            started = time.perf_counter()
            if rank == one:
                dist.send(message, two)
                dist.recv(answer, two)
            elif rank == two:
                dist.recv(message, one)
                dist.send(answer, one)
            times[size].append(time.perf_counter() - started)
        least, most = (median(times[size][1:]) for size in (small, large))
        rate = (large - small) / max(most - least, 1e-6)
        got = torch.tensor([least / 2, rate], dtype=torch.float64)
        dist.broadcast(got, one)
        found.append(got.tolist())
    return {"links": found}


def _train(job: dict[str, Any], trial: dict[str, Any], rank: int) -> dict[str, Any]:
    """Return the seconds of the steps of a layout: of the slowest rank."""
    import torch
    import torch.distributed as dist

    import wavemare
    from benchmarks.device_like import SleepingOptimizer
    from wavemare.engine.launch.group import gather
    from wavemare.parallel.layout.layout import Layout

    torch.set_num_threads(1)
    layout = Layout.from_json(json.dumps(trial["layout"]))
    speed = job["speeds"][trial["order"][rank]]
    clock = _Clock()
    model = _sleeping_gpt(job, job["block_s"] / speed, clock)
    config = layout.configure(
        {
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "wavemare": {"watchdog": {"enabled": False}},
        }
    )
    engine = wavemare.initialize(model=model, config=config, optimizer=SleepingOptimizer)[0]
    batches, steps = _batches(job, layout, rank), []
    clock.runs = True
    for _ in range(job["warmups"] + job["rounds"]):
        dist.barrier()
        started = time.perf_counter()
        engine.train_batch(batches)
        steps.append(max(gather(time.perf_counter() - started)))
    engine.destroy()
    return {"rounds_s": steps[job["warmups"] :]}


class _Clock:
    """Whether passes sleep, which they do not while the model is converted."""

    runs = False


def _sleeping_gpt(job: dict[str, Any], block_s: float, clock: _Clock) -> Any:
    """Return a GPT-2 whose blocks sleep, in proportion to the samples, in place of computing.

    All weights and gradients are real.

    Args:
        job: Has the sizes.
        block_s: A forward pass of one sample.
        clock: Says when.
    """
    from types import SimpleNamespace

    from benchmarks.device_like import SleepingPass
    from benchmarks.ranks import build_gpt
    from benchmarks.request import Waits

    sizes: Any = SimpleNamespace(**job["model"])
    model = build_gpt(sizes)
    for block in model.transformer.h:
        weights = list(block.parameters())

        def forward(hidden: Any, *_: Any, own: Any = weights, **__: Any) -> Any:
            spent = (block_s * len(hidden) + job["overhead_s"] / 3) * clock.runs
            return SleepingPass.apply(hidden, Waits(spent, spent, spent), 1e-3, *own)

        block.forward = forward
    return model


def _batches(job: dict[str, Any], layout: Any, rank: int) -> Iterator[dict[str, Any]]:
    import torch

    replica = rank // layout.tensor_parallel % layout.data_parallel
    before, own = sum(layout.shares[:replica]), layout.shares[replica]
    sizes = job["model"]
    for step in count():
        generator = torch.Generator().manual_seed(step)
        shape = (layout.micro_steps, sum(layout.shares), sizes["sequence"])
        for micro in torch.randint(0, sizes["vocabulary"], shape, generator=generator):
            part = micro[before : before + own]
            yield {"input_ids": part, "labels": part}


if __name__ == "__main__":
    main()
