# SPDX-License-Identifier: Apache-2.0
"""A replica that comes and goes; each is a job of its own.

Arguments: result folder, settings as JSON. Writes a line of JSON for each step.
"""

import json
import os
import signal
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
from common import QUIET, build_gpt2, build_pipeline, configuration, weights_digest

import wavemare
from wavemare.data.loader import ResumableLoader

if find_spec("torchft"):
    from wavemare.engine.local_steps.quorum import ElasticLink

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}


class Rows:
    """Samples that are told apart by their first token."""

    def __len__(self):
        return 50

    def __getitem__(self, number):
        row = (torch.arange(8) * 7 + number) % 50
        return {"input_ids": row, "labels": row}


class Pairs(Rows):
    """Inputs and labels, for a pipeline of one's own."""

    def __getitem__(self, number):
        return (*super().__getitem__(number).values(),)


def start(given):
    torch.manual_seed(given.get("seed", 7))
    config = configuration(given.get("zero", 0), optimizer=ADAMW, gradient_clipping=0.0)
    config.pop("scheduler")
    local = {"mode": "diloco", "every": 4, **given["local"]}
    local |= given.get("unlike", {}).get(os.environ.get("WAVEMARE_REPLICA"), {})
    config["wavemare"] = {"local_steps": local, "guard": {"nonfinite": "off"}}
    config["wavemare"] |= given.get("section", {})
    config["wavemare"]["watchdog"] = given.get("watchdog", {})
    shape = given.get("shapes", {}).get(os.environ.get("WAVEMARE_REPLICA"), {})
    if given.get("own"):
        wavemare.init_distributed()  # DeepSpeed cuts the model by the ranks
        model = build_pipeline()
    else:
        model = build_gpt2(**QUIET, **shape)
    return wavemare.initialize(model=model, config=config)[0]


def die_in_exchange():
    """Let this process die in its next exchange, when its messages have begun."""
    send = ElasticLink.send

    def die(*given):
        send(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    ElasticLink.send = die


def main(folder, given):
    engine = start(given)
    loader = ResumableLoader.of(engine, Pairs() if given.get("own") else Rows(), seed=1)
    if given.get("load"):
        engine.load_checkpoint(str(folder))
        loader.consumed_samples = engine.global_samples
    ranks = engine.ranks
    name = str(engine.data_rank * ranks.model_world_size + ranks.model.index(ranks.rank))
    tried = folder / f"{name}.tried"
    attempt = len(tried.read_text()) if tried.exists() else 0
    tried.write_text("x" * (attempt + 1))
    loader.consumed_samples += engine.join_replicas()
    events = given.get("events", {}).get(str(engine.replica), {}) if not attempt else {}
    present = 0.0
    with open(folder / f"{name}.jsonl", "a", buffering=1) as file:
        while engine.global_steps < given["steps"]:
            event = events.get(str(engine.global_steps + 1))
            if event == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if event == "kill in the exchange":
                die_in_exchange()
            if event == "nan":
                next(engine.module.parameters()).data.fill_(float("nan"))
            loss = engine.train_batch(loader).item()
            present = engine.step_metrics().get("replicas", present)
            missing = 0 < present < engine.num_replicas
            time.sleep(given.get("patience", 0.0) if missing else given.get("sleep", 0.0))
            row = {"step": engine.global_steps, "loss": loss, "attempt": attempt}
            row |= {"at": loader.consumed_samples, "time": time.time(), **engine.step_metrics()}
            file.write(f"{json.dumps(row)}\n")
            if engine.global_steps == given.get("save"):
                engine.save_checkpoint(str(folder))
        if (late := given.get("late")) is not None:
            while len((folder / f"{late}.tried").read_text()) < 2:
                time.sleep(0.05)
            time.sleep(1)  # it is about to meet the others
        engine.synchronize()
        file.write(f"{json.dumps({'digest': weights_digest(engine)})}\n")
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
