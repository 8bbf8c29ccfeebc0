# SPDX-License-Identifier: Apache-2.0
"""Replicas with local steps beside a slow twin: all replicas in one process, torch and numpy.

Arguments: result folder, cases as JSON: {name: {settings}}. On each rank.
"""

import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import (
    ACCUMULATION,
    DEVICE,
    QUIET,
    build_gpt2,
    configuration,
    freeze,
    leave,
    refusal,
    token_batches,
    weights_digest,
)
from deepspeed.moe.layer import MoE
from hf_common import Rows, arguments, json_file, losses, plain_model
from torch import distributed
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import GPT2LMHeadModel

import wavemare
from wavemare.engine.optim.optimizers import make_muon
from wavemare.hf import Trainer

sys.path.append(str(Path(__file__).parents[2]))  # of support
from support.message_twin import Messages

ADAM = {"lr": 1e-2, "weight_decay": 0.0}
ADAMW = {"type": "AdamW", "params": {**ADAM, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.05}}
ENGINES = []


def start(local, *, zero=0, model=None, data=None, seed=7, **changes):
    """Return an engine whose replicas are ranks, unless ``local`` says so; None turns it off."""
    torch.manual_seed(seed)
    local = {"replica": "rank", **local} if local else {}
    optimizer = changes.pop("optimizer", ADAMW)
    clip = changes.pop("clip", 0.0)
    config = configuration(zero, gradient_clipping=clip, optimizer=optimizer, **changes)
    config.pop("scheduler")
    config["zero_allow_untested_optimizer"] = True  # SGD
    config["wavemare"] = {**changes.get("wavemare", {}), "local_steps": local}
    if "train_batch_size" in changes:
        del config["gradient_accumulation_steps"]
    model = model or build_gpt2(**QUIET)
    ENGINES.append(wavemare.initialize(model=model, config=config, training_data=data)[0])
    return ENGINES[-1]


def end():
    """Destroy the engines of a case: DeepSpeed keeps the grid of one."""
    while ENGINES:
        ENGINES.pop().destroy()


def batches(rank):
    return ({"input_ids": tokens, "labels": tokens} for tokens in token_batches(rank))


def flat(model):
    return parameters_to_vector(model.parameters()).detach().float().cpu().numpy().copy()


def inner(model, optimizer):
    if optimizer == ADAMW:
        return torch.optim.AdamW(model.parameters(), **ADAM)
    if optimizer["type"] == "SGD":
        return torch.optim.SGD(model.parameters(), **optimizer["params"])
    return make_muon(model, optimizer["params"])(model.parameters())


