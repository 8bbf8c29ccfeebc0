# SPDX-License-Identifier: Apache-2.0
"""Train, evaluate, predict, save and resume through a front end with a layout.

Usage: front_ends.py FOLDER CELL...; in one process transformers and PyTorch alone do it. Each rank
leaves its losses, and the weights and predictions in ``FOLDER/CELL.pt``.
"""

import gc
import importlib
import json
import math
import os
import sys
import time
import traceback
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import peft
import torch
import transformers
from common import DEVICE, QUIET, VOCABULARY, build_gpt2, build_moe
from hf_common import pad
from safetensors.torch import load_file
from transformers import DataCollatorWithFlattening

from front_end_cells import LAYOUTS, STAGES, is_local, is_mixture, replicas_of

SIZE, MICRO, STEPS, RATE, CLIP = 2, 4, 3, 0.5, 0.5
ALONE = os.environ["WORLD_SIZE"] == "1"
if ALONE:  # transformers joins a group wherever a launcher's variables are
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
else:
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim

    import wavemare
    import wavemare.accelerate
    import wavemare.hf
    from wavemare.errors import WavemareError
    from wavemare.hf.steps import TokenMean
    from wavemare.models import save_pretrained


# --- models and data ------------------------------------------------------------------------------


def build(layout, kind, data):
    mixture = is_mixture(layout, data)
    if mixture:
        model, targets = build_moe(auxiliary=data == "auxiliary"), ["q_proj", "v_proj"]
        draw_again(model)
    else:
        changes = {"n_positions": 64, "tie_word_embeddings": False, "use_cache": False}
        model, targets = build_gpt2(**QUIET, **changes), ["c_attn"]
    if kind == "whole":
        return model
    transformers.set_seed(9)
    chosen = {"fan_in_fan_out": not mixture, "init_lora_weights": False}
    chosen["use_dora"] = kind == "DoRA"
    options = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **chosen)
    name = "own" if kind == "named adapter" else "default"
    return peft.get_peft_model(model, options, adapter_name=name)


def draw_again(model):
    """Draw the matrices anew: transformers draws others where ZeRO 3 divides them at once."""
    draws = torch.Generator().manual_seed(11)
    for weight in model.parameters():
        if weight.dim() > 1 or getattr(weight, "ds_shape", [0])[1:]:
            shared = hasattr(weight, "ds_id")
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0, enabled=shared):
                if weight.numel():
                    weight.data.normal_(0, 0.2, generator=draws)


class Rows(torch.utils.data.Dataset):
    """Token rows; odd pairs of "ignored" have no labels."""

    def __init__(self, data, count, *, seed=0, longer=0):
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for number in range(count):
            varied = data in ("lengths", "smoothing", "packed")
            length = 4 + number * 7 % 12 if varied else 12 + longer
            ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
            labels = ids.clone()
            if data != "auxiliary":
                labels[: number % 3] = -100  # as a prompt
            if data == "ignored" and seed == 0 and number // SIZE % 3 == 1:
                labels[:] = -100
            self.rows.append({"input_ids": ids, "labels": labels})

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def flatten(features):
    return DataCollatorWithFlattening()([{k: v.tolist() for k, v in f.items()} for f in features])


def collator(data):
    return flatten if data == "packed" else pad


def inputs(data):
    return ["input_ids", "position_ids" if data == "packed" else "attention_mask"]


def train_rows(data):
    return Rows(data, SIZE * (MICRO * STEPS - 2 if data == "short" else MICRO * STEPS))


def eval_rows(data):
    return Rows(data, 6 if data == "sizes" else 8, seed=1, longer=3 if data == "sizes" else 0)


def eval_size(data):
    return 3 if data == "sizes" else SIZE


def data_ranks(layout):
    return 1 if ALONE else replicas_of(layout)


def clip_of(layout):
    return 0.0 if is_local(layout) else CLIP


def section_of(layout, data):
    section = dict(LAYOUTS[layout])
    if layout in STAGES:
        changes = {"inputs": inputs(data), "dynamic_shape": True}
        section["pipeline"] = {**section["pipeline"], **changes}
    return section


