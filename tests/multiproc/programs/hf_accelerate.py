# SPDX-License-Identifier: Apache-2.0
"""``wavemare.accelerate`` beside accelerate's own, and ``wavemare.hf.patch``."""

import importlib
import math
import os
import random
import sys
from functools import partial
from itertools import islice

import accelerate
import numpy
import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DeepSpeedPlugin, DummyOptim
from accelerate.utils import reduce as reduce_imported_before
from common import leave, refusal, warnings_told
from hf_common import Rows, plain_model

import wavemare
import wavemare.accelerate


def configuration(section=None):
    values = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    return values if section is None else {**values, "wavemare": section}


def loop(accelerator_class, section=None, rows=2, state=None, **options):
    AcceleratorState._reset_state(reset_partial_state=True)
    if state is not None:
        PartialState(**state)
    config = {**configuration(section), "train_micro_batch_size_per_gpu": rows}
    accelerator = accelerator_class(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
        gradient_accumulation_steps=2,
        **options,
    )
    model = plain_model("gpt2")
    transformers.set_seed(3)
    loader = torch.utils.data.DataLoader(Rows("gpt2", 15), batch_size=rows)
    model, optimizer, loader = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    losses, gathered = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss).mean().item())
        gathered.append(len(accelerator.gather_for_metrics(batch["labels"])))
    engine, state = type(model), accelerator.get_state_dict(model)
    expected = {name: list(weight.shape) for name, weight in plain_model("gpt2").named_parameters()}
    shapes = {name: list(weight.shape) for name, weight in (state or {}).items()}
    return {
        "whole": state and expected.items() <= shapes.items(),
        "class": f"{engine.__module__}.{engine.__name__}",
        "sparse": getattr(model, "sparse", None) is not None,
        "losses": losses,
        "gathered": gathered,
    }


