# SPDX-License-Identifier: Apache-2.0
"""Wrong numbers in data-parallel training: marked micro-batches spoil one module on one rank."""

import json
import sys
import weakref

import torch
from common import (
    ACCUMULATION,
    LENGTH,
    MICRO,
    VOCABULARY,
    InfiniteGradient,
    build_gpt2,
    configuration,
    leave,
    warnings_told,
    weights_digest,
)

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import NumericsError, WavemareError

MARK = VOCABULARY - 1
PLACE = "transformer.h.1.mlp.act"
SPARSE = {"mode": "ordered", "transport": "torch", "block": 16}


class Trouble:
    """Spoils what a module of a model returns for micro-batches that begin with the mark.

    Args:
        model: GPT-2, or a stage of it.
        what: activation, gradient or loss.
        times: How often; a second pass is a time of its own.
    """

    def __init__(self, model, what, times=-1):
        self.what, self.times, self.now = what, times, False
        model.get_submodule("transformer.wte").register_forward_pre_hook(self.look)
        model.get_submodule(PLACE).register_forward_hook(self.spoil)
        model.register_forward_hook(self.spoil_loss)

    def look(self, module, args):
        self.now = bool(args[0][0, 0] == MARK) and self.times != 0
        self.times -= self.now

    def spoil(self, module, args, output):
        if self.now and self.what == "activation":
            return output * float("nan")
        return InfiniteGradient.apply(output) if self.now and self.what == "gradient" else None

    def spoil_loss(self, module, args, output):
        if self.now and self.what == "loss":
            output.loss = output.loss + float("inf")  # whose gradients are finite
        return output


def batches(steps, bad, micro_batch, rank):
    """Those of some steps, of which the bad one has a marked micro-batch on one rank."""
    generator = torch.Generator().manual_seed(5 + torch.distributed.get_rank())
    found = []
    for step in range(steps):
        for index in range(ACCUMULATION):
            ids = torch.randint(0, MARK, (MICRO, LENGTH), generator=generator)
            marked = step == bad and index == micro_batch and rank == torch.distributed.get_rank()
            if marked:
                ids[0, 0] = MARK
            found.append(ids)
    return found


def build(what, guard, zero=0, times=-1, bf16=False, **sections):
    model = build_gpt2(attn_pdrop=0.1)
    trouble = Trouble(model, what, times)
    config = configuration(zero, wavemare={"guard": guard, **sections})
    if zero == 3:  # biases stay whole, so passes gather the other weights backward, too
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 100
    if bf16:
        config["bf16"] = {"enabled": True}
    engine, *_ = wavemare.initialize(model=model, config=config)
    engine.trouble = trouble
    return engine


def by_train_batch(engine, ids):
    return engine.train_batch({"input_ids": x, "labels": x} for x in ids)


def by_own_loop(engine, ids):
    for x in ids:
        engine.backward(engine(input_ids=x, labels=x).loss)
        engine.step()


def by_own_loss(engine, ids):
    for x in ids:
        logits = engine(input_ids=x).logits[:, :-1]
        engine.backward(torch.nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()))
        engine.step()


def run(engine, ids, loop):
    rates, applied = [], []
    for start in range(0, len(ids), ACCUMULATION):
        torch.manual_seed(int(ids[start].sum()))  # the same dropout in both runs
        loop(engine, ids[start : start + ACCUMULATION])
        rates.append(engine.get_lr()[0])
        applied.append(bool(engine.was_step_applied()))
    engine.drain()
    return rates, applied