def zero_of(layout):
    stage = int(layout[-1]) if layout.startswith("ZeRO") else 0
    gathers = {"stage3_gather_16bit_weights_on_model_save": True} if stage == 3 else {}
    return {"stage": stage, **gathers}


def saved_weights(folder):
    (path,) = [p for p in Path(folder).rglob("*.safetensors") if "checkpoint-" not in str(p)]
    return load_file(path)


# --- the Trainer ----------------------------------------------------------------------------------


class OwnLoss:
    """Weighs tokens by how wrong they are, from the logits; a mean over those of a batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"][:, 1:].flatten()
        outputs = model(**inputs)
        logits = outputs.logits[:, :-1].flatten(0, 1)
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        loss = ((1 - (-losses).exp()) * losses)[labels != -100].mean()
        return (loss, outputs) if return_outputs else loss


def logits_of(predictions):
    """The logits alone: one process gives the routers' loss and figures of a mixture, too."""
    parts = predictions if isinstance(predictions, tuple) else (predictions,)
    return next(part for part in parts if np.shape(part)[-1:] == (VOCABULARY,))


def by_trainer(front, layout, kind, data, folder):
    kinds: Any = transformers.Trainer, transformers.TrainingArguments
    if not ALONE and front == "trainer":
        kinds = wavemare.hf.Trainer, transformers.TrainingArguments
    elif not ALONE:
        importlib.import_module("wavemare.hf.patch")
        kinds = transformers.Seq2SeqTrainer, transformers.Seq2SeqTrainingArguments
    config = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_of(layout),
        "wavemare": section_of(layout, data),
    }

    def trainer_of():
        model = build(layout, kind, data)  # first: ZeRO 3's arguments change from_config
        arguments = kinds[1](
            output_dir=folder,
            deepspeed=None if ALONE else config,
            use_cpu=DEVICE == "cpu",
            per_device_train_batch_size=SIZE,
            per_device_eval_batch_size=eval_size(data),
            gradient_accumulation_steps=MICRO // data_ranks(layout),
            learning_rate=RATE,
            optim="sgd",
            max_grad_norm=clip_of(layout),
            max_steps=STEPS,
            logging_steps=1,
            label_smoothing_factor=0.1 if data == "smoothing" else 0.0,
            train_sampling_strategy="random" if data in ("equal", "lengths") else "sequential",
            data_seed=5,
            report_to=[],
            save_strategy="steps",
            save_steps=STEPS - 1,
            eval_strategy="steps" if data == "sizes" else "no",
            eval_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        chosen = type("Own", (OwnLoss, kinds[0]), {}) if data == "own loss" else kinds[0]
        return chosen(
            model=model,
            args=arguments,
            data_collator=collator(data),
            train_dataset=train_rows(data),
            eval_dataset=eval_rows(data),
        )

    trainer = trainer_of()
    trainer.train()
    logs = trainer.state.log_history
    named = ("loss", "grad_norm", "learning_rate", "eval_loss")
    found = {name: [entry[name] for entry in logs if name in entry] for name in named}
    found["evaluated"] = [trainer.evaluate()["eval_loss"]]
    if ALONE:  # two replicas weigh their rows together
        trainer.args.per_device_eval_batch_size = 2 * eval_size(data)
        found["evaluated by two"] = [trainer.evaluate()["eval_loss"]]
        trainer.args.per_device_eval_batch_size = eval_size(data)
    tensors = {}
    if data != "packed":  # whose logits have no common length
        predicted = trainer.predict(eval_rows(data))
        tensors |= {"logits": torch.from_numpy(logits_of(predicted.predictions))}
        found["labels"] = predicted.label_ids.tolist()
        found["predicted"] = [predicted.metrics["test_loss"]]
    trainer.save_model(f"{folder}/saved")
    meet()
    weights = saved_weights(f"{folder}/saved")
    if not ALONE:
        again = trainer_of()
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS - 1}")
        again.save_model(f"{folder}/again")
        meet()
        resumed = saved_weights(f"{folder}/again")
        found["resumed"] = all(torch.equal(weights[name], resumed[name]) for name in weights)
    return found, {**tensors, **weights}


# --- loops ----------------------------------------------------------------------------------------


