# SPDX-License-Identifier: Apache-2.0
"""``wavemare.hf.Trainer`` with pipelines and waves: what a plain loop over the same data gives."""

import math
import sys
from typing import Any
from unittest import mock

import torch
import transformers
from common import VOCABULARY, leave, refusal, warnings_told
from deepspeed.accelerator import get_accelerator
from hf_common import MODELS, Rows, arguments, file_digest, json_file, losses, pad, plain_model
from torch.nn.functional import cross_entropy

import wavemare
import wavemare.hf
from wavemare.engine.checkpoint.random_state import seeded

SECTIONS = {
    "1f1b": {"pipeline": {"stages": "auto"}},
    "pipemare": {"pipeline": {"stages": 2, "schedule": "pipemare"}},
    "wavelet": {"wavelet": {"mode": "sync"}},
}


def trainer_of(kind, name, section, **options):
    changes = {k: options.pop(k) for k in list(options) if k in ARGUMENTS}
    config = json_file(0, section, **options.pop("config", {}))
    given = {
        "model": plain_model(kind),
        "train_dataset": Rows(kind, 21),
        "eval_dataset": Rows(kind, 7, seed=1),
        **options,
    }
    return wavemare.hf.Trainer(args=arguments(name, config, **changes), **given)


ARGUMENTS = set(transformers.TrainingArguments.__dataclass_fields__)


def reference(kind, trainer, smoothing=0.0, loss_of=None):
    """A loop in one process over the very batches: transformers' losses, AdamW, clipping.

    A loss of one's own is that of a model and a batch; its mean over the batches of a step counts.
    """
    args = trainer.args
    model = plain_model(kind).to(args.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    transformers.set_seed(args.seed)  # which orders the samples
    loader, found, step, tokens = trainer.get_train_dataloader(), [], 0, 0
    for epoch in range(100):
        loader.set_epoch(epoch)
        with seeded(args.seed + epoch * 1_000_003):  # as an epoch's order is drawn
            own = list(loader)
        batches = _of_all_ranks(own, trainer.accelerator.data_ranks)
        per_step = args.gradient_accumulation_steps * trainer.accelerator.data_ranks
        for start in range(0, len(batches), per_step):
            if step == args.max_steps:
                break
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - step / args.max_steps)
            optimizer.zero_grad()
            part = batches[start : start + per_step]
            items = sum(int((batch["labels"] != -100).sum()) for batch in part)
            if loss_of is None:
                loss = sum(_loss(kind, model, batch, smoothing, items) for batch in part)
            else:
                loss = sum(loss_of(model, dict(batch)) for batch in part) / len(part)
            loss.backward()
            if args.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            found.append(loss.item())
            tokens += sum(batch["input_ids"].numel() for batch in part)
            step += 1
    size = model.num_parameters(exclude_embeddings=True)
    return {"losses": found, "counted": [6 * size * tokens, model.num_parameters()]}


def _loss(kind, model, batch, smoothing, items):
    """A batch's part of a step, as transformers 5.24 defines it.

    Sums are divided by all labels of the step, of which GPT-2 shifts the first ones away. BERT does
    not know that number, and returns means, which transformers adds up.
    """
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
    if kind == "gpt2":
        logits, labels = logits[:, :-1], labels[:, 1:]
    flat, wanted = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    if kind == "bert" and not smoothing:
        return cross_entropy(flat, wanted)
    return cross_entropy(flat, wanted, reduction="sum", label_smoothing=smoothing) / items


def _of_all_ranks(batches, ranks):
    if ranks == 1:
        return batches
    everywhere: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, batches)
    first_stage = everywhere[:ranks]
    return [batch for together in zip(*first_stage, strict=True) for batch in together]


