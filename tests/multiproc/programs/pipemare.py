# SPDX-License-Identifier: Apache-2.0
"""Properties of the asynchronous engine, in real processes.

Arguments: folder, and a JSON object of [property, settings] by name.
"""

import hashlib
import json
import sys
from itertools import islice
from pathlib import Path

import deepspeed
import torch
from common import leave
from deepspeed.utils import safe_get_full_fp32_param

import wavemare
from wavemare.engine import init_distributed
from wavemare.pipeline.replay import Replay

WIDTH, SIZE = 16, 2


def build_layers(num_stages):
    torch.manual_seed(7)
    layers = []
    for _ in range(num_stages):
        layers += [torch.nn.Linear(WIDTH, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh()]
    return layers


def build(num_stages, micro_batches, schedule="pipemare", section=None, guard=None, **config):
    module = deepspeed.PipelineModule(
        build_layers(num_stages),
        num_stages=num_stages,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    pipeline = {"schedule": schedule, "stages": num_stages}
    if section:
        pipeline["pipemare"] = section
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "wavemare": {"pipeline": pipeline, "guard": guard or {}},
        **config,
    }
    return wavemare.initialize(model=module, config=config)[0]


def batches(seed=1, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    while True:
        inputs = torch.randn(SIZE, WIDTH, generator=generator)
        yield inputs.to(dtype), torch.sin(3 * inputs).to(dtype)


def digest(engine):
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        found.update(parameter.detach().float().numpy().tobytes())
    return found.hexdigest()


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
        losses = train(engine, batches(1 + engine.data_rank, dtype), 20)
        found[name] = [losses, digest(engine)]
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
    return {"losses": losses, "samples": samples, "epoch": epoch, "weights": digest(engine)}


def epochs(num_stages, micro_batches):
    """Epochs counted by the caller, each of whole steps: as one that is drained between them."""
    found = []
    for section in (None, {"drain_interval": 2}):
        engine = build(num_stages, micro_batches, section=section)
        for epoch in range(4):
            data = islice(batches(epoch), 2 * micro_batches)
            train(engine, data, 2)
        found.append(digest(engine))
    return found


def drains(num_stages, micro_batches, folder):
    """Evaluation and saving in the middle, a planned drain there, and a resume."""
    evaluated = build(num_stages, micro_batches, gradient_clipping=0.2)
    data = batches()
    train(evaluated, data, 4)
    first = float(evaluated.eval_batch(batches(9), num_micro_batches=3))
    again = float(evaluated.eval_batch(batches(9), num_micro_batches=3))
    planned = build(num_stages, micro_batches, section={"drain_interval": 4})
    unplanned = build(num_stages, micro_batches)
    losses = train(planned, batches(), 8)
    others = batches()
    expected = train(unplanned, others, 4)
    unplanned.drain()
    expected += train(unplanned, others, 4)
    evaluated.save_checkpoint(folder)
    before = evaluated.global_steps
    continued = [train(evaluated, data, 6), digest(evaluated)]
    resumed = build(num_stages, micro_batches, gradient_clipping=0.2)
    resumed.load_checkpoint(folder)
    data = batches()
    for _ in range(before * micro_batches):
        next(data)
    return {
        "evaluations": [first, again],
        "drained": [losses == expected, digest(planned) == digest(unplanned)],
        "continued": continued,
        "resumed": [train(resumed, data, 6), digest(resumed)],
    }


def versions(num_stages, micro_batches):
    """The staleness of each micro-batch, how many are held, and what they and old weights take."""
    engine = build(num_stages, micro_batches, section={"discrepancy_correction": {"mode": "exact"}})
    staleness, held = [], []
    note, forward = engine._telemetry.note_staleness, engine._forward

    def noting(value):
        staleness.append(value)
        note(value)

    sizes = {}

    def measured(micro_batch):
        saved = []

        def pack(tensor):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            forward(micro_batch)
        sizes[id(micro_batch)] = sum(saved)
        alive = [m for m in engine._micro_batches.values() if m.outputs != () or m.loss is not None]
        held.append([len(alive), sum(sizes[id(m)] for m in alive)])

    engine._telemetry.note_staleness, engine._forward = noting, measured
    train(engine, batches(), 12)
    return {
        "staleness": staleness,
        "held": [max(n for n, _ in held), max(size for _, size in held)],
        "one": held[0][1],
        "copies": engine._correction.copies,
    }


def collectives(num_stages, micro_batches, config):
    """Which collectives run in steady state, and over which ranks."""
    engine = build(num_stages, micro_batches, **config)
    data = batches(1 + engine.data_rank)
    train(engine, data, 3)
    called = []

    def spy(name):
        real = getattr(torch.distributed, name)

        def call(*args, **kwargs):
            group = kwargs.get("group")
            ranks = torch.distributed.get_process_group_ranks(
                group or torch.distributed.group.WORLD
            )
            called.append([name, ranks])
            return real(*args, **kwargs)

        setattr(torch.distributed, name, call)
        return real

    names = ("all_reduce", "broadcast", "barrier", "all_gather", "all_gather_into_tensor")
    names += ("reduce", "reduce_scatter_tensor", "send", "recv", "isend", "irecv")
    real = {name: spy(name) for name in names}
    train(engine, data, 3)
    for name, function in real.items():
        setattr(torch.distributed, name, function)
    return {"called": called, "stage": engine.stage_id, "data_rank": engine.data_rank}


def replicas(num_stages, micro_batches, config):
    """Two replicas of each stage against the simulation with their batches joined."""
    engine = build(num_stages, micro_batches, **config)
    losses = train(engine, batches(1 + engine.data_rank), 30)
    engine.drain()
    layers = build_layers(num_stages)
    stages = [torch.nn.Sequential(*layers[3 * s : 3 * s + 3]) for s in range(num_stages)]
    twin = Replay(
        stages,
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0),
        micro_batches,
        correction="auto",
    )
    joined = (
        tuple(map(torch.cat, zip(*pair, strict=True)))
        for pair in zip(batches(1), batches(2), strict=True)
    )
    expected = [twin.step(list(islice(joined, micro_batches))) for _ in range(30)]
    pairs = zip(engine.module.parameters(), stages[engine.stage_id].parameters(), strict=True)
    return {
        "weights": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
    }


def norms(num_stages, micro_batches, config, section):
    """What each stage clips by, and how far its weights move."""
    engine = build(num_stages, micro_batches, section=section, **config)
    data, found = batches(), []
    step = engine._step

    def noting():
        before = [p.detach().clone() for p in engine.module.parameters()]
        rate = engine.get_lr()[0]
        step()
        moved = [p.detach() - b for p, b in zip(engine.module.parameters(), before, strict=True)]
        size = torch.stack([m.norm() for m in moved]).norm()
        found.append([engine._norms.own, engine._norms.total, float(size) / rate])

    engine._step = noting
    train(engine, data, 8)
    return {"norms": found, "told": engine.get_global_grad_norm(), "share": engine._norms.share}


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
        "corrected": engine._correction.mode,
    }


