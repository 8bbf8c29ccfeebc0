# SPDX-License-Identifier: Apache-2.0
"""Properties of the asynchronous engine, in real processes.

Arguments: folder, and a JSON object of [property, settings] by name.
"""

import json
import sys
import weakref
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import torch
from common import (
    furthest,
    leave,
    refusal,
    sine_batches,
    split_stages,
    start_stages,
    weights_digest,
)
from deepspeed.utils import safe_get_full_fp32_param

from wavemare.engine import init_distributed
from wavemare.pipeline.staleness.replay import Replay

WIDTH = 16
batches = partial(sine_batches, WIDTH)


def build_layers(num_stages):
    torch.manual_seed(7)
    layers = []
    for _ in range(num_stages):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh()]
    return layers


def build(num_stages, micro_batches, schedule="pipemare", section=None, guard=None, **config):
    return start_stages(
        build_layers(num_stages),
        stages=num_stages,
        micro_batches=micro_batches,
        section={"schedule": schedule, **({"pipemare": section} if section else {})},
        sections={"guard": guard or {}},
        **config,
    )


def train(engine, data, steps):
    return [float(engine.train_batch(data)) for _ in range(steps)]


def synchronous(num_stages, micro_batches, config):
    """A drain at each step against 1F1B."""
    dtype = torch.bfloat16 if "bf16" in config else torch.float32
    found = {}
    for name, schedule, section in (
        ("1f1b", "1f1b", None),
        ("drained", "pipemare", {"drain_interval": 1}),
        ("warmup", "pipemare", {"warmup_steps": 20}),
    ):
        engine = build(num_stages, micro_batches, schedule, section, **config)
        losses = train(engine, batches(seed=1 + engine.data_rank, dtype=dtype), 20)
        found[name] = [losses, weights_digest(engine)]
    return found


def ends(num_stages, micro_batches):
    """Data that ends in the middle of a step, and a second epoch after it."""
    engine = build(num_stages, micro_batches)
    length = 3 * micro_batches + 1
    data = islice(batches(), length)
    losses = []
    try:
        while True:
            losses.append(float(engine.train_batch(data)))
    except StopIteration:
        samples = engine.global_samples
    data = islice(batches(), length)
    epoch = [float(engine.train_batch(data)) for _ in range(3)]
    return {"losses": losses, "samples": samples, "epoch": epoch, "weights": weights_digest(engine)}


def drains(num_stages, micro_batches, folder):
    """Evaluation and saving in the middle, a planned drain there, and a resume."""
    evaluated = build(num_stages, micro_batches, gradient_clipping=0.2)
    data = batches()
    train(evaluated, data, 4)
    first = float(evaluated.eval_batch(batches(seed=9), num_micro_batches=3))
    again = float(evaluated.eval_batch(batches(seed=9), num_micro_batches=3))
    planned = build(num_stages, micro_batches, section={"drain_interval": 4})
    unplanned = build(num_stages, micro_batches)
    losses = train(planned, batches(), 8)
    others = batches()
    expected = train(unplanned, others, 4)
    unplanned.drain()
    expected += train(unplanned, others, 4)
    evaluated.save_checkpoint(folder)
    before = evaluated.global_steps
    continued = [train(evaluated, data, 6), weights_digest(evaluated)]
    resumed = build(num_stages, micro_batches, gradient_clipping=0.2)
    resumed.load_checkpoint(folder)
    data = batches()
    for _ in range(before * micro_batches):
        next(data)
    return {
        "evaluations": [first, again],
        "drained": [losses == expected, weights_digest(planned) == weights_digest(unplanned)],
        "continued": continued,
        "resumed": [train(resumed, data, 6), weights_digest(resumed)],
    }


class Saved:
    """What the forward passes of a module keep for their backward passes, in bytes."""

    def __init__(self, module):
        self.now, self.after_forward = 0, []
        hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda box: box[0])
        module.register_forward_pre_hook(lambda *_: hooks.__enter__() and None)
        module.register_forward_hook(lambda *_: hooks.__exit__())
        module.register_forward_hook(lambda *_: self.after_forward.append(self.now))

    def pack(self, tensor):
        box = Box([tensor])
        self.now += tensor.nbytes
        weakref.finalize(box, self.free, tensor.nbytes)
        return box

    def free(self, size):
        self.now -= size


class Box(list):
    """A list that can be followed by weak references."""


def versions(num_stages, micro_batches):
    """The staleness of each step on each stage, and what its micro-batches hold at most."""
    engine = build(num_stages, micro_batches, section={"discrepancy_correction": {"mode": "exact"}})
    saved, data, metrics = Saved(engine.module), batches(), []
    for _ in range(12):
        engine.train_batch(data)
        metrics.append(engine.step_metrics())
    staleness = [
        [step[name] for step in metrics if name in step]
        for name in (f"staleness_{stage}" for stage in range(num_stages))
    ]
    held = saved.after_forward
    return {"staleness": staleness, "held": max(held) / held[0]}


