# SPDX-License-Identifier: Apache-2.0
"""Trains by the Trainer and by `wavemare.initialize`, each with a run folder."""

import sys
from pathlib import Path

import transformers
from common import configuration, leave, token_batches
from hf_common import Rows, arguments, json_file, losses, plain_model

import wavemare
import wavemare.hf
from wavemare.observe import Recording

PIPELINE = {"pipeline": {"stages": 2, "schedule": "pipemare"}}
STEPS, TOKENS = 13, 64  # 2 micro-batches of 2 rows of 16
ROOT = Path(sys.argv[1])


def by_trainer(name, trainer_class, section):
    changes = {
        "max_steps": STEPS,
        "logging_steps": 2,
        "include_num_input_tokens_seen": "all",
        "save_strategy": "steps",
        "save_steps": 12,
    }
    trainer = trainer_class(
        model=plain_model("gpt2"),
        args=arguments(name, json_file(0, section), **changes),
        train_dataset=Rows("gpt2", 32),
        eval_dataset=Rows("gpt2", 8, seed=1),
    )
    trainer.add_callback(wavemare.hf.RecordingCallback(trainer, ROOT / "runs" / name))
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    return {"losses": losses(trainer), "eval": evaluated}


def by_loop(name):
    config = {**configuration(0), "wavemare": PIPELINE}
    engine, *_ = wavemare.initialize(model=plain_model("gpt2"), config=config)
    batches = ({"input_ids": rows, "labels": rows} for rows in token_batches(0))
    folder, values = ROOT / "runs" / name, []
    with Recording(folder, engine, steps=STEPS, tokens=TOKENS, arguments={"lr": 1e-2}) as recording:
        for step in range(1, STEPS + 1):
            with recording.step(step):
                values.append(float(engine.train_batch(batches)))
            recording.log(step, loss=values[-1])
        with recording.saving(STEPS, "last"):
            engine.save_checkpoint(str(folder / "checkpoints"), "last")
        recording.results["loss"] = values[-1]
    return {"losses": values}


if __name__ == "__main__":
    wavemare.init_distributed()  # else stock DeepSpeed would compile an operator first
    # Pipelines last: in one process DeepSpeed keeps their grid for all engines after them.
    leave(
        {
            "stock": by_trainer("stock", transformers.Trainer, None),
            "replicas": by_trainer("replicas", wavemare.hf.Trainer, None),
            "loop": by_loop("loop"),
            "pipeline": by_trainer("pipeline", wavemare.hf.Trainer, PIPELINE),
            "folder": str(ROOT / "runs"),
        }
    )