def compared(kind, schedule, smoothing=0.0, **options):
    name = f"{kind}-{schedule}-{smoothing}-{len(options)}"
    trainer = trainer_of(
        kind, name, SECTIONS[schedule], label_smoothing_factor=smoothing, **options
    )
    if schedule == "wavelet":  # two ranks, of which transformers would fill up a short batch
        trainer.eval_dataset = Rows(kind, 8, seed=1)
    trainer.train()
    evaluated = trainer.evaluate()
    predicted = trainer.predict(Rows(kind, 5, seed=2))
    trainer.save_model()
    torch.distributed.barrier()
    folder = trainer.args.output_dir
    loaded = type(trainer.model).from_pretrained(folder).eval()
    rows = Rows(kind, 5, seed=2)
    collate = trainer.data_collator
    with torch.no_grad():
        outputs = [loaded(**collate([rows[number]])).logits for number in range(5)]
    found, expected = torch.from_numpy(predicted.predictions), torch.cat(outputs)
    own = reference(kind, trainer, smoothing)
    errors = (found[:, None] - expected[None]).flatten(2).abs().amax(-1)
    if trainer.args.train_sampling_strategy == "group_by_length":  # predictions come in its order
        errors = errors.amin(0)
    else:
        errors = errors.diagonal()
    return {
        "class": type(trainer.deepspeed).__name__,
        "losses": losses(trainer),
        "expected": own["losses"],
        "counted": [trainer.state.total_flos, trainer.get_num_trainable_parameters()],
        "counted_expected": own["counted"],
        "eval": evaluated["eval_loss"],
        "eval_expected": _eval_loss(kind, loaded, trainer, smoothing),
        "logits": list(found.shape),
        "logits_error": float(errors.max()),
        "digest": file_digest(folder),
    }


def begun():
    """Gradients of any length, after an evaluation of the model as it was given."""
    trainer = trainer_of("gpt2", "begun", SECTIONS["1f1b"], max_grad_norm=0.0, eval_on_start=True)
    trainer.train()
    (first,) = [e["eval_loss"] for e in trainer.state.log_history if "eval_loss" in e]
    return {
        "losses": losses(trainer),
        "expected": reference("gpt2", trainer)["losses"],
        "first": first,
        "first_expected": _eval_loss("gpt2", plain_model("gpt2").eval(), trainer, 0.0),
    }


def _eval_loss(kind, model, trainer, smoothing):
    """The mean over rows of their batch's loss, as transformers weighs batches."""
    rows, means = trainer.eval_dataset, []
    for start in range(0, len(rows), 2):
        part = [rows[n] for n in range(start, min(start + 2, len(rows)))]
        batch = trainer.data_collator(part)
        items = int((batch["labels"] != -100).sum())
        with torch.no_grad():
            means += [_loss(kind, model, batch, smoothing, items).item()] * len(part)
    return sum(means) / len(means)


def stale(**config):
    """The arguments' two micro-batches, where four would bound the staleness."""
    section = {**SECTIONS["pipemare"]["pipeline"], "pipemare": {"slack": 3}}
    trainer = trainer_of(
        "gpt2", f"stale{len(config)}", {"pipeline": section}, max_steps=1, config=config
    )
    with warnings_told("pipemare: ") as told:
        trainer.train()
    return {"told": told, "micro_batches": trainer.deepspeed.gradient_accumulation_steps()}


VARIED: dict[str, Any] = {
    "data_collator": pad,
    "config": {
        "wavemare": {
            "pipeline": {
                "stages": 2,
                "inputs": ["input_ids", "attention_mask"],
                "dynamic_shape": "auto",
            }
        }
    },
}


def varied(kind):
    """Rows of unlike lengths, grouped by length, with a collator of the script's own."""
    options = {**VARIED, "train_dataset": Rows(kind, 11, varied=True)}
    return compared(kind, "1f1b", train_sampling_strategy="group_by_length", **options)


class Weighed(Rows):
    """Rows with weights, which no model knows."""

    def __getitem__(self, index):
        return {**super().__getitem__(index), "weights": 1.0 + index % 3}


def weighed(model, inputs):
    """A mean over all rows, those of a batch's filling would count."""
    weights, labels = inputs.pop("weights"), inputs.pop("labels")[:, 1:]
    logits = model(**inputs).logits[:, :-1]
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses.view(labels.shape).mean(1) * weights).mean()


