# SPDX-License-Identifier: Apache-2.0
"""Waves that never drain, against plain loops of the same rule; leave what differs.

Arguments: result folder.
"""

import copy
import sys
from itertools import islice
from pathlib import Path

import torch
from common import QUIET, build_gpt2, configuration, leave, token_batches

import wavemare
from wavemare.errors import ConfigError

PLAIN = {**QUIET, "use_cache": False}
STEPS = 6
OPTIMIZERS = {
    "sgd": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    "adamw": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
}


def reference_optimizer(kind, parameters):
    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](
        parameters, **{k: v for k, v in OPTIMIZERS[kind]["params"].items() if k != "torch_adam"}
    )


def batches(rank, count):
    tokens = token_batches(rank)
    return [
        {"input_ids": (ids := next(tokens)), "attention_mask": torch.ones_like(ids), "labels": ids}
        for _ in range(count)
    ]


def engine_of(kind, micro_batches, wavelet, *, clipping=0.0, wavemare_keys=None):
    config = configuration(0, optimizer=OPTIMIZERS[kind], gradient_clipping=clipping)
    config["gradient_accumulation_steps"] = micro_batches
    del config["scheduler"]
    config["wavemare"] = {"wavelet": wavelet, **(wavemare_keys or {})}
    engine, *_ = wavemare.initialize(model=build_gpt2(**PLAIN), config=config)
    return engine


def train(engine, data, micro_batches):
    steps = len(data) // micro_batches
    stream = iter(data)
    return [engine.train_batch(stream).item() for _ in range(steps)]


def values(parameters):
    return [parameter.detach().clone() for parameter in parameters]


def put(parameters, weights):
    for parameter, weight in zip(parameters, weights, strict=True):
        parameter.data = weight.clone()


def mean_gradients(model, data, micro_batches):
    """The gradient of this rank's micro-batches, and their losses' mean over the ranks."""
    losses = []
    for batch in data:
        loss = model(**batch).loss
        (loss / micro_batches).backward()
        losses.append(loss.detach())
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    mean = torch.stack(losses).mean()
    torch.distributed.all_reduce(mean)
    return gradients, (mean / torch.distributed.get_world_size()).item()


def averaged(gradients):
    for gradient in gradients:
        torch.distributed.all_reduce(gradient)
        gradient.div_(torch.distributed.get_world_size())
    return gradients