def batches_of(rows, data, size):
    return [
        collator(data)([rows[n] for n in range(start, min(start + size, len(rows)))])
        for start in range(0, len(rows), size)
    ]


def items_of(batches):
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def loss_of(model, data, batch, items):
    """The loss of a batch, and for rows without labels its part of the step's mean."""
    if data == "smoothing":
        smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
        return smoother(model(**batch), batch["labels"], shift_labels=True)
    extra = {"num_items_in_batch": items} if data == "ignored" else {}
    return model(**batch, **extra).loss


def alone_in_a_loop(layout, kind, data, folder):
    model = build(layout, kind, data).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE)
    losses, norms = [], []
    rows = batches_of(train_rows(data), data, SIZE)
    for start in range(0, len(rows), MICRO):
        step, total = rows[start : start + MICRO], 0.0
        for batch in step:
            loss = loss_of(model, data, batch, torch.tensor(items_of(step) / len(step)))
            (loss / MICRO).backward()  # as accelerate divides in a shorter step, too
            total += loss.item() / len(step)
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip_of(layout) or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    model.eval()
    with torch.no_grad():
        evaluated = [
            model(**batch).loss.item()
            for batch in batches_of(eval_rows(data), data, eval_size(data))
        ]
    model.save_pretrained(f"{folder}/saved")
    found = {"loss": losses, "grad_norm": norms, "evaluated": [sum(evaluated) / len(evaluated)]}
    return found, saved_weights(f"{folder}/saved")


def configuration(layout, data):
    return {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": MICRO // data_ranks(layout),
        "gradient_clipping": clip_of(layout),
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero_of(layout),
        "steps_per_print": None,
        "wavemare": section_of(layout, data),
    }


def own_batches(layout, data, batches):
    ranks = data_ranks(layout)
    place = int(os.environ["RANK"]) * ranks // int(os.environ["WORLD_SIZE"])
    return batches[place::2] if ranks == 2 else batches