def collectives(num_stages, micro_batches, config):
    """Which collectives run in steady state, and over which ranks."""
    engine = build(num_stages, micro_batches, **config)
    data = batches(seed=1 + engine.data_rank)
    train(engine, data, 3)
    called = []

    def noting(name, real):
        def call(*args, **kwargs):
            group = kwargs.get("group") or torch.distributed.group.WORLD
            told = f"{name} later" if kwargs.get("async_op") else name
            called.append([told, torch.distributed.get_process_group_ranks(group)])
            return real(*args, **kwargs)

        return call

    names = ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor")
    names += ("reduce", "reduce_scatter_tensor", "send", "recv", "isend", "irecv")
    with ExitStack() as patched:
        for name in names:
            call = noting(name, getattr(torch.distributed, name))
            patched.enter_context(mock.patch.object(torch.distributed, name, call))
        train(engine, data, 3)
    return {"called": called, "stage": engine.stage_id, "data_rank": engine.data_rank}


def replicas(num_stages, micro_batches, config):
    """Two replicas of each stage against the simulation with their batches joined."""
    engine = build(num_stages, micro_batches, **config)
    losses = train(engine, batches(seed=1 + engine.data_rank), 30)
    engine.drain()
    stages = split_stages(build_layers(num_stages), num_stages)
    twin = Replay(
        stages,
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0),
        micro_batches,
        correction="auto",
    )
    joined = (
        tuple(map(torch.cat, zip(*pair, strict=True)))
        for pair in zip(batches(seed=1), batches(seed=2), strict=True)
    )
    expected = [twin.step(list(islice(joined, micro_batches))) for _ in range(30)]
    return {
        "weights": furthest(engine.module.parameters(), stages[engine.stage_id].parameters()),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
    }


def norms(num_stages, micro_batches, config, section):
    """The norm of a stage's own gradient, the one it clips by, and how far its weights move."""
    engine = build(num_stages, micro_batches, section=section, **config)
    data, found, gradients = batches(), [], {}
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(
            lambda p: gradients.update({p: p.grad.double().clone()})
        )
    for _ in range(8):
        before = [p.detach().clone() for p in parameters]
        rate = engine.get_lr()[0]
        engine.train_batch(data)
        moved = [(p.detach() - b).norm() for p, b in zip(parameters, before, strict=True)]
        own = float(sum(gradient.square().sum() for gradient in gradients.values()))
        found.append([own, engine.get_global_grad_norm(), float(torch.stack(moved).norm()) / rate])
    return found


