# SPDX-License-Identifier: Apache-2.0
"""Train pipelines whose stages are split over two ranks each, beside the whole model.

The second argument names the part; every rank leaves what it saw as JSON.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from common import DEVICE, difference, leave, refusal, train_plainly, weights_digest
from deepspeed.utils import groups
from tensor_models import batch, build

import wavemare
from wavemare.engine import init_distributed
from wavemare.models import from_folder, save_pretrained, whole_state_dict

STEPS, ACCUMULATION, MICRO, CLIP = 5, 4, 3, 0.05
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-4}


def batches(name):
    model = build(name).to(DEVICE)
    for seed in itertools.count():
        yield batch(model, seed, MICRO)


def train_whole(name, own_loss=None):
    """The whole model in this process, by plain PyTorch."""
    model = build(name).train()
    if own_loss is not None:
        model.loss_function = own_loss
    adam = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, _ = train_plainly(
        model, adam, batches(name), steps=STEPS, micro_batches=ACCUMULATION, clip=CLIP
    )
    return losses, model.state_dict()


def start(name, pipeline, split=2, dropout=0.0, model=None, **changes):
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAM, "weight_decay": 0.01, "torch_adam": True},
        },
        "wavemare": {"pipeline": {"stages": 2, **pipeline}, "tensor_parallel": {"size": split}},
        **changes,
    }
    groups.mpu = None
    model = model or build(name, residual=dropout, attention=dropout)
    engine, *_ = wavemare.initialize(model=model, config=config)
    return engine


def train(engine, name, steps=STEPS):
    data = batches(name)
    return [float(engine.train_batch(data)) for _ in range(steps)]


def seen(engine, name, expected):
    merged = whole_state_dict(engine)
    return {
        "difference": None if merged is None else difference(merged, expected),
        "moved": difference(expected, build(name).state_dict()),
        "stage": engine.stage_id,
        "elements": sum(p.numel() for p in engine.module.parameters()),
        "whole": engine.module.num_parameters,
        "data_ranks": engine.data_world_size,
    }


def synchronous(names):
    """1F1B beside the whole model, the last one under ZeRO 1."""
    result = {}
    for name in names:
        expected, weights = train_whole(name)
        engine = start(name, {}, zero_optimization={"stage": int(name == names[-1])})
        losses = train(engine, name)
        result[name] = {"losses": losses, "expected": expected, **seen(engine, name, weights)}
    return result


def powered(logits, labels, vocab_size, num_items_in_batch=None, **options):
    """A loss of one's own, which needs the logits of the whole vocabulary."""
    likely = logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None].clamp(0))[..., 0]
    return (-likely[labels[:, 1:] != -100]).pow(1.5).mean()


def own_losses(names):
    """A ``loss_function`` that the model had before, and one that it gets when it has been cut."""
    result = {}
    for name, schedule in itertools.product(names, ("1f1b", "zbv")):
        expected, weights = train_whole(name, powered)
        for when in ("before", "after"):
            model = build(name)
            if when == "before":
                model.loss_function = powered
            engine = start(name, {"schedule": schedule}, model=model)
            model.loss_function = powered
            losses = train(engine, name)
            found = {"losses": losses, "expected": expected, **seen(engine, name, weights)}
            result[f"{name} {schedule} {when}"] = found
    return result


def asynchronous(names):
    """PipeMare beside itself on whole stages, whose two replicas get the same data."""
    result = {}
    for name in names:
        whole = start(name, {"schedule": "pipemare"}, split=1)
        expected = train(whole, name)
        weights = whole_state_dict(whole)
        weights = build(name).state_dict() if weights is None else weights
        for case, changes in {"fp32": {}, "zero": {"zero_optimization": {"stage": 1}}}.items():
            engine = start(name, {"schedule": "pipemare"}, **changes)
            result[f"{name} {case}"] = {
                "losses": train(engine, name),
                "expected": expected,
                "norms": [engine.get_global_grad_norm(), whole.get_global_grad_norm()],
                **seen(engine, name, weights),
            }
        result[f"{name} bf16"] = half_step(name)
        chosen = {"schedule": "pipemare", "pipemare": {"optimizer_policy": "auto"}}
        result["policy"] = refusal(lambda name=name, chosen=chosen: start(name, chosen))
        own = itertools.islice(batches(name), torch.distributed.get_rank() % 2, None)
        result["apart"] = read_apart(name, own)
        result["apart inputs"] = read_apart(name, turned(batches(name)))
    return result