def skip(what, rank=1, loop="train_batch", **settings):
    """A step is left out: the weights are those of a run that never sees its data."""
    ids = batches(5, 2, 1, rank)
    engine = build(what, {"nonfinite": "skip"}, **settings)
    with warnings_told("guard") as said:
        rates, applied = run(engine, ids, globals()[f"by_{loop}"])
    found = {
        "applied": applied,
        "skipped": engine.skipped_steps,
        "steps": engine.global_steps,
        "said": said,
    }
    twin = build("nothing", {"nonfinite": "off"}, **settings)
    left = ids[: 2 * ACCUMULATION] + ids[3 * ACCUMULATION :]
    other_rates, _ = run(twin, left, globals()[f"by_{loop}"])
    found["same"] = weights_digest(engine) == weights_digest(twin)
    found["rates"] = rates == [*other_rates[:2], other_rates[1], *other_rates[2:]]
    return found


def stop(what, rank=1, loop="train_batch", guard=None, **settings):
    """The run ends, with the weights of before."""
    guard = {"nonfinite": "stop"} if guard is None else guard
    engine = build(what, guard, **settings)
    ids, reached = batches(4, 2, 0, rank), 0
    before = weights_digest(engine)
    for start in range(0, len(ids), ACCUMULATION):
        try:
            globals()[f"by_{loop}"](engine, ids[start : start + ACCUMULATION])
        except NumericsError as error:
            return {"error": str(error), "at": reached, "same": weights_digest(engine) == before}
        reached, before = reached + 1, weights_digest(engine)
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return {"error": None, "at": reached, "finite": finite}


def too_many():
    """Each step is bad: the third one in a row is too many."""
    engine = build("loss", {"nonfinite": "skip", "max_skips": 3})
    ids = batches(1, 0, 0, 1)
    for step in range(5):
        try:
            by_train_batch(engine, ids)
        except NumericsError as error:
            return {"error": str(error), "at": step}
    return None


def resized(counts, bad):
    """Waves whose steps have other numbers of micro-batches; one is spoilt."""
    engine = build("activation", {"nonfinite": "stop"}, wavelet={"mode": "sync"})
    ids = batches(sum(counts) // ACCUMULATION, *divmod(bad, ACCUMULATION), 1)
    size = MICRO * torch.distributed.get_world_size()
    for step, count in enumerate(counts):
        if count != engine.gradient_accumulation_steps():
            engine.set_train_batch_size(count * size)
        try:
            by_train_batch(engine, ids[sum(counts[:step]) :][:count])
        except NumericsError as error:
            return {"error": str(error)}
    return {"error": None}


def exact():
    """A guarded run without trouble is an unguarded one, bit for bit."""
    ids = batches(4, -1, 0, 0)
    digests = []
    for guard in ({"nonfinite": "off"}, {"nonfinite": "stop"}):
        engine = build("nothing", guard)
        run(engine, ids, by_train_batch)
        digests.append(weights_digest(engine))
    return {"same": digests[0] == digests[1]}


def without_steps():
    """Forward passes in training mode, after which no step comes."""
    engine, ids, inputs = build("nothing", {}), batches(8, -1, 0, 0), []
    while ids:
        inputs.append(weakref.ref(ids[-1]))
        engine(input_ids=ids.pop())
    return {"kept": [reference() is not None for reference in inputs]}


def wrong(what, **sections):
    """Data that the model cannot be trained with: ids or labels beyond it, or no label."""
    engine = build("nothing", {"nonfinite": "stop"}, **sections)
    data = []
    for x in batches(1, -1, 0, 0):
        ids, labels = x.clone(), torch.full_like(x, -100) if what == "none" else x.clone()
        if what != "none":
            (ids if what == "id" else labels)[1, 2] = VOCABULARY + 7
        data.append({"input_ids": ids, "labels": labels})
    try:
        engine.train_batch(iter(data))
    except WavemareError as error:
        return {"error": str(error), "code": error.exit_code}


if __name__ == "__main__":
    init_distributed()
    found = {}
    for key, (name, settings) in json.loads(sys.argv[2]).items():
        if settings.pop("sparse", False):
            settings["sparse_collective"] = SPARSE
        found[key] = globals()[name](**settings)
    leave(found)