class Weighing(wavemare.hf.Trainer):
    loss_is_scaled_for_ga = False
    trained = 0  # batches

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        seen = model.training, model.config.vocab_size, hasattr(model, "lm_head")
        assert seen == (not return_outputs, VOCABULARY, False), seen
        self.trained += model.training
        weights = inputs["weights"]
        loss = weighed(model, inputs)
        return (loss, {"loss": loss, "logits": weights}) if return_outputs else loss


def own_loss(schedule):
    """A loss of the script's own, of rows of which the last step has one: two fill it up."""
    section = {"pipeline": {"stages": 2, "schedule": schedule, "dynamic_shape": False}}
    rows = {"train_dataset": Weighed("gpt2", 21), "eval_dataset": Weighed("gpt2", 7, seed=1)}
    changes = {"max_steps": 8, "remove_unused_columns": False}
    name, changes["label_names"] = f"own-{schedule}", ["labels", "weights"]
    given = json_file(0, section)
    trainer = Weighing(model=plain_model("gpt2"), args=arguments(name, given, **changes), **rows)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    predicted = trainer.predict(trainer.eval_dataset)
    trainer.save_model()
    torch.distributed.barrier()
    alone = []  # losses of the batches in one process

    def loss_alone(model, inputs):
        alone.append(weighed(model, inputs))
        return alone[-1]

    expected = reference("gpt2", trainer, loss_of=loss_alone)["losses"]
    loaded = type(trainer.model).from_pretrained(trainer.args.output_dir).eval()
    batches = [trainer.data_collator([row]) for row in Weighed("gpt2", 7, seed=1)]
    with torch.no_grad():
        means = [float(weighed(loaded, batch)) for batch in batches]
    return {
        "losses": losses(trainer),
        "expected": expected,
        "trained": [trainer.trained, len(alone)],
        "eval": evaluated,
        "eval_expected": sum(means) / len(means),
        "labels": [part.tolist() for part in predicted.label_ids],
        "labels_expected": [
            [torch.as_tensor(row[name]).tolist() for row in trainer.eval_dataset]
            for name in changes["label_names"]
        ],
    }


class OwnScheduler(wavemare.hf.Trainer):
    def create_scheduler(self, num_training_steps, optimizer=None):
        chosen = self.optimizer if optimizer is None else optimizer
        self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.5)
        return self.lr_scheduler


def own_scheduler(schedule, **config):
    """The rates of a scheduler of the script's own, and those of the run when it is resumed."""
    name, rows = f"rates-{schedule}-{len(config)}", Rows("gpt2", 21)
    given = json_file(0, SECTIONS.get(schedule), **config)
    chosen = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "learning_rate": 0.5}

    def train(**options):
        trainer = OwnScheduler(
            model=plain_model("gpt2"), args=arguments(name, given, **chosen), train_dataset=rows
        )
        trainer.train(**options)
        logs = trainer.state.log_history
        return [each["learning_rate"] for each in logs if "learning_rate" in each]

    folder = arguments(name, given, **chosen).output_dir
    return [train(), train(resume_from_checkpoint=f"{folder}/checkpoint-2")]


class Averaging(torch.optim.SGD):
    """Evaluates the mean of the last two steps' weights, as optimizers without schedules do."""

    trains = True

    def step(self, closure=None):
        assert self.trains, "a step would begin from averages"
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.detach().clone()
        return super().step(closure)

    @torch.no_grad()
    def _change(self, *, trains):
        for parameter, state in self.state.items() if self.trains is not trains else ():
            if trains:
                parameter.copy_(state["own"])
            else:
                state["own"] = parameter.clone()
                parameter.lerp_(state["before"], 0.5)
        self.trains = trains

    def train(self):
        self._change(trains=True)

    def eval(self):
        self._change(trains=False)