def by_loop(layout, kind, data, folder):
    def engine_of():
        model = build(layout, kind, data)
        return wavemare.initialize(model=model, config=configuration(layout, data))[0]

    def train(engine, batches, steps):
        weighs = data == "ignored"
        feed = TokenMean(engine).weigh_steps(batches) if weighs else batches
        if weighs or layout in STAGES or layout == "waves":
            return [mean(float(engine.train_batch(feed))) for _ in range(steps)]
        losses = []
        for _ in range(steps):
            total = 0.0
            count = engine.gradient_accumulation_steps()
            for batch in islice(feed, count):
                loss = loss_of(engine, data, batch, None)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / count
            losses.append(mean(total))
        return losses

    own = own_batches(layout, data, batches_of(train_rows(data), data, SIZE))
    engine, norms, losses = engine_of(), [], []
    feed = iter(own)
    for step in range(STEPS):
        losses += train(engine, feed, 1)
        norms.append(float(engine.get_global_grad_norm()))
        if step == STEPS - 2:
            engine.save_checkpoint(folder)
    engine.eval()
    evaluated = own_batches(layout, data, batches_of(eval_rows(data), data, eval_size(data)))
    if layout in STAGES or layout == "waves":
        loss = engine.eval_batch(iter(evaluated), num_micro_batches=len(evaluated))
        means = [float(loss)]
    else:
        with torch.no_grad():
            means = [mean(sum(engine(**b).loss.item() for b in evaluated) / len(evaluated))]
    save_pretrained(engine, f"{folder}/saved")
    meet()
    weights = saved_weights(f"{folder}/saved")
    again = engine_of()
    again.load_checkpoint(folder)
    train(again, islice(own, MICRO // data_ranks(layout) * (STEPS - 1), None), 1)
    save_pretrained(again, f"{folder}/again")
    meet()
    resumed = saved_weights(f"{folder}/again")
    equal = all(torch.equal(weights[name], resumed[name]) for name in weights)
    found = {"loss": losses, "grad_norm": norms, "evaluated": means, "resumed": equal}
    return found, weights


def mean(value):
    total = torch.tensor(value)
    torch.distributed.all_reduce(total)
    return float(total) / torch.distributed.get_world_size()


def by_accelerate(layout, kind, data, folder):
    count = MICRO // data_ranks(layout)

    def prepared():
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = wavemare.accelerate.Accelerator(
            cpu=DEVICE == "cpu",
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=configuration(layout, data)),
            gradient_accumulation_steps=count,
        )
        model = build(layout, kind, data)
        loaders = [
            torch.utils.data.DataLoader(rows, batch_size=size, collate_fn=collator(data))
            for rows, size in ((train_rows(data), SIZE), (eval_rows(data), eval_size(data)))
        ]
        optimizer = DummyOptim([p for p in model.parameters() if p.requires_grad])
        return accelerator, *accelerator.prepare(model, optimizer, *loaders)

    rows = batches_of(train_rows(data), data, SIZE)
    items = [
        torch.tensor(items_of(rows[n : n + MICRO]) / MICRO) for n in range(0, len(rows), MICRO)
    ]

    def train(accelerator, model, optimizer, loader, *, first=0, save=None):
        losses, norms, total = [], [], 0.0
        for number, batch in enumerate(loader, first * count):
            step = number // count
            with accelerator.accumulate(model):
                loss = loss_of(model, data, batch, items[step])
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), clip_of(layout))
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / min(count, len(loader) + first * count - step * count)
            if accelerator.sync_gradients:
                losses.append(float(accelerator.gather(total).mean()))
                norms.append(float(norm))
                total = 0.0
                if step == STEPS - 2 and save is not None:
                    accelerator.save_state(save)
        return losses, norms

    def save(accelerator, model, name):
        accelerator.unwrap_model(model).save_pretrained(
            f"{folder}/{name}",
            is_main_process=accelerator.is_main_process,
            state_dict=accelerator.get_state_dict(model),
        )
        meet()
        return saved_weights(f"{folder}/{name}")

    accelerator, model, optimizer, loader, evaluation = prepared()
    losses, norms = train(accelerator, model, optimizer, loader, save=f"{folder}/state")
    model.eval()
    with torch.no_grad():
        means = [accelerator.gather_for_metrics(model(**b).loss.reshape(1)) for b in evaluation]
    weights = save(accelerator, model, "saved")
    accelerator, model, optimizer, loader, _ = prepared()
    accelerator.load_state(f"{folder}/state")
    left = accelerator.skip_first_batches(loader, (STEPS - 1) * count)
    train(accelerator, model, optimizer, left, first=STEPS - 1)
    resumed = save(accelerator, model, "again")
    found = {
        "loss": losses,
        "grad_norm": norms,
        "evaluated": [float(torch.cat(means).mean())],
        "resumed": all(torch.equal(weights[name], resumed[name]) for name in weights),
    }
    return found, weights


# --- cells ----------------------------------------------------------------------------------------


def meet():
    if not ALONE:
        torch.distributed.barrier()


def run(cell):
    front, layout, kind, data = cell.split("/")
    folder = Path(sys.argv[1], cell.replace("/", "-"))
    if front in ("trainer", "patch"):
        return by_trainer(front, layout, kind, data, str(folder))
    if ALONE:
        return alone_in_a_loop(layout, kind, data, str(folder))
    return {"loop": by_loop, "accelerate": by_accelerate}[front](layout, kind, data, str(folder))


def leave_cells():
    results: dict[str, Any] = {}
    rank = int(os.environ.get("RANK", "0"))
    for cell in sys.argv[2:]:
        began = time.perf_counter()
        try:
            found, tensors = run(cell)
            results[cell] = found
            if rank == 0:
                torch.save(tensors, Path(sys.argv[1], cell.replace("/", "-") + ".pt"))
        except Exception as error:
            if ALONE or not isinstance(error, WavemareError):
                traceback.print_exc()
            results[cell] = {"refused": f"{type(error).__name__}: {error}"}
        results[cell]["seconds"] = time.perf_counter() - began
        gc.collect()
        Path(sys.argv[1], f"rank_{rank}.json").write_text(json.dumps(results))
    if not ALONE:
        meet()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if not ALONE:
        wavemare.init_distributed()
    leave_cells()