class Drawn(torch.utils.data.Dataset):
    """Numbers of samples, beside one that each kind of generator draws."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        drawn = [random.random(), numpy.random.rand(), float(torch.rand(()))]
        return {"index": index, "drawn": torch.tensor(drawn, dtype=torch.float64)}


class Shuffled(torch.utils.data.Sampler):
    """An order that Python's generator draws: the process's, or one that nobody seeds."""

    def __init__(self, draws=random):
        self.draws = draws

    def __len__(self):
        return 10

    def __iter__(self):
        order = list(range(10))
        self.draws.shuffle(order)
        return iter(order)


def shared():
    """What ranks that share a model read and count, where nobody seeds anything."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {**configuration({"tensor_parallel": {"size": 2}}), "train_batch_size": "auto"}
    del config["optimizer"]
    accelerator = wavemare.accelerate.Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), gradient_accumulation_steps=2
    )
    random.seed()
    numpy.random.seed()
    torch.seed()
    kinds = {"shuffled": {"shuffle": True}, "sampler": {"sampler": Shuffled()}}
    kinds["workers"] = {"shuffle": True, "num_workers": 1}
    load = partial(torch.utils.data.DataLoader, batch_size=2)
    loaders = [load(Drawn(), **kind) for kind in kinds.values()]
    model = plain_model("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    own = Shuffled(random.Random(int.from_bytes(os.urandom(4))))
    own = load(Rows("gpt2", 10), sampler=own)
    model, optimizer, scheduler, own, *loaders = accelerator.prepare(
        model, optimizer, scheduler, own, *loaders
    )
    read = {}
    for name, loader in zip(kinds, loaders, strict=True):
        epochs = [[{k: v.tolist() for k, v in b.items()} for b in loader] for _ in range(2)]
        skipped = list(accelerator.skip_first_batches(loader, 3))
        read[name] = [*epochs, [batch["index"].tolist() for batch in skipped]]
    optimizer.step()
    scheduler.step()

    def train():
        accelerator.backward(model(**next(iter(own))).loss)

    one = torch.ones(1)
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    reducers = accelerator.reduce, accelerate.utils.reduce, reduce_imported_before
    with accelerator.split_between_processes(["a", "b", "c"]) as part:
        return {
            "read": read,
            "after": [random.random(), float(numpy.random.rand()), float(torch.rand(()))],
            "rate": scheduler.get_last_lr(),
            "part": part,
            "reduced": [f(one, kind).item() for f in reducers for kind in ("sum", "mean", "max")],
            "triggers": [accelerator.check_trigger() for _ in range(2)],
            "gathered": accelerator.gather_for_metrics(["name"]),
            "objects": accelerate.utils.gather_object(["name"]),
            "object": accelerate.utils.gather_object(one) is one,
            "tensors": accelerate.utils.gather({"one": one})["one"].tolist(),
            "padded": accelerator.pad_across_processes(one).tolist(),
            "ranks": [list(accelerator.ranks.model), accelerator.ranks.data_world_size],
            "clips": {
                str(limits): refusal(lambda own=limits: accelerator.clip_grad_norm_([], *own))
                for limits in ((1.0,), (0.5,), (math.inf,), (1.0, math.inf))
            },
            "unseeded": refusal(train),
        }


def prepared():
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {**configuration({}), "gradient_accumulation_steps": 1}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    accelerator = wavemare.accelerate.Accelerator(deepspeed_plugin=plugin)
    model = plain_model("gpt2")
    loader = torch.utils.data.DataLoader(Rows("gpt2", 16), batch_size=2)
    made = accelerator.prepare(model, DummyOptim(model.parameters()), loader)
    return accelerator, *made


def unlike_steps():
    """What is said of loops that step elsewhere than their engine."""

    def by_hand(*, steps=False):
        accelerator, model, optimizer, loader = prepared()
        for batch in islice(loader, 2):
            accelerator.backward(model(**batch).loss / 2)
            if steps:
                optimizer.step()

    def by_two_engines():
        accelerator, model, _, loader = prepared()
        other = plain_model("gpt2")
        accelerator.prepare(other, DummyOptim(other.parameters()))
        accelerator.backward(model(**next(iter(loader))).loss)

    def alone():
        _, model, _, loader = prepared()
        model(**next(iter(loader))).loss.backward()

    loops = partial(by_hand, steps=True), by_hand, by_two_engines, alone
    return [refusal(loop) for loop in loops]


def clipped():
    """What loops are told that clip, or change gradients in another way, after the backward pass.

    Of accelerate's functions, torch's, and a loop that reads weights at another time.
    """
    told = {}
    clips = {
        "norm": lambda accelerator, model: accelerator.clip_grad_norm_(model.parameters(), 1.0),
        "value": lambda accelerator, model: accelerator.clip_grad_value_(model.parameters(), 1.0),
        "torch's": lambda _, model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        "weights": lambda *_: None,
    }
    for name, clip in clips.items():
        accelerator, model, optimizer, loader = prepared()
        with warnings_told("gradients") as lines:
            for batch in islice(loader, 2):
                accelerator.backward(model(**batch).loss)
                said = refusal(partial(clip, accelerator, model))
                optimizer.step()
                sum(weight.sum() for weight in model.parameters())
        told[name] = said.partition(" = ")[0], len(lines)
    return told


def prepared_again(section):
    """Prepare a model that has an engine; then do what is said of it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {
        **configuration(section),
        "gradient_accumulation_steps": 1,
        "train_batch_size": "auto",
    }
    del config["optimizer"]
    accelerator = wavemare.accelerate.Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)
    )
    given, made = plain_model("gpt2"), partial(torch.optim.SGD, lr=0.1)
    loader = torch.utils.data.DataLoader(Rows("gpt2", 8), batch_size=2)
    engine, optimizer, loader = accelerator.prepare(given, made(given.parameters()), loader)
    batch, losses = next(iter(loader)), []

    def train():
        loss = engine(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        losses.append(loss.item())

    train()
    told = [refusal(lambda: accelerator.prepare(engine))]
    told.append(refusal(lambda: accelerator.prepare(engine, optimizer)))
    told.append(refusal(lambda: accelerator.prepare(engine, made(given.parameters()))))
    told.append(refusal(lambda: wavemare.initialize(model=engine, config=config)))
    train()
    folder = f"{sys.argv[1]}/again{len(section)}"
    wavemare.save_pretrained(engine, folder)
    torch.distributed.barrier()
    engine.destroy()
    accelerator.free_memory()
    other = transformers.AutoModelForCausalLM.from_pretrained(folder)
    engine, optimizer = accelerator.prepare(other, made(other.parameters()))
    train()
    engine.destroy()
    return {"told": told, "losses": losses}


def plugins(*sections):
    """Whether the engine of each plugin has the sparse collective, also by another accelerator."""
    AcceleratorState._reset_state(reset_partial_state=True)
    names = {}
    for number, section in enumerate(sections):
        config = {**configuration(section), "train_batch_size": "auto"}
        del config["optimizer"]
        names[str(number)] = DeepSpeedPlugin(hf_ds_config=config)
    first = wavemare.accelerate.Accelerator(deepspeed_plugins=names, gradient_accumulation_steps=2)
    found = []
    for number, selected in enumerate([None, "1", "0", "1"]):
        again = (
            wavemare.accelerate.Accelerator(gradient_accumulation_steps=2) if number > 1 else None
        )
        accelerator = again or first
        if selected is not None:
            accelerator.state.select_deepspeed_plugin(selected)
        model = plain_model("gpt2")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
        loader = torch.utils.data.DataLoader(Rows("gpt2", 4), batch_size=2)
        engine = accelerator.prepare(model, optimizer, loader)[0]
        found.append(engine.sparse is not None)
    return found


def patched():
    import wavemare.hf

    stock, script = transformers.trainer.Trainer, vars(sys.modules["__main__"])
    script["Seq2SeqTrainer"] = transformers.Seq2SeqTrainer
    late = refusal(lambda: importlib.import_module("wavemare.hf.patch"))
    del script["Seq2SeqTrainer"]
    importlib.import_module("wavemare.hf.patch")
    return {
        "trainer": transformers.Trainer is wavemare.hf.Trainer,
        "module": transformers.trainer.Trainer is wavemare.hf.Trainer,
        "derived": issubclass(transformers.Seq2SeqTrainer, wavemare.hf.Trainer),
        "late": late.startswith("LaunchError: wavemare.hf.patch = 'Seq2SeqTrainer'"),
        "stock": issubclass(wavemare.hf.Trainer, stock) and stock is not wavemare.hf.Trainer,
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    ours = wavemare.accelerate.Accelerator
    auto = {"sparse_collective": {"mode": "auto"}}
    leave(
        {
            "stock": loop(accelerate.Accelerator, state={"cpu": True}),
            "ours": loop(ours),
            "told": loop(ours, cpu=True),
            "told staged": refusal(lambda: loop(ours, {"pipeline": {"stages": 2}}, cpu=True)),
            "late": refusal(lambda: loop(ours, state={})),
            "sparse": loop(ours, auto),
            "unlike steps": unlike_steps(),
            "clipped": clipped(),
            "again": [
                prepared_again(section) for section in ({}, {"tensor_parallel": {"size": 2}})
            ],
            "pipeline": refusal(lambda: loop(ours, {"pipeline": {"stages": 2}})),
            "waves": refusal(lambda: loop(ours, {"wavelet": {"mode": "sync"}})),
            "plugins": [plugins(auto, {}), plugins(None, auto)],
            "unlike plugins": refusal(lambda: plugins({}, {"tensor_parallel": {"size": 2}})),
            "tensor": loop(ours, {"tensor_parallel": {"size": 2}}, 4),
            "shared": shared(),
            "patched": patched(),
        }
    )