def turned(data):
    """The same labels on the ranks that split a stage, with inputs in another order."""
    for one in data:
        yield {**one, "input_ids": one["input_ids"].roll(torch.distributed.get_rank() % 2, -1)}


def read_apart(name, own):
    """The ranks that split a stage read alike at first; in later steps those of one place do."""
    engine = start(name, {"schedule": "pipemare"})
    alike = batches(name)
    train_on = [alike] * 2 + [own] * 3
    said = [refusal(lambda data=data: engine.train_batch(data)) for data in train_on]
    return [sentence for sentence in said if sentence != "accepted"][:1]


def half_step(name):
    """One step of PipeMare in bf16, as long as the gradient is clipped to be."""
    changes = {
        "bf16": {"enabled": True},
        "optimizer": {"type": "SGD", "params": {"lr": 20.0}},
        "zero_allow_untested_optimizer": True,
    }
    weights: list[Any] = []
    norms = []
    for split in (1, 2):
        engine = start(name, {"schedule": "pipemare"}, split, **changes)
        train(engine, name, 1)
        norms.append(engine.get_global_grad_norm())
        weights.append(whole_state_dict(engine))
    if weights[0] is None:
        return {"norms": norms}
    before = {key: value.bfloat16() for key, value in build(name).state_dict().items()}
    before["lm_head.weight"] = before["transformer.wte.weight"]
    return {
        "norms": norms,
        "difference": difference(*weights),
        "moved": difference(weights[0], before),
    }


def saved(names):
    """Hugging Face folders and checkpoints; bf16 without ZeRO, and its norms."""
    result = {}
    for name in names:
        folder = Path(sys.argv[1], name)
        whole = start(name, {}, split=1, bf16={"enabled": True})
        train(whole, name, 1)
        half = start(name, {}, bf16={"enabled": True})
        train(half, name, 1)
        norms = [float(half.get_global_grad_norm()), float(whole.get_global_grad_norm())]
        engine = start(name, {})
        train(engine, name, 2)
        save_pretrained(engine, folder / "model")
        engine.save_checkpoint(folder / "checkpoint", "two")
        expected = train(engine, name, 2)
        again = start(name, {})
        again.load_checkpoint(folder / "checkpoint", "two")
        merged = whole_state_dict(again)
        result[name] = {
            "norms": norms,
            "expected": expected,
            "losses": train(again, name, 2),
            "digests": [weights_digest(again), weights_digest(engine)],
            "difference": None,
        }
        if merged is not None:
            loaded = type(build(name)).from_pretrained(folder / "model").state_dict()
            result[name]["difference"] = difference(merged, loaded)
        late = start(name, {}, model=from_folder(folder / "model"))  # each rank reads its own part
        merged = whole_state_dict(late)
        if merged is not None:
            result[name]["read"] = difference(merged, loaded)
    return result


def composed(names):
    """Replicas of split asynchronous stages: sparse sums beside dense ones.

    The last case is laid out by nested annotations in place of keys.
    """
    pushpull = {"mode": "pushpull", "bucket_bytes": 20_000}
    schedule = {"schedule": "pipemare", "pipemare": {"slack": 1}}
    keys = {"pipeline": {"stages": 2, **schedule}, "tensor_parallel": {"size": 2}}
    nested = {"pipeline": schedule, "parallel": {"stages": 2, "split": 2, "replica": 2}}
    result = {}
    for name in names:
        for case, section in {
            "ordered dense": {**keys, "sparse_collective": {"mode": "ordered"}},
            "sparse": {**keys, "sparse_collective": pushpull},
            "nested": {**nested, "sparse_collective": pushpull},
        }.items():
            engine = start(name, {}, wavemare=section)
            own = itertools.islice(batches(name), engine.data_rank, None, engine.data_world_size)
            # Few words: most rows of the embedding have no gradient.
            data = ({k: v % 20 if k == "input_ids" else v for k, v in b.items()} for b in own)
            losses = [float(engine.train_batch(data)) for _ in range(10)]
            result[f"{name} {case}"] = {
                "losses": losses,
                "digest": weights_digest(engine),
                "grid": [engine.data_world_size, engine.stage_id],
                "bytes": engine.step_metrics()["sparse_payload_bytes"],
            }
    return result


if __name__ == "__main__":
    init_distributed()
    leave(globals()[sys.argv[2]](sys.argv[3:]))