def delayed_loop(kind, data, micro_batches, clipping=0.0):
    """``w_(n+1) = w_n - rate * g(w_(n-1); x_n)``, one step after the other."""
    model = build_gpt2(**PLAIN)
    parameters = list(model.parameters())
    optimizer = reference_optimizer(kind, parameters)
    former = newest = values(parameters)
    losses, stream = [], iter(data)
    if isinstance(micro_batches, int):
        micro_batches = [micro_batches] * (len(data) // micro_batches)
    for count in micro_batches:
        put(parameters, former)
        gradients, loss = mean_gradients(model, islice(stream, count), count)
        losses.append(loss)
        put(parameters, newest)
        for parameter, gradient in zip(parameters, averaged(gradients), strict=True):
            parameter.grad = gradient
        if clipping:
            torch.nn.utils.clip_grad_norm_(parameters, clipping)
        optimizer.step()
        optimizer.zero_grad()
        former, newest = newest, values(parameters)
    return losses, newest


def furthest(engine, weights):
    pairs = zip(engine.module.parameters(), weights, strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def wait_for_each(comm):
    """Have each bucket come back before the next one is sent, as with a slow main thread."""
    send = comm.allreduce_

    def send_and_wait(*args, **kwargs):
        handle = send(*args, **kwargs)
        handle.wait()
        return handle

    comm.allreduce_ = send_and_wait


def case_delayed(rank, kind, micro_batches, clipping=0.0, wavemare_keys=None, at_once=False):
    data = batches(rank, STEPS * micro_batches)
    engine = engine_of(
        kind, micro_batches, {"mode": "async"}, clipping=clipping, wavemare_keys=wavemare_keys
    )
    if at_once:
        wait_for_each(engine.sparse.comm)
    losses = train(engine, data, micro_batches)
    steps = engine.global_steps
    engine.drain()
    expected, weights = delayed_loop(kind, data, micro_batches, clipping)
    result = {
        "losses": losses,
        "expected": expected,
        "weights": furthest(engine, weights),
        "steps": steps,
    }
    engine.destroy()
    return result


def case_warmup(rank):
    """After synchronous steps the next one is computed with the weights that they have left."""
    data = batches(rank, STEPS * 2)
    engine = engine_of("sgd", 2, {"mode": "async", "warmup_steps": STEPS})
    losses = train(engine, data, 2)
    other = engine_of("sgd", 2, {"mode": "sync"})
    result = {"losses": losses, "expected": train(other, data, 2)}
    more = batches(rank + 10, 2)
    result["next"] = [train(e, more, 2) for e in (engine, other)]
    return result


def case_resume(rank, folder, mode):
    """Trained without a stop, with a checkpoint on the way, and on from that checkpoint."""
    data = batches(rank, 2 * STEPS)
    half = STEPS
    whole = engine_of("sgd", 2, {"mode": mode})
    losses = train(whole, data, 2)
    whole.drain()
    first = engine_of("sgd", 2, {"mode": mode})
    before = train(first, data[:half], 2)
    first.save_checkpoint(folder, tag=mode)
    going_on = before + train(first, data[half:], 2)
    first.drain()
    second = engine_of("sgd", 2, {"mode": mode})
    second.load_checkpoint(folder, tag=mode)
    resumed = before + train(second, data[half:], 2)
    second.drain()
    third = engine_of("sgd", 2, {"mode": mode})
    third.load_checkpoint(folder, tag=mode)
    third.drain()  # of what the checkpoint holds, before any step
    half_way = engine_of("sgd", 2, {"mode": mode})
    train(half_way, data[:half], 2)
    half_way.drain()
    return {
        "losses": [losses, going_on, resumed],
        "weights": [furthest(e, values(whole.module.parameters())) for e in (first, second)],
        "drained": furthest(third, values(half_way.module.parameters())),
        "steps": [e.global_steps for e in (whole, first, second)],
    }


def case_replica(rank, micro_batches):
    """The paper's rule in fp64, with plain SGD, and its telescoping identity."""
    rate = 0.1
    OPTIMIZERS["plain"] = {"type": "SGD", "params": {"lr": rate}}
    data = batches(rank, 2 * STEPS * micro_batches)
    config = configuration(0, optimizer=OPTIMIZERS["plain"], gradient_clipping=0.0)
    config["gradient_accumulation_steps"] = micro_batches
    del config["scheduler"]
    config["wavemare"] = {"wavelet": {"mode": "replica"}}
    engine, *_ = wavemare.initialize(model=build_gpt2(**PLAIN).double(), config=config)
    losses = train(engine, data, micro_batches)
    engine.drain()
    # The replica that is next in turn is in place; one step of the first shows the second.
    ours = [values(engine.module.parameters())]
    train(engine, data[:micro_batches], micro_batches)
    engine.drain()
    ours.append(values(engine.module.parameters()))
    models = [build_gpt2(**PLAIN).double() for _ in range(2)]
    sgd = [torch.optim.SGD(model.parameters(), lr=rate) for model in models]
    expected, gradients = two_replicas(models, sgd, data, micro_batches)
    first, last = averaged(gradients[0]), averaged(gradients[-1])
    replicas = [values(model.parameters()) for model in models]
    gap = max(
        (w0 - w1 + rate / 2 * (g0 - gl)).abs().max().item()
        for w0, w1, g0, gl in zip(*ours, first, last, strict=True)
    )
    result = {
        "losses": losses,
        "expected": expected,
        "weights": [
            max((a - b).abs().max().item() for a, b in zip(ours[r], replicas[r], strict=True))
            for r in range(2)
        ],
        "gap": gap,
        "distance": max((a - b).abs().max().item() for a, b in zip(*ours, strict=True)),
    }
    engine.destroy()
    return result


def two_replicas(models, optimizers, data, micro_batches):
    """The paper's rule in two plain models: its losses, and this rank's gradients of each step."""
    losses, all_gradients = [], []
    for step in range(len(data) // micro_batches):
        model, optimizer = models[step % 2], optimizers[step % 2]
        chosen = data[step * micro_batches : (step + 1) * micro_batches]
        gradients, loss = mean_gradients(model, chosen, micro_batches)
        last = all_gradients[-1] if all_gradients else gradients
        smooth = [(new + old) / 2 for new, old in zip(gradients, last, strict=True)]
        all_gradients.append(gradients)
        for parameter, gradient in zip(model.parameters(), averaged(smooth), strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses, all_gradients


def replicas_of(engine, data):
    """Losses of the paper's rule from an engine's weights and momentum on."""
    models = [build_gpt2(**PLAIN), build_gpt2(**PLAIN)]
    optimizers = [reference_optimizer("sgd", list(model.parameters())) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        put(list(model.parameters()), values(engine.module.parameters()))
        optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    return two_replicas(models, optimizers, data, 2)[0]


def case_late_replicas(rank, folder):
    """Replicas that begin with other weights than the engine was built with."""
    data, more = batches(rank, 2 * STEPS), batches(rank + 10, 2 * STEPS)
    synchronous = engine_of("sgd", 2, {"mode": "sync"})
    train(synchronous, data, 2)
    synchronous.save_checkpoint(folder, tag="synchronous")
    warm = engine_of("sgd", 2, {"mode": "replica", "warmup_steps": STEPS})
    train(warm, data, 2)
    loaded = engine_of("sgd", 2, {"mode": "replica"})
    loaded.load_checkpoint(folder, tag="synchronous")
    expected = replicas_of(synchronous, more)
    # Weights alone: the momentum of an engine that has not trained is that of its first steps.
    bare = engine_of("sgd", 2, {"mode": "replica"})
    bare.load_checkpoint(folder, tag="synchronous", load_optimizer_states=False)
    synchronous.optimizer.state.clear()
    return {
        "losses": [train(engine, more, 2) for engine in (warm, loaded)],
        "expected": expected,
        "bare": train(bare, more, 2),
        "expected bare": replicas_of(synchronous, more),
    }


def case_go_back(rank, folder, mode):
    """A load into an engine that trains: at another step, at the same one, of nothing."""
    data = batches(rank, 4 * STEPS)
    engine = engine_of("sgd", 2, {"mode": mode})
    train(engine, data[:STEPS], 2)
    engine.save_checkpoint(folder, tag=f"{mode} back")
    expected = train(engine, data[STEPS : 2 * STEPS], 2)
    other = engine_of("sgd", 2, {"mode": mode})
    train(other, data[-STEPS:], 2)
    losses = []
    for each in (engine, other):
        each.load_checkpoint(folder, tag=f"{mode} back")
        losses.append(train(each, data[STEPS : 2 * STEPS], 2))
    unmoved = engine_of("sgd", 2, {"mode": mode})
    train(unmoved, data[:STEPS], 2)
    assert unmoved.load_checkpoint(folder / "nothing") == (None, None)
    losses.append(train(unmoved, data[STEPS : 2 * STEPS], 2))
    return {"losses": losses, "expected": expected}


def case_resized(rank):
    """Another number of micro-batches between two steps."""
    data = batches(rank, 8)
    engine = engine_of("sgd", 2, {"mode": "async"})
    losses = train(engine, data[:4], 2)
    engine.set_train_batch_size(2 * engine.train_batch_size())
    losses += train(engine, data[4:], 4)
    engine.drain()
    expected, weights = delayed_loop("sgd", data, (2, 2, 4))
    return {"losses": losses, "expected": expected, "weights": furthest(engine, weights)}


def case_manual(rank):
    """A loop of backward and step after waves: refused while some are under way, else as ever."""
    data, more = batches(rank, 4), batches(rank + 10, 2)
    engine = engine_of("sgd", 2, {"mode": "async"})
    train(engine, data, 2)
    refused = None
    try:
        engine.backward(engine(**more[0]).loss)
    except ConfigError as error:
        refused = error.remedy
    engine.drain()
    model = build_gpt2(**PLAIN)
    put(list(model.parameters()), values(engine.module.parameters()))
    optimizer = reference_optimizer("sgd", list(model.parameters()))
    optimizer.load_state_dict(copy.deepcopy(engine.optimizer.state_dict()))
    gradients, _ = mean_gradients(model, more, 2)
    for parameter, gradient in zip(model.parameters(), averaged(gradients), strict=True):
        parameter.grad = gradient
    optimizer.step()
    for batch in more:
        engine.backward(engine(**batch).loss)
        engine.step()
    weights = furthest(engine, values(model.parameters()))
    return {"refused": refused, "weights": weights, "steps": engine.global_steps}


def case_split(rank):
    """One model split over both ranks, which therefore have the same data: losses alone."""
    data = batches(0, STEPS * 2)
    synchronous = engine_of("sgd", 2, {"mode": "sync"})
    other = train(synchronous, data, 2)
    keys = {"tensor_parallel": {"size": 2}}
    engine = engine_of("sgd", 2, {"mode": "async"}, wavemare_keys=keys)
    losses = train(engine, data, 2)
    expected, _ = delayed_loop("sgd", data, 2)
    return {"losses": losses, "expected": expected, "other": other}


if __name__ == "__main__":
    wavemare.init_distributed()
    rank = torch.distributed.get_rank()
    sparse = {"sparse_collective": {"mode": "pushpull", "bucket_bytes": 20_000}}
    folder = Path(sys.argv[1]) / "checkpoints"
    leave(
        {
            "sgd, 1": case_delayed(rank, "sgd", 1),
            "sgd, 3": case_delayed(rank, "sgd", 3),
            "adamw, 2": case_delayed(rank, "adamw", 2),
            "clipped, 2": case_delayed(rank, "sgd", 2, clipping=0.5),
            "sparse, 2": case_delayed(rank, "sgd", 2, wavemare_keys=sparse),
            "back at once, 2": case_delayed(rank, "sgd", 2, wavemare_keys=sparse, at_once=True),
            "warmup": case_warmup(rank),
            "resume async": case_resume(rank, folder, "async"),
            "resume replica": case_resume(rank, folder, "replica"),
            "late replicas": case_late_replicas(rank, folder),
            "back async": case_go_back(rank, folder, "async"),
            "back replica": case_go_back(rank, folder, "replica"),
            "resized": case_resized(rank),
            "manual": case_manual(rank),
            "replica, 1": case_replica(rank, 1),
            "replica, 2": case_replica(rank, 2),
            "split": case_split(rank),  # the last: DeepSpeed does not forget who shares a model
        }
    )