def half(num_stages, micro_batches):
    """bf16 with ZeRO-1: after all corrections the weights are the rounded masters again."""
    engine = build(
        num_stages,
        micro_batches,
        section={"discrepancy_correction": {"mode": "ema"}},
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
    )
    losses = train(engine, batches(dtype=torch.bfloat16), 10)
    engine.drain()
    masters = [safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    pairs = zip(engine.module.parameters(), masters, strict=True)
    return {
        "equal": all(torch.equal(p.detach(), m.bfloat16()) for p, m in pairs),
        "finite": all(map(torch.isfinite, map(torch.tensor, losses))),
    }


def slack(num_stages, micro_batches, slack):
    """An evaluation with more activations on their way than a step has, and a planned drain."""
    evaluated = build(num_stages, micro_batches, section={"slack": slack})
    data = batches()
    losses = train(evaluated, data, 4)
    evaluated.eval_batch(batches(seed=9), num_micro_batches=1)
    losses += train(evaluated, data, 4)
    evaluated.drain()
    planned = build(num_stages, micro_batches, section={"slack": slack, "drain_interval": 4})
    return {
        "evaluated": [losses, weights_digest(evaluated)],
        "planned": [train(planned, batches(), 8), weights_digest(planned)],
    }


def epochs(num_stages, micro_batches, config):
    """The norms and weights of epochs of finite iterators, and of drains between them."""
    found = []
    for section in (None, {"drain_interval": 2}):
        engine = build(num_stages, micro_batches, section=section, **config)
        noted = []
        for epoch in range(3):
            data = islice(batches(seed=epoch), 2 * micro_batches)
            for _ in range(2):
                engine.train_batch(data)
                noted.append(engine.get_global_grad_norm())
        found.append([noted, weights_digest(engine)])
    return found


def thawed(num_stages, micro_batches, mode):
    """Freeze a layer of each stage after 2 steps, and thaw it after 4."""
    section = {"slack": 1, "discrepancy_correction": {"mode": mode}}
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    found = {}
    for name in ("told", "plain"):
        engine, data = build(num_stages, micro_batches, "pipemare", section, **config), batches()
        weight = next(p for p in engine.module.parameters() if p.ndim > 1)
        moved, before = [], weight.detach().clone()
        for step in range(6):
            weight.requires_grad_(step not in (2, 3))
            if name == "told" or step == 2:
                engine.drain()
            if step >= 3 and name == "plain":
                # The stage that has not yet ended the step before hears of it there.
                found["refused"] = refusal(lambda: engine.train_batch(data))  # noqa: B023
                if found["refused"] != "accepted":
                    break
            else:
                engine.train_batch(data)
            moved.append(not torch.equal(before, weight))
            before = weight.detach().clone()
        found[name] = moved
        engine.destroy()
    return found


def changed(num_stages, micro_batches, way):
    """Which weights passes see after a caller has changed them: how far from two guesses."""
    section = {"discrepancy_correction": {"mode": "predict"}}
    engine, data = build(num_stages, micro_batches, section=section), batches()
    layer = next(each for each in engine.module.modules() if isinstance(each, torch.nn.Linear))
    weight, seen = layer.weight, []
    train(engine, data, 3)
    before = weight.detach().clone()
    train(engine, data, 1)
    last_change = weight.detach() - before
    if way == "halved":
        engine.drain()
        weight.data.mul_(0.5)
    else:  # evaluated with other weights, as with an average of them
        held = weight.detach().clone()
        weight.data.copy_(before.mul(0.9))
        engine.eval_batch(batches(seed=9), num_micro_batches=1)
        weight.data.copy_(held)
    newest = weight.detach().clone()
    layer.register_forward_pre_hook(lambda *_: seen.append(weight.detach().clone()))
    train(engine, data, 1)
    return [[furthest([one], [newest + times * last_change]) for times in (0, 1)] for one in seen]


def wrapped(num_stages, micro_batches):
    """A stream that the caller wraps anew for each call, with a drain in the middle."""
    found, held, wrappers = [], [], []
    for again in (True, False):
        engine, stream, losses = build(num_stages, micro_batches), batches(), []
        for step in range(10):
            given = ((x, y) for x, y in stream) if again else stream
            losses.append(float(engine.train_batch(given)))
            if again:
                wrappers.append(weakref.ref(given))
                held.append(sum(wrapper() is not None for wrapper in wrappers))
            if step == 4:
                engine.drain()
        found.append([losses, weights_digest(engine)])
    return {"wrapped": found[0], "bare": found[1], "held": held}


def reload(num_stages, micro_batches, folder):
    """A checkpoint loaded in the middle of a run that goes on, against fresh engines."""

    def resume(engine, data):
        engine.load_checkpoint(folder)
        return [train(engine, data, 4), weights_digest(engine)]

    def after(number):
        return islice(batches(), number, None)

    engine, data = build(num_stages, micro_batches), batches()
    train(engine, data, 3)
    engine.save_checkpoint(folder)
    train(engine, data, 3)
    read_ahead = num_stages - 1
    same = resume(engine, data)
    anew = resume(engine, after(3 * micro_batches))
    return {
        "same": same,
        "behind": resume(build(num_stages, micro_batches), after(6 * micro_batches + read_ahead)),
        "anew": anew,
        "fresh": resume(build(num_stages, micro_batches), after(3 * micro_batches)),
    }


def left(num_stages, micro_batches, folder):
    """Labels that end before the inputs, then an evaluation of what was saved before."""
    engine, data = build(num_stages, micro_batches), batches()
    train(engine, data, 2)
    engine.save_checkpoint(folder)
    expected = float(engine.eval_batch(batches(seed=9), num_micro_batches=3))
    given = iter(()) if engine.is_last_stage() else data
    told = refusal(partial(train, engine, given, 2))
    engine.load_checkpoint(folder)
    found = float(engine.eval_batch(batches(seed=9), num_micro_batches=3))
    return {"told": told, "evaluations": [found, expected]}


def overflow(num_stages, micro_batches, bad, guard, config):
    """A gradient that is not a number on one stage at a time: the bounds and rates after it."""
    engine = build(num_stages, micro_batches, guard={"nonfinite": guard}, **config)
    parameter = next(engine.module.parameters())

    def spoil(grad):
        return grad * float("nan") if bad.get(str(engine.global_steps)) == engine.stage_id else grad

    parameter.register_hook(spoil)
    data, found = batches(dtype=torch.bfloat16), []
    for _ in range(8):
        engine.train_batch(data)
        kept = [engine.optimizer.clip_grad, engine.optimizer.state_dict()["clip_grad"]]
        found.append([engine.get_lr()[0], bool(engine.was_step_applied()), kept])
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return {"steps": found, "finite": finite}


if __name__ == "__main__":
    init_distributed()
    found = {}
    for key, (name, settings) in json.loads(sys.argv[2]).items():
        if name in ("drains", "reload", "left"):
            settings["folder"] = str(Path(sys.argv[1]) / name)
        found[key] = globals()[name](**settings)
    leave(found)
