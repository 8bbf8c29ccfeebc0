# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with data-parallel engines, beside transformers' own."""

import os
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import transformers
from common import DEVICE, QUIET, VOCABULARY, leave, refusal
from hf_common import MODELS, Rows, arguments, file_digest, json_file, losses, pad, plain_model
from tensor_models import Widths

import wavemare
import wavemare.hf
from wavemare.hf import newest_checkpoint


def run(kind, name, trainer_class, config, **changes):
    build = MODELS[kind] if kind == "bert" else lambda: plain_model(kind)
    trainer = trainer_class(
        model=build(),
        args=arguments(name, config, **changes),
        train_dataset=Rows(kind, 22),
        eval_dataset=Rows(kind, 7, seed=1),
    )
    trainer.train()
    widths = Widths()
    with widths if config["zero_optimization"]["stage"] == 0 else nullcontext():
        evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    torch.distributed.barrier()
    engine = trainer.model_wrapped
    return {
        "class": f"{type(engine).__module__}.{type(engine).__name__}",
        "losses": losses(trainer),
        "eval": evaluated,
        "counted": [trainer.state.total_flos, trainer.get_num_trainable_parameters()],
        "whole logits": VOCABULARY in widths.seen,
        "lr": [e["learning_rate"] for e in trainer.state.log_history if "learning_rate" in e],
        "weights": file_digest(trainer.args.output_dir),
        "section": getattr(trainer.accelerator, "section", None),
        "sparse": getattr(engine, "sparse", None) is not None,
    }


def same_as_stock(kind, stage):
    config = json_file(stage)
    if stage == 3:
        config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True
    name = f"{kind}{stage}"
    return {
        "stock": run(kind, f"stock-{name}", transformers.Trainer, config),
        "ours": run(kind, f"ours-{name}", wavemare.hf.Trainer, config),
    }


def without_a_file():
    """No DeepSpeed at all: an optimizer step of several micro-batches, evaluation and a save."""
    found = {}
    for name, trainer_class in (("stock", transformers.Trainer), ("ours", wavemare.hf.Trainer)):
        trainer = trainer_class(
            model=plain_model("gpt2"),
            args=arguments(f"plain-{name}", None),
            train_dataset=Rows("gpt2", 22),
            eval_dataset=Rows("gpt2", 7, seed=1),
        )
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        predicted = trainer.predict(Rows("gpt2", 5, seed=2)).metrics["test_loss"]
        trainer.save_model()
        torch.distributed.barrier()
        digest, flos = file_digest(trainer.args.output_dir), trainer.state.total_flos
        found[name] = [losses(trainer), evaluated, predicted, flos, digest]
    return found


def by_variable():
    """CPUs asked for by accelerate's own variable, with which accelerate leaves DeepSpeed out."""
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        if DEVICE == "cpu":
            return run("gpt2", "variable", wavemare.hf.Trainer, json_file(0))
        config = json_file(0)
        return refusal(lambda: run("gpt2", "variable", wavemare.hf.Trainer, config, use_cpu=False))
    finally:
        del os.environ["ACCELERATE_USE_CPU"]


def sparse():
    config = json_file(0, {"sparse_collective": {"mode": "auto"}})
    return run("bert", "sparse", wavemare.hf.Trainer, config)


def tensor_parallel():
    config = json_file(0, {"tensor_parallel": {"size": 2}})
    return run("gpt2", "tensor", wavemare.hf.Trainer, config, per_device_train_batch_size=4)


def own_optimizer():
    """transformers' optimizer, with its two groups, holds the parts of a split model."""
    config = json_file(0, {"tensor_parallel": {"size": 2}}, optimizer=None)
    changes = {"per_device_train_batch_size": 4, "weight_decay": 0.1}
    return run("gpt2", "own", wavemare.hf.Trainer, config, **changes)