class Twin:
    """All replicas in one process, by the equations of local steps.

    Args:
        replicas: Their number.
        ranks: Of a replica, which read other data.
        local: The section.
        optimizer: The section.
        build: Makes the model.
        parts: The elements of each fragment; by the sizes of the whole model's weights if omitted.
    """

    def __init__(self, replicas, ranks, local, optimizer, build=None, parts=None):
        self.local, self.flights = local, []
        build = build or partial(build_gpt2, **QUIET)
        self.models = [build().to(DEVICE) for _ in range(replicas)]
        self.optimizers = [inner(m, optimizer) for m in self.models]
        self.data = [
            [batches(replica * ranks + rank) for rank in range(ranks)]
            for replica in range(replicas)
        ]
        self.common = flat(self.models[0])
        self.momentum = np.zeros_like(self.common)
        sizes = [p.numel() for p in self.models[0].parameters()]
        count = local.get("fragments", 1)
        order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
        starts = np.cumsum([0, *sizes])
        self.parts = parts or [
            np.concatenate([np.arange(starts[i], starts[i + 1]) for i in sorted(order[f::count])])
            for f in range(count)
        ]
        self.messages = None
        if bits := local.get("bits"):
            self.messages = [Messages(replicas, len(part), bits) for part in self.parts]

    def write(self, model, index, values):
        weights = flat(model)
        weights[index] = values
        vector_to_parameters(torch.from_numpy(weights).to(DEVICE), model.parameters())

    def step(self, number):
        for model, optimizer, data in zip(self.models, self.optimizers, self.data, strict=True):
            gradients = []
            for own in data:
                for _ in range(ACCUMULATION):
                    (model(**next(own)).loss / ACCUMULATION).backward()
                gradients.append([p.grad / len(data) for p in model.parameters()])
                optimizer.zero_grad()
            for p, *parts in zip(model.parameters(), *gradients, strict=True):
                p.grad = sum(parts)
            optimizer.step()
            optimizer.zero_grad()
        every, count = self.local["every"], len(self.parts)
        self.deliver(number)
        for f, index in enumerate(self.parts):
            if (number - f * every // count) % every == 0:
                sent = [flat(model)[index] for model in self.models]
                changes = [self.common[index] - weights for weights in sent]
                mean = self.mean(f, changes)
                self.flights.append((number + self.local.get("overlap", 0), index, mean, sent))
        self.deliver(number)

    def mean(self, fragment, changes):
        if self.messages:
            return self.messages[fragment].mean(changes)
        total = np.zeros_like(changes[0])
        for change in changes:
            total = total + change
        return total * np.float32(1 / len(changes))

    def deliver(self, number):
        outer = {"lr": 1.0, "momentum": 0.5, **self.local.get("outer", {})}
        if self.local["mode"] == "average":
            outer = {"lr": 1.0, "momentum": 0.0}
        lr, mu = np.float32(outer["lr"]), np.float32(outer["momentum"])
        while self.flights and self.flights[0][0] <= number:
            _, index, mean, sent = self.flights.pop(0)
            step = mean
            if mu:
                self.momentum[index] = self.momentum[index] * mu + mean
                step = self.momentum[index] * mu + mean
            self.common[index] = self.common[index] - step * lr
            for model, then in zip(self.models, sent, strict=True):
                new = self.common[index]
                if self.local.get("overlap") and self.local.get("mixing", "carry") == "carry":
                    new = new + (flat(model)[index] - then)
                self.write(model, index, new)


def whole_mean(other):
    """Return what `synchronize` gives all: what messages have left out is not lost."""
    other.deliver(math.inf)
    for fragment, index in enumerate(other.parts):
        mean = np.mean([flat(model)[index] for model in other.models], axis=0)
        if other.messages:
            messages = other.messages[fragment]
            mean -= np.mean(messages.waiting, axis=0) + messages.owed
        other.common[index] = mean
    return other.common


def twin(local, *, steps=9, zero=0, optimizer=ADAMW):
    """Train beside the twin; say whether all bits of this replica's weights are the twin's."""
    engine = start(local, zero=zero, optimizer=optimizer)
    other = Twin(engine.num_replicas, engine.dp_world_size, local, optimizer)
    if not zero:  # weights that change before the first step are the common ones
        other.common *= 2
        for model in (engine.module, *other.models):
            vector_to_parameters(2 * parameters_to_vector(model.parameters()), model.parameters())
    rank = distributed.get_rank()
    data, equal, furthest, metrics = batches(rank), [], 0.0, []
    for number in range(1, steps + 1):
        engine.train_batch(data)
        other.step(number)
        own, expected = flat(engine.module), flat(other.models[engine.replica])
        equal.append(bool((own == expected).all()))
        furthest = max(furthest, float(np.abs(own - expected).max()))
        metrics.append(engine.step_metrics())
    found = {"equal": equal, "furthest": furthest, "metrics": metrics, "digest": finish(engine)}
    return {**found, "off": float(np.abs(flat(engine.module) - whole_mean(other)).max())}


def finish(engine):
    """Synchronize; return what must be the same on all ranks."""
    engine.synchronize()
    return weights_digest(engine)


def train(local, *, steps, zero=0, frozen=(), **changes):
    """Train; return what a user sees, and the weights before the end and after `synchronize`."""
    engine = start(local, zero=zero, **changes)
    data = batches(distributed.get_rank())
    for step in range(steps):
        if str(step) in frozen:
            freeze(engine.module, frozen[str(step)])
        engine.train_batch(data)
    before = flat(engine.module)
    metrics = engine.step_metrics()
    return {
        "digest": finish(engine),
        "moved": float(np.abs(before - flat(engine.module)).max()),
        "metrics": metrics,
        "weights": flat(engine.module).tolist(),
    }


def conserved(local, then=None):
    """Stop the inner steps: exchanges alone must keep the sum of the replicas' weights."""
    engine = start(local, optimizer=SGD)
    data, sums = batches(distributed.get_rank()), []
    for number in range(12):
        if number == 3:
            engine.optimizer.param_groups[0]["lr"] = 0.0
        if number == 5 and then:  # resume with other settings while a message is in flight
            engine.save_checkpoint(folder := str(Path(sys.argv[1], "conserved")))
            end()
            engine = start(then, optimizer=SGD)
            engine.load_checkpoint(folder)
        engine.train_batch(data)
        total = torch.from_numpy(flat(engine.module))
        distributed.all_reduce(total)
        sums.append(total)
    differences = [float((total - sums[2]).abs().max()) for total in sums[3:]]
    return {"differences": differences, "digest": weights_digest(engine)}


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        return {"input_ids": torch.full((4,), number % 50), "number": number}


def traps(local, zero):
    """Batch arithmetic, sampler, initial weights, checkpoint names, the loss."""
    torch.manual_seed(distributed.get_rank())
    model = build_gpt2(**QUIET)
    for parameter in model.parameters():
        parameter.data.add_(distributed.get_rank())
    ranks = distributed.get_world_size()
    sizes = {"train_batch_size": 4 * ranks, "train_micro_batch_size_per_gpu": 2}
    engine = start(local, zero=zero, model=model, data=Numbers(), **sizes)
    first = weights_digest(engine)
    data = batches(distributed.get_rank())
    trained = [engine.train_batch(data).item() for _ in range(4)]
    folder = Path(sys.argv[1], f"traps{zero}")
    engine.save_checkpoint(str(folder), "tag")
    seen = [int(n) for batch in engine.training_dataloader for n in batch["number"]]
    evaluated = engine.eval_batch(data).item()
    engine.set_train_batch_size(8 * ranks)
    return {
        "first": first,
        "batch": engine.train_batch_size(),
        "accumulation": engine.gradient_accumulation_steps(),
        "samples": engine.global_samples,
        "seen": seen,
        "losses": trained,
        "replica_loss": engine.step_metrics().get("replica_loss"),
        "evaluated": evaluated,
        "refusal": refusal(lambda: engine.set_train_batch_size(8 * ranks + 1)),
        "data": [engine.data_rank, engine.data_world_size],
        "files": sorted(p.relative_to(folder / "tag").as_posix() for p in folder.rglob("*.pt")),
    }


def resume(local, *, name, before, zero=0, **changes):
    """Save with a message in flight, go on; then resume in a new engine: the same bits."""
    folder, found = Path(sys.argv[1], name), []
    steps = 2 * local["every"]
    for resumed in (False, True):
        engine = start(local, zero=zero, seed=1 + resumed, **changes)
        data = batches(distributed.get_rank())
        if resumed:
            engine.load_checkpoint(str(folder))
            for _ in range(before * ACCUMULATION):
                next(data)
        else:
            for _ in range(before):
                engine.train_batch(data)
            engine.save_checkpoint(str(folder))
        trained = [engine.train_batch(data).item() for _ in range(steps)]
        mean = engine.step_metrics().get("replica_loss")
        found.append([trained, mean, weights_digest(engine), finish(engine)])
        end()
    return {"whole": found[0], "resumed": found[1]}


def save(local, *, folder, steps, zero=0):
    engine = start(local, zero=zero)
    data = batches(distributed.get_rank())
    for _ in range(steps):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    engine.synchronize()
    return weights_digest(engine)


def load(local, *, folder, zero=0, alone=False):
    """Go on with another number of replicas, or say why not."""
    engine = start(local, zero=zero)
    said = refusal(lambda: engine.load_checkpoint(folder, load_module_only=alone))
    result = {"said": said, "steps": engine.global_steps, "digest": weights_digest(engine)}
    if said == "accepted":
        data = batches(distributed.get_rank())
        for _ in range(2 * local["every"]):
            engine.train_batch(data)
        result |= {"end": finish(engine)}
    return result


def unlike(local, other):
    """One rank has another configuration: all ranks say so."""
    return refusal(lambda: start(other if distributed.get_rank() == 1 else local))


def out_of_step(local):
    """One replica has made a step more, or other common weights: both ranks say so."""
    engine = start(local)
    data, said = batches(distributed.get_rank()), []
    if distributed.get_rank() == 1:
        engine.global_steps += 1
    for _ in range(2):
        said.append(refusal(lambda: engine.train_batch(data)))
    return said


def diverged(local, guard, synchronizes=False):
    """One replica gets a number that is not finite."""
    engine = start(local, wavemare={"guard": {"nonfinite": guard}})
    data, said = batches(distributed.get_rank()), "accepted"
    for number in range(1, 9):
        if number == 3 and distributed.get_rank() == 1:
            next(engine.module.parameters()).data.fill_(float("nan"))
        alone = number < 3 or not synchronizes
        said = refusal(lambda: engine.train_batch(data) if alone else engine.synchronize())  # noqa: B023
        if said != "accepted":
            break
    return [number, said]


def lost(local):
    """Rank 1 ends within a run."""
    engine, data = start(local), batches(distributed.get_rank())
    for step in range(6):
        if step == 3 and distributed.get_rank():
            os._exit(0)
        engine.train_batch(data)


def sparse(local):
    """Embeddings whose gradients are rows: of each replica others."""
    layers = torch.nn.Sequential(torch.nn.Embedding(8, 2, sparse=True))
    return refusal(lambda: start(local, model=layers, optimizer={"type": "SGD"}))


def experts(local):
    """DeepSpeed's layer of experts, of which each replica has others."""
    layer = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=2)
    return refusal(lambda: start(local, model=torch.nn.Sequential(layer)))


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)

    def forward(self, values):
        return self.out(self.norm(values)).square().mean()