def modes(zero=0):
    """Whether an optimizer with modes evaluates its averages and trains its own weights."""
    chosen = {"optimizer_cls_and_kwargs": (Averaging, {"lr": 0.5})}
    trainer = trainer_of(
        "gpt2",
        f"modes-{zero}",
        SECTIONS["1f1b"],
        config={"optimizer": None, "zero_optimization": {"stage": zero}},
        eval_strategy="steps",
        eval_steps=1,
        train_sampling_strategy="sequential",
        optim="sgd",
        max_steps=2,
        **chosen,
    )
    said = refusal(trainer.train)
    if said != "accepted":
        return {"said": said}
    model, args = plain_model("gpt2"), trainer.args
    optimizer = Averaging(model.parameters(), lr=0.5)
    rows, count, expected = Rows("gpt2", 21), args.gradient_accumulation_steps, []
    for step in range(2):
        optimizer.param_groups[0]["lr"] = 0.5 * (1 - step / 2)
        optimizer.train()
        parts = [range(first, first + 2) for first in range(4 * step, 4 * step + 2 * count, 2)]
        batches = [trainer.data_collator([rows[n] for n in part]) for part in parts]
        items = sum(batch["labels"].numel() for batch in batches)
        sum(_loss("gpt2", model, batch, 0.0, items) for batch in batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        expected.append(_eval_loss("gpt2", model, trainer, 0.0))
    logs = trainer.state.log_history
    return {
        "said": said,
        "eval": [e["eval_loss"] for e in logs if "eval_loss" in e],
        "expected": expected,
    }


def refusals():
    def message(section, trainer_class=wavemare.hf.Trainer, config=None, given=None, **changes):
        def train():
            trainer_class(
                model=MODELS["gpt2"](),
                args=arguments("refused", json_file(0, section, **(config or {})), **changes),
                train_dataset=Rows("gpt2", 8),
                **(given or {}),
            ).train()

        return refusal(train)

    class Own(wavemare.hf.Trainer):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    class OwnStep(wavemare.hf.Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs)

    class OwnInputs(wavemare.hf.Trainer):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs(inputs)

    class OwnOptimizer(wavemare.hf.Trainer):
        def create_optimizer(self, model=None):
            if self.optimizer is None:
                self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    stages = SECTIONS["1f1b"]
    chosen = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1})}
    # Some CPUs do train in fp16.
    with mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=False):
        half = message(SECTIONS["1f1b"], fp16=True)
    return {
        "own step": message(SECTIONS["1f1b"], OwnStep),
        "own inputs": message(SECTIONS["wavelet"], OwnInputs),
        "own optimizer": message(stages, OwnOptimizer),
        "own scheduler": message(stages, OwnScheduler, {"scheduler": {"type": "WarmupLR"}}),
        "own class": message(stages, given=chosen),
        "own optimizer alone": message(stages, OwnOptimizer, {"optimizer": None}, optim="sgd"),
        "own class alone": message(stages, config={"optimizer": None}, given=chosen, optim="sgd"),
        "own loss": message(SECTIONS["1f1b"], Own),
        "own waves": message(SECTIONS["wavelet"], Own),
        "batch size": message(SECTIONS["1f1b"], auto_find_batch_size=True),
        "half": half,
    }


def ignored(schedule):
    """The first step's loss, of whose micro-batches the second has no labels at all."""
    rows = Rows("bert", 8)
    for row in rows.rows[2:4]:
        row["labels"] = torch.tensor(-100)
    trainer = trainer_of(
        "bert",
        f"ignored-{schedule}",
        {**SECTIONS[schedule], "guard": {"nonfinite": "off"}},
        train_dataset=rows,
        max_steps=1,
        train_sampling_strategy="sequential",
    )
    trainer.train()
    model, collate = plain_model("bert"), trainer.data_collator
    count = trainer.args.gradient_accumulation_steps * trainer.accelerator.data_ranks
    expected = 0.0
    for start in range(0, 2 * count, 2):
        loss = model(**collate(rows.rows[start : start + 2])).loss.item()
        expected += expected if math.isnan(loss) else loss  # as transformers' filter has it
    return {"losses": losses(trainer), "expected": [expected]}