def named_optimizer():
    config = json_file(0, {"tensor_parallel": {"size": 2}})
    changes = {"per_device_train_batch_size": 4, "weight_decay": 0.1}
    return run("gpt2", "named", wavemare.hf.Trainer, config, **changes)


def adagrad():
    """An optimizer that makes the states of its weights when it is made, beside stock's."""
    section, found = {"tensor_parallel": {"size": 2}}, {}
    for name, kind, config, size in (
        ("stock", transformers.Trainer, json_file(optimizer=None), 2),
        ("split", wavemare.hf.Trainer, json_file(0, section, optimizer=None), 4),
    ):
        changes = {"optim": "adagrad", "weight_decay": 0.1, "gradient_accumulation_steps": 1}
        changes["per_device_train_batch_size"] = size
        found[name] = run("gpt2", f"adagrad-{name}", kind, config, **changes)
    for stage in (1, 3):
        config, changes = json_file(stage, {}, optimizer=None), {"optim": "adagrad"}
        trains = partial(run, "gpt2", "adagrad-refused", wavemare.hf.Trainer, config, **changes)
        found[f"ZeRO {stage}"] = refusal(trains)
    return found | {"by rates": [adagrad_by_rates(stage) for stage in (0, 1, 3)]}


def adagrad_by_rates(stage):
    """Losses with one group of weights, whose rates a schedule sets, in a loop."""
    model = plain_model("gpt2")
    engine, *_ = wavemare.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,
            "wavemare": {},
        },
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.01),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )
    rows = torch.stack([row["input_ids"] for row in Rows("gpt2", 2, seed=engine.data_rank).rows])
    data = [{"input_ids": rows, "labels": rows}]
    found = [float(engine.train_batch(iter(data))) for _ in range(4)]
    engine.destroy()
    return found


def tokens():
    config = json_file(0, {"balance": {"mean": "tokens"}})
    return run("gpt2", "tokens", wavemare.hf.Trainer, config)


class Weighted(torch.utils.data.WeightedRandomSampler):
    """Draws the order of an epoch from the global generator."""

    def __init__(self, rows):
        super().__init__([1.0 + number % 3 for number in range(len(rows))], len(rows))


def of_weighted(base):
    class WithSampler(base):
        def _get_train_sampler(self, dataset=None):
            return Weighted(self.train_dataset)

    return WithSampler


def interrupted(name, trainer_class, config, **changes):
    """Train with dropout, then again from a checkpoint in the first epoch; digests of weights."""
    digests, seen = [], []
    output, newest = Path(sys.argv[1], name), []

    for again in (False, True):
        saves = {} if again else {"save_strategy": "steps", "save_steps": 2}
        options = {**changes, **saves}
        trainer = trainer_class(
            model=MODELS["gpt2"](),
            args=arguments(name, config, max_steps=4, max_grad_norm=0.0, **options),
            data_collator=pad,
            train_dataset=Rows("gpt2", 40, varied=True),
        )
        newest.append(newest_checkpoint(output))
        trainer.train(resume_from_checkpoint=newest[-1])
        trainer.save_model()
        torch.distributed.barrier()
        digests.append(file_digest(trainer.args.output_dir))
        seen.append(losses(trainer)[-2:])
        if not again and trainer.args.process_index == 0:  # as if the last save had been killed
            (output / "checkpoint-4" / "trainer_state.json").unlink()
    return {
        "digests": digests,
        "losses": seen,
        "newest": [path and Path(path).name for path in newest],
    }


def resumed():
    """Orders that samplers draw from the global generator, in runs that go on from a checkpoint."""
    local = {"local_steps": {"mode": "average", "every": 2, "replica": "rank"}}
    engines = {
        "zero1": (1, None),
        "sparse": (0, {"sparse_collective": {"mode": "auto"}}),
        "local": (0, local),
        "waves": (1, {"wavelet": {"mode": "sync"}}),
    }
    grouped = {"train_sampling_strategy": "group_by_length"}
    stock, ours = transformers.Trainer, wavemare.hf.Trainer
    found = {
        "stock grouped": interrupted("r-stock", stock, json_file(1), **grouped),
        "stock weighted": interrupted("r-stock-w", of_weighted(stock), json_file(1)),
        "zero1 weighted": interrupted("r-zero1-w", of_weighted(ours), json_file(1)),
    }
    for engine, (stage, section) in engines.items():
        config = json_file(stage, section)
        found[f"{engine} grouped"] = interrupted(f"r-{engine}", ours, config, **grouped)
    return found


