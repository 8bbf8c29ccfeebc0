# SPDX-License-Identifier: Apache-2.0
"""What users of the Trainer rely on, with our engines: resume, callbacks, metrics, best models."""

import sys
from collections import Counter
from functools import partial

import numpy
import torch
from common import leave
from hf_common import MODELS, Rows, arguments, file_digest, json_file, losses
from transformers import EarlyStoppingCallback, TrainerCallback

import wavemare
import wavemare.hf

ENGINES = {
    "zero1": (1, {"sparse_collective": {"mode": "auto"}}),
    "1f1b": (0, {"pipeline": {"stages": 2}}),
    "pipemare": (0, {"pipeline": {"stages": 2, "schedule": "pipemare"}}),
}


class Recorder(TrainerCallback):
    """Counts what happens."""

    def __init__(self):
        self.counts: Counter[str] = Counter()
        for event in (name for name in dir(self) if name.startswith("on_")):
            setattr(self, event, partial(self.count, event))

    def count(self, event, *args, **kwargs):
        self.counts[event] += 1


def largest(logits, labels):
    return logits.argmax(-1)


def trainer_of(kind, engine, name, **options):
    stage, section = ENGINES[engine]
    changes = options.pop("arguments", {})
    return wavemare.hf.Trainer(
        model=MODELS[kind](),
        args=arguments(f"{kind}-{engine}-{name}", json_file(stage, section), **changes),
        train_dataset=Rows(kind, 21),
        eval_dataset=Rows(kind, 7, seed=1),
        preprocess_logits_for_metrics=largest,
        **options,
    )


def resumed(kind, engine):
    """Eight steps at once, and four that go on from the fourth, in an epoch's middle."""
    changes = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4, "logging_steps": 1}
    whole = trainer_of(kind, engine, "run", arguments=changes)
    whole.train()
    whole.save_model()
    again = trainer_of(kind, engine, "run", arguments=changes)
    again.train(resume_from_checkpoint=f"{again.args.output_dir}/checkpoint-4")
    folder = f"{again.args.output_dir}-again"
    again.save_model(folder)
    torch.distributed.barrier()
    return {
        "losses": [losses(whole), losses(again)],
        "digests": [file_digest(whole.args.output_dir), file_digest(folder)],
        "step": again.state.global_step,
    }


def best(kind, engine):
    """A metric that only falls: the first evaluation is the best one, and the second the last."""
    recorder, seen = Recorder(), []

    def metrics(prediction):
        seen.append([list(prediction.predictions.shape), list(prediction.label_ids.shape)])
        right = numpy.mean(prediction.predictions == prediction.label_ids)
        return {"score": -float(len(seen)), "right": float(right)}

    trainer = trainer_of(
        kind,
        engine,
        "best",
        compute_metrics=metrics,
        callbacks=[recorder, EarlyStoppingCallback(early_stopping_patience=1)],
        arguments={
            "max_steps": 8,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_strategy": "steps",
            "save_steps": 2,
            "load_best_model_at_end": True,
            "metric_for_best_model": "score",
            "greater_is_better": True,
            "warmup_steps": 2,
        },
    )
    trainer.train()
    folder = trainer.args.output_dir
    trainer.save_model()
    torch.distributed.barrier()
    history = trainer.state.log_history
    return {
        "counts": recorder.counts,
        "seen": seen,
        "step": trainer.state.global_step,
        "best": trainer.state.best_model_checkpoint.rpartition("/")[2],
        "digests": [file_digest(f"{folder}/checkpoint-{n}") for n in (2, 4)]
        + [file_digest(folder)],
        "rates": [entry["learning_rate"] for entry in history if "learning_rate" in entry],
        "keys": sorted({key for entry in history for key in entry}),
    }


def evaluated_first(kind, engine):
    """An evaluation before training, an evaluation without labels, then training."""
    trainer = trainer_of(kind, engine, "first")
    before = trainer.evaluate()["eval_loss"]
    rows = [{"input_ids": row["input_ids"]} for row in Rows(kind, 5, seed=2).rows]
    unlabelled = trainer.predict(rows)
    trainer.train()
    plain = MODELS[kind]().eval()
    with torch.no_grad():
        logits = plain(torch.stack([row["input_ids"] for row in rows])).logits
    return {
        "before": before,
        "after": trainer.evaluate()["eval_loss"],
        "same": bool((torch.from_numpy(unlabelled.predictions) == logits.argmax(-1)).all()),
        "labels": unlabelled.label_ids is None,
    }


CASES = {"resumed": resumed, "best": best, "first": evaluated_first}

if __name__ == "__main__":
    wavemare.init_distributed()
    found = {}
    for name in sys.argv[2:]:
        case, kind, engine = name.split("_")
        found[name] = CASES[case](kind, engine)
    leave(found)