def impossible(evaluates):
    """What is said of a loss that a last stage cannot compute; it leaves a broken engine."""

    class Own(wavemare.hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **_):
            outputs = model(**inputs, output_hidden_states=evaluates)
            loss = outputs.loss + model(**inputs).loss
            return (loss, outputs) if return_outputs else loss

    trainer = Own(
        model=plain_model("gpt2"),
        args=arguments("impossible", json_file(0, SECTIONS["1f1b"])),
        train_dataset=Rows("gpt2", 8),
        eval_dataset=Rows("gpt2", 4),
    )
    return refusal(trainer.evaluate if evaluates else trainer.train)


def labels_apart(schedule):
    """What is said of ranks of one model that have the same rows, and other labels."""
    rows = Rows("bert", 8)
    for row in rows.rows if torch.distributed.get_rank() else []:
        row["labels"] = (row["labels"] + 1) % 3
    options = {"train_dataset": rows, "max_steps": 2}
    return refusal(trainer_of("bert", "apart", SECTIONS[schedule], **options).train)


def hidden_outputs():
    """A configuration that asks for hidden states, which stages do not keep."""
    trainer = trainer_of("gpt2", "hidden", SECTIONS["1f1b"])
    trainer.model.config.output_hidden_states = True
    said = refusal(lambda: trainer.predict(trainer.eval_dataset))
    alone = trainer.predict(trainer.eval_dataset, ignore_keys=["hidden_states"]).predictions
    evaluated = trainer.evaluate()["eval_loss"]
    return {"said": said, "alone": list(alone.shape), "eval": math.isfinite(evaluated)}


CASES = {
    "own_interleaved": lambda: own_loss("interleaved"),
    "ignored_1f1b": lambda: ignored("1f1b"),
    "ignored_wavelet": lambda: ignored("wavelet"),
    "gpt2_1f1b": lambda: compared("gpt2", "1f1b", max_steps=8),
    "bert_1f1b": lambda: compared("bert", "1f1b", 0.1, max_steps=8),
    "gpt2_smoothed": lambda: compared("gpt2", "1f1b", 0.1),
    "gpt2_pipemare": lambda: compared("gpt2", "pipemare", max_steps=8),
    "bert_pipemare": lambda: compared("bert", "pipemare", max_steps=8),
    "gpt2_wavelet": lambda: compared("gpt2", "wavelet"),
    "bert_wavelet": lambda: compared("bert", "wavelet"),
    "smoothed_wavelet": lambda: compared("gpt2", "wavelet", 0.1),
    "gpt2_varied": lambda: varied("gpt2"),
    "bert_varied": lambda: varied("bert"),
    "begun": begun,
    "hidden_outputs": hidden_outputs,
    "stale_auto": stale,
    "stale_absent": lambda: stale(gradient_accumulation_steps=None, train_batch_size=None),
    "refusals": refusals,
    "rates_wavelet": lambda: own_scheduler("wavelet"),
    "rates_ZeRO": lambda: own_scheduler("ZeRO", optimizer=None, wavemare={}),
    "rates_ZeRO_named": lambda: own_scheduler("ZeRO", wavemare={}),
    "rates_1f1b": lambda: own_scheduler("1f1b"),
    "rates_1f1b_alone": lambda: own_scheduler("1f1b", optimizer=None),
    "rates_pipemare_alone": lambda: own_scheduler("pipemare", optimizer=None),
    "modes": modes,
    "modes_1": lambda: modes(zero=1),
    "apart_1f1b": lambda: labels_apart("1f1b"),
    "apart_pipemare": lambda: labels_apart("pipemare"),
    "impossible_train": lambda: impossible(evaluates=False),
    "impossible_evaluate": lambda: impossible(evaluates=True),
}

if __name__ == "__main__":
    leave({name: CASES[name]() for name in sys.argv[2:]})