def own_loader():
    """What the collator of a loader that the script made itself draws on this rank."""
    drawn = []

    def noisy(rows):
        drawn.append(torch.rand(()).item())
        return pad(rows)

    class WithLoader(wavemare.hf.Trainer):
        def get_train_dataloader(self):
            data = torch.utils.data
            sampler = data.DistributedSampler(self.train_dataset)
            return data.DataLoader(
                self.train_dataset, batch_size=2, sampler=sampler, collate_fn=noisy
            )

    WithLoader(
        model=MODELS["gpt2"](),
        args=arguments("own-loader", json_file(1, {"wavelet": {"mode": "sync"}})),
        train_dataset=Rows("gpt2", 22),
    ).train()
    return drawn


def refusals():
    def message(config, optimizer_class=None, **changes):
        model = MODELS["gpt2"]()
        optimizer = optimizer_class and optimizer_class(model.parameters(), lr=0.1)

        def train():
            wavemare.hf.Trainer(
                model=model,
                args=arguments("refused", config, **changes),
                train_dataset=Rows("gpt2", 8),
                optimizers=(optimizer, None),
            ).train()

        return refusal(train)

    different = json_file(train_micro_batch_size_per_gpu=3, gradient_clipping=0.5)
    different["optimizer"]["params"]["lr"] = 0.5
    scheduled = json_file(scheduler={"type": "WarmupLR"})
    return {
        "differences": message(different),
        "types": message(scheduled, optim="sgd", lr_scheduler_type="cosine"),
        "objects": message(json_file(optimizer=None), torch.optim.SGD),
        "unknown key": message(json_file(0, {"pipelin": {}})),
        "shares": message(json_file(0, {"balance": {"shares": [3, 1]}})),
        "parallel": message(json_file(0, {"parallel": {"split": 2}})),
        "stages": message(json_file(0, {"pipeline": {"stages": 3}})),
        "auto": message(json_file(0, {"pipeline": {"untie": "auto"}})),
        "one": message(json_file(0), use_cpu=False),
    }


def again_with_zero_3():
    """Training after an evaluation is refused, and what the error advises trains."""

    def trainer(model, name):
        return wavemare.hf.Trainer(
            model=model, args=arguments(name, json_file(3)), train_dataset=Rows("gpt2", 22)
        )

    first = trainer(plain_model("gpt2"), "again")
    first.evaluate(Rows("gpt2", 4))
    message = refusal(first.train)
    first.save_model()
    torch.distributed.barrier()
    folder = first.args.output_dir
    second = trainer(transformers.GPT2LMHeadModel.from_pretrained(folder, **QUIET), "new")
    second.train()
    return {"message": message, "losses": losses(second)}


CASES = {
    **{f"{k}_zero{s}": partial(same_as_stock, k, s) for k in MODELS for s in range(4)},
    "without_a_file": without_a_file,
    "by_variable": by_variable,
    "sparse": sparse,
    "tokens": tokens,
    "tensor_parallel": tensor_parallel,
    "own_optimizer": own_optimizer,
    "named_optimizer": named_optimizer,
    "adagrad": adagrad,
    "resumed": resumed,
    "own_loader": own_loader,
    "again": again_with_zero_3,
    "refusals": refusals,
}

if __name__ == "__main__":
    wavemare.init_distributed()  # else stock DeepSpeed would compile an operator first
    leave({name: CASES[name]() for name in sys.argv[2:]})