def left(engine):
    """What is still expected of, or posted to, the neighbours."""
    exchange, channels = engine._exchange, engine._channels
    inboxes = [channels.from_previous, channels.from_next]
    queued = len(exchange._down) + len(exchange._up)
    return queued + sum(inbox.posted for inbox in inboxes if inbox is not None)


def slack(num_stages, micro_batches, slack):
    """An evaluation with more activations on their way than a step has, and a planned drain."""
    evaluated = build(num_stages, micro_batches, section={"slack": slack})
    data = batches()
    losses = train(evaluated, data, 4)
    ahead = evaluated._stream.unreceived
    evaluated.eval_batch(batches(9), num_micro_batches=1)
    leftovers = [left(evaluated)]
    losses += train(evaluated, data, 4)
    evaluated.drain()
    leftovers.append(left(evaluated))
    planned = build(num_stages, micro_batches, section={"slack": slack, "drain_interval": 4})
    return {
        "evaluated": [losses, digest(evaluated)],
        "planned": [train(planned, batches(), 8), digest(planned)],
        "unreceived": ahead,
        "left": leftovers,
    }


def epoch_norms(num_stages, micro_batches, config):
    """The norms that epochs of finite iterators clip by, and those of a drain between them."""
    found = []
    for section in (None, {"drain_interval": 2}):
        engine = build(num_stages, micro_batches, section=section, **config)
        noted, step = [], engine._step

        def noting(engine=engine, noted=noted, step=step):
            norms = engine._norms
            noted.append([norms.own, norms.total, 0.0 if norms.prefix == 0 else 1.0])
            step()

        engine._step = noting
        for epoch in range(3):
            train(engine, islice(batches(epoch), 2 * micro_batches), 2)
        found.append(noted)
    return found


def wrapped(num_stages, micro_batches):
    """A stream that the caller wraps anew for each call, with a drain in the middle."""
    found, held = [], []
    for again in (True, False):
        engine, stream, losses = build(num_stages, micro_batches), batches(), []
        for step in range(10):
            given = ((x, y) for x, y in stream) if again else stream
            losses.append(float(engine.train_batch(given)))
            if again:
                held.append(len(engine._feed._iterators))
            if step == 4:
                engine.drain()
        found.append([losses, digest(engine)])
    return {"wrapped": found[0], "bare": found[1], "held": held}


def given(num_stages, micro_batches):
    """The iterator set before the first step, and given to each."""
    engine, other = build(num_stages, micro_batches), build(num_stages, micro_batches)
    engine.set_dataiterator(batches())
    losses = [float(engine.train_batch()) for _ in range(4)]
    return [losses, train(other, batches(), 4)]


def reload(num_stages, micro_batches, folder):
    """A checkpoint loaded in the middle of a run that goes on, against fresh engines."""

    def resume(engine, data):
        engine.load_checkpoint(folder)
        return [train(engine, data, 4), digest(engine)]

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


def overflow(num_stages, micro_batches, bad, guard, config):
    """A gradient that is not a number on one stage at a time: the bounds and rates after it."""
    engine = build(num_stages, micro_batches, guard={"nonfinite": guard}, **config)
    parameter = next(engine.module.parameters())

    def spoil(grad):
        return grad * float("nan") if bad.get(str(engine.global_steps)) == engine.stage_id else grad

    parameter.register_hook(spoil)
    data, found, clips = batches(dtype=torch.bfloat16), [], []
    clip = engine._stage_optimizer.clip

    def clipping(*args):
        clip(*args)
        clips.append(engine.optimizer.clip_grad)

    engine._stage_optimizer.clip = clipping
    for _ in range(8):
        engine.train_batch(data)
        kept = [engine.optimizer.clip_grad, engine.optimizer.state_dict()["clip_grad"]]
        found.append([engine.get_lr()[0], bool(engine.was_step_applied()), kept])
    finite = all(bool(p.isfinite().all()) for p in engine.module.parameters())
    return {"steps": found, "finite": finite, "clips": clips}


def main() -> None:
    init_distributed()
    found = {}
    for key, (name, settings) in json.loads(sys.argv[2]).items():
        if name in ("drains", "reload"):
            settings["folder"] = str(Path(sys.argv[1]) / name)
        found[key] = globals()[name](**settings)
    leave(found)


if __name__ == "__main__":
    main()
