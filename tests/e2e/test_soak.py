# SPDX-License-Identifier: Apache-2.0
"""Training while ranks are paused and killed: the losses of an undisturbed run, and no growth.

WAVEMARE_SOAK_MINUTES is the length of each system's run: 1 by default.
"""

import json
import os
import signal
import statistics
import time
from contextlib import suppress

import psutil
import pytest

MINUTES = float(os.environ.get("WAVEMARE_SOAK_MINUTES", "1"))
LONG = MINUTES >= 30
GROWTH = 0.005 if LONG else 0.1  # short runs have hardly warmed up
WARMUP = 60 if LONG else 2  # times 20 steps; the heap reaches its size after some 1,200
PAUSES = 400 if LONG else 10
"""Between two deaths: a rank must live for some time to be watched."""
COMPARED = 120
MODEL = {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 2, "n_positions": 64}
MODEL |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
PIPELINE = {"schedule": "pipemare", "stages": 2, "inputs": ["input_ids"]}
LOCAL_STEPS = {"mode": "diloco", "replica": 2, "every": 8, "fragments": 2, "overlap": 2}
SYSTEMS = {
    "pipemare": {"pipeline": PIPELINE, "sparse_collective": {"mode": "auto"}},
    "local-steps": {"local_steps": LOCAL_STEPS},
}


def configuration(system):
    section = {"watchdog": {"timeout_s": 30}, "checkpoint": {"keep": 2, "background": True}}
    return {
        "train_batch_size": 8,  # two micro-batches for each of two replicas, or one for each rank
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": None,
        "wavemare": {**section, **SYSTEMS[system]},
    }


def options(output, steps):
    model = ["--model_config", "model.json", "--sequence_length", 64, "--vocab_size", 512]
    intervals = ["--save_interval", 20, "--eval_interval", 10**6, "--log_interval", 1]
    start = ["--nproc", 4, "--max-restarts", 1000, "--config", "config.json"]
    return [*start, *model, *intervals, "--output", output, "--max_steps", steps]


def losses(run, newest_bytes=2**40):
    """Return the losses that the newest bytes of the log hold, by step."""
    found = {}
    with suppress(FileNotFoundError), (run / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - newest_bytes))
        for line in file:
            with suppress(ValueError, KeyError, TypeError):  # a part of a line
                values = json.loads(line)
                found[values["step"]] = values["loss"]
    return found


def newest(run):
    """Return the newest step."""
    return max(losses(run, 4096), default=0)


def ranks(started):
    """Return the processes that train, by rank."""
    found = {}
    for process in psutil.Process(started.process.pid).children(recursive=True):
        with suppress(psutil.Error):
            if "--deepspeed_config" in process.cmdline() and "RANK" in process.environ():
                found[process.environ()["RANK"]] = process  # a launcher comes before its ranks
    return [found[rank] for rank in sorted(found)]


def sizes(processes):
    """Return the bytes, open files and threads of some processes."""
    with suppress(psutil.Error):
        memory = sum(process.memory_full_info().uss for process in processes)
        return memory, sum(p.num_fds() for p in processes), sum(p.num_threads() for p in processes)


def growth(samples):
    """Return by how much the last third of the samples exceeds the first, relatively."""
    third = len(samples) // 3
    columns = list(zip(*samples, strict=True))
    return [statistics.median(c[-third:]) / statistics.median(c[:third]) - 1 for c in columns]


@pytest.mark.nightly
@pytest.mark.world_size(4)
@pytest.mark.timeout(1800 + 120 * MINUTES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_training_survives_pauses_and_deaths(start, tmp_path, system):
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "config.json").write_text(json.dumps(configuration(system)))
    run = tmp_path / "run"
    started = start("wavemare", "train", "gpt", *options(run, 10**6))

    def train(steps):
        wanted = newest(run) + steps
        started.wait_until(lambda: newest(run) >= wanted)

    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        for _ in range(WARMUP):
            train(20)
        samples = []
        for _ in range(PAUSES):
            first, *_ = trained = ranks(started)
            samples.append(sizes(trained))
            first.suspend()
            time.sleep(1)
            first.resume()
            train(5)
        print(system, newest(run), samples[0], samples[-1], growth(samples))
        assert max(growth(samples)) < GROWTH
        ranks(started)[-1].kill()
    train(40)
    started.process.send_signal(signal.SIGTERM)
    assert started.end(300).code == 0, started.output[-4000:]
    found = losses(run)
    assert found[max(found)] < found[1]
    reference = tmp_path / "reference"
    ended = start("wavemare", "train", "gpt", *options(reference, COMPARED)).end()
    assert ended.code == 0, ended.output[-4000:]
    expected = losses(reference)
    assert len(expected) == COMPARED
    assert {step: found[step] for step in expected} == expected
