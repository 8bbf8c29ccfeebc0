# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with data, arguments and layouts that are less common."""

import random
import sys
from typing import Any

import torch
from common import leave
from hf_common import Rows, losses, pad, plain_model
from hf_pipeline import compared, reference, trainer_of

import wavemare
import wavemare.hf

PIPELINE = {"pipeline": {"stages": 2}}
PIPEMARE = {"pipeline": {"stages": 2, "schedule": "pipemare"}}


class Stream(torch.utils.data.IterableDataset):
    """Rows that have neither length nor index."""

    def __init__(self, kind, count):
        self.rows = Rows(kind, count)

    def __iter__(self):
        return iter(self.rows.rows)


def masked(features):
    """Hide tokens at random, by torch's generator and by Python's."""
    batch = pad(features)
    hidden = torch.rand(batch["input_ids"].shape) < 0.3
    hidden[:, random.randrange(4, 8)] = True
    batch["labels"] = torch.where(hidden, batch["input_ids"], -100)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 0)
    return batch


def streamed():
    return compared("gpt2", "1f1b", train_dataset=Stream("gpt2", 21))


def read_by_workers():
    """Each process has a worker of its own, which masks the same tokens on all stages."""
    section = {"pipeline": {"stages": 2}}
    changes = {"dataloader_num_workers": 1}
    trainer = trainer_of("gpt2", "workers", section, data_collator=masked, **changes)
    trainer.train()
    return {"losses": losses(trainer), "expected": reference("gpt2", trainer)["losses"]}


def replicas():
    return compared("gpt2", "1f1b", config={"wavemare": PIPELINE}, train_dataset=Rows("gpt2", 42))


def stages_of_parts():
    """Tensor parallelism inside of stages, with a loss that needs all logits of a token."""
    section = {**PIPELINE, "tensor_parallel": {"size": 2}}
    return compared("gpt2", "1f1b", 0.1, config={"wavemare": section})


def parts():
    """Logits of tensor parallelism alone, beside the loss."""
    shapes: list[Any] = []

    def metrics(prediction):
        shapes.append(list(prediction.predictions.shape))
        return {"mean": float(prediction.predictions.mean())}

    section = {"tensor_parallel": {"size": 2}}
    trainer = trainer_of("gpt2", "parts", section, compute_metrics=metrics)
    found = trainer.evaluate()
    rows = torch.stack([row["input_ids"] for row in Rows("gpt2", 7, seed=1).rows])
    with torch.no_grad():
        expected = plain_model("gpt2").eval()(rows).logits
    return {"shapes": shapes, "mean": found["eval_mean"], "expected": float(expected.mean())}


def again(kind, section):
    """A second ``train`` goes on with the weights, and is a new run in all else."""
    name = f"again-{kind}-{section['pipeline'].get('schedule')}"
    first = trainer_of(kind, name, section)
    first.train()
    first.save_model()
    torch.distributed.barrier()
    before = len(losses(first))
    first.train()
    loaded = type(first.model).from_pretrained(first.args.output_dir)
    for module in loaded.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    other = trainer_of(kind, f"{name}-other", section, model=loaded)
    other.train()
    # The history is begun anew where transformers does so.
    return {"second": losses(first)[-before:], "other": losses(other), "steps": before}


def noisy():
    """NEFTune's noise is in training, and in nothing else."""
    plain = trainer_of("gpt2", "plain", PIPELINE)
    noised = trainer_of("gpt2", "noised", PIPELINE, neftune_noise_alpha=50.0)
    before = noised.evaluate()["eval_loss"]
    same = plain.evaluate()["eval_loss"]
    for trainer in (plain, noised):
        trainer.train()
    noised.save_model()
    torch.distributed.barrier()
    loaded = type(noised.model).from_pretrained(noised.args.output_dir).eval()
    rows = Rows("gpt2", 2, seed=1)
    ids = torch.stack([rows[n]["input_ids"] for n in range(2)])
    with torch.no_grad():
        expected = loaded(input_ids=ids).logits
    found = noised.predict([rows[n] for n in range(2)]).predictions
    return {
        "losses": [losses(plain)[0], losses(noised)[0]],
        "before": [before, same],
        "error": float((torch.from_numpy(found) - expected).abs().max()),
    }


def noisy_parts():
    """Tensor parallelism puts another module in the place of the embedding, which gives noise."""
    section = {"tensor_parallel": {"size": 2}}
    plain = trainer_of("gpt2", "plain-parts", section)
    noised = trainer_of("gpt2", "noised-parts", section, neftune_noise_alpha=50.0)
    for trainer in (plain, noised):
        trainer.train()
    norms = [entry["grad_norm"] for entry in noised.state.log_history if "grad_norm" in entry]
    return {"losses": [losses(plain)[0], losses(noised)[0]], "drawn": [losses(noised), norms]}


def halves(kind, section):
    """bf16 beside fp32."""
    found, config = {}, {"bf16": {"enabled": "auto"}}
    for name, changes in (("fp32", {}), ("bf16", {"bf16": True})):
        trainer = trainer_of(kind, f"half-{name}-{len(section)}", section, config=config, **changes)
        trainer.train()
        found[name] = [*losses(trainer), trainer.evaluate()["eval_loss"]]
        parameters = list(trainer.deepspeed.module.parameters())
        found[f"{name} type"] = str(parameters[0].dtype)
    return found


CASES = {
    "streamed": streamed,
    "workers": read_by_workers,
    "replicas": replicas,
    "stages_of_parts": stages_of_parts,
    "parts": parts,
    "again_1f1b": lambda: again("gpt2", PIPELINE),
    "again_pipemare": lambda: again("bert", PIPEMARE),
    "noisy": noisy,
    "noisy_parts": noisy_parts,
    "bf16_zero": lambda: halves("gpt2", {}),
    "bf16_1f1b": lambda: halves("gpt2", PIPELINE),
}

if __name__ == "__main__":
    wavemare.init_distributed()
    leave({name: CASES[name]() for name in sys.argv[2:]})