def statistics(local):
    """Running statistics of batch normalization are the same after `synchronize`."""
    engine = start(local, model=Normed())
    generator = torch.Generator().manual_seed(distributed.get_rank())
    for _ in range(3):
        engine.train_batch(iter([torch.randn(2, 4, generator=generator) for _ in range(2)]))
    norm = engine.module.norm
    before = norm.running_mean.tolist()
    engine.synchronize()
    return {"before": before, "after": norm.running_mean.tolist()}


def trainer(local):
    """A Trainer trains replicas, and what it saves are the weights that all have then."""
    section = {"local_steps": {"replica": "rank", **local}}
    given = arguments("trainer", json_file(1, section), max_steps=6)
    one = Trainer(model=plain_model("gpt2"), args=given, train_dataset=Rows("gpt2", 32))
    ENGINES.append(one.train() and one.deepspeed)
    before = flat(one.deepspeed.module)
    folder = str(Path(sys.argv[1], "model"))
    one.save_model(folder)
    saved = GPT2LMHeadModel.from_pretrained(folder)
    return {
        "losses": losses(one),
        "batch": one.deepspeed.train_batch_size(),
        "moved": float(np.abs(before - flat(one.deepspeed.module)).max()),
        "off": float(np.abs(flat(saved) - flat(one.deepspeed.module)).max()),
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for name, (kind, settings) in json.loads(sys.argv[2]).items():
        results[name] = globals()[kind](**settings)
        end()
    leave(results)
