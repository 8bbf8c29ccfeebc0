# SPDX-License-Identifier: Apache-2.0
"""Replicas of several ranks that hold parts of a model, beside a slow twin in one process.

Arguments: result folder, cases as JSON: {name: [kind, settings]}. On each rank.
"""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from common import (
    ACCUMULATION,
    QUIET,
    build_gpt2,
    build_moe,
    build_pipeline,
    freeze,
    leave,
    refusal,
    token_batches,
    weights_digest,
)
from local_steps import Twin, end, start, whole_mean
from torch import distributed
from transformers import AutoModelForCausalLM

import wavemare
from wavemare.models import whole_state_dict
from wavemare.parallel.tensor.partition import partition_of

SGD = {"type": "SGD", "params": {"lr": 0.2}}
"""Not AdamW, which makes large steps of small gradients, so that each rounding counts."""
MODELS = {
    "gpt2": partial(build_gpt2, **QUIET),
    "untied": partial(build_gpt2, tie_word_embeddings=False, **QUIET),
    "long": partial(build_gpt2, n_layer=6, tie_word_embeddings=False, **QUIET),
    "moe": build_moe,
}


def begin(local, section, model, **changes):
    whole = MODELS[model]()
    freeze(whole, changes.pop("frozen", ()))
    return start(local, model=whole, wavemare=section, **changes)


def batches(rank):
    return ({"input_ids": tokens, "labels": tokens} for tokens in token_batches(rank))


def own_weights(engine):
    """Return what this rank holds, by the names of the whole model, with a way to cut the whole."""
    module, found = engine.module, {}
    pipeline = hasattr(module, "local_weights")
    named = module.local_weights() if pipeline else dict(module.named_parameters())
    for name, weight in named.items():
        if isinstance(weight, torch.nn.Parameter):
            found[name] = weight
    if pipeline and "embedding" in module.tied_modules and "transformer.wte.weight" not in found:
        found["transformer.wte.weight"] = next(module.tied_modules["embedding"].parameters())
    return found


def cut(whole, weight, engine):
    """Return the part of a whole weight that this rank must hold."""
    if hasattr(weight, "expert_group"):
        ranks = distributed.get_world_size(weight.expert_group)
        return whole.chunk(ranks)[distributed.get_rank(weight.expert_group)]
    partition = partition_of(weight)
    if partition is None:
        return whole
    ranks = engine.settings.tensor_parallel.size
    return partition.part(whole, distributed.get_rank() % ranks, ranks)


def fragments(engine, count, model):
    """Return the elements of each fragment, of each stage by the sizes of its weights."""
    named = list(model.named_parameters())
    starts = dict(
        zip([n for n, _ in named], np.cumsum([0] + [p.numel() for _, p in named]), strict=False)
    )
    names = [name for name in own_weights(engine) if name in starts]
    held = [None] * distributed.get_world_size()
    distributed.all_gather_object(held, names)
    parts = [set() for _ in range(count)]
    size = len(held) // engine.num_replicas
    ends = engine.settings.pipeline.stages > 1 and set(held[0]) & set(held[size - 1])
    for own in held:
        whole = [(name, dict(named)[name].numel()) for name in own]
        # What two stages tie comes first.
        by_size = sorted(whole, key=lambda pair: (pair[0] not in (ends or ()), -pair[1]))
        for place, (name, _) in enumerate(by_size):
            parts[place % count].add(name)
    assert not set.intersection(*parts) or count == 1
    index = {n: np.arange(starts[n], starts[n] + p.numel()) for n, p in named}
    order = [name for name, _ in named]
    return [np.concatenate([index[n] for n in sorted(part, key=order.index)]) for part in parts]


def apart(engine, model):
    """Return how far this rank's weights are from its parts of a whole model's."""
    named, furthest = dict(model.named_parameters()), 0.0
    for name, weight in own_weights(engine).items():
        whole = named["transformer.wte.weight" if name == "lm_head.weight" not in named else name]
        expected = cut(whole.detach(), weight, engine)
        assert expected.shape == weight.shape, name
        furthest = max(furthest, float((weight.detach() - expected).abs().max()))
    return furthest


def twin(local, section, model="gpt2", *, zero=0, steps=9, optimizer=SGD):
    """Train beside the twin; return how far this rank's parts are from its in each step."""
    engine = begin(local, section, model, zero=zero, optimizer=optimizer)
    ranks, build = engine.dp_world_size, MODELS[model]
    parts = fragments(engine, local.get("fragments", 1), build())
    other = Twin(engine.num_replicas, ranks, local, optimizer, build, parts)
    other.data = [
        [batches(r * ranks + n) for n in range(ranks)] for r in range(engine.num_replicas)
    ]
    data, off, metrics = batches(engine.data_rank), [], {}
    for number in range(1, steps + 1):
        engine.train_batch(data)
        other.step(number)
        off.append(apart(engine, other.models[engine.replica]))
        metrics |= engine.step_metrics()
    engine.synchronize()
    whole_mean(other)
    for one in other.models:
        other.write(one, np.arange(len(other.common)), other.common)
    return {"off": off, "common": apart(engine, other.models[0]), "metrics": metrics}


def train(local, section, model="gpt2", *, steps=6, zero=0, frozen=(), **changes):
    """Train; return the whole model's weights in the end, of all ranks alike."""
    engine = begin(local, section, model, zero=zero, frozen=frozen, **changes)
    data = batches(engine.data_rank)
    losses = [float(engine.train_batch(data)) for _ in range(steps)]
    metrics = engine.step_metrics()
    norm = engine.get_global_grad_norm()
    return {
        **everything(engine),
        "losses": losses,
        "norm": norm,
        "metrics": metrics,
        "evaluated": float(engine.eval_batch(batches(0))),
        "data": [engine.data_rank, engine.data_world_size, engine.ranks.model_world_size],
        "batch": engine.train_batch_size(),
    }


def everything(engine):
    """Return the whole model's weights as numbers on rank 0, and the digest of this rank's."""
    whole = whole_state_dict(engine)
    told = {} if whole is None else {n: t.float().flatten().tolist() for n, t in whole.items()}
    return {"whole": told, "digest": weights_digest(engine), "place": engine.replica}


def resume(local, section, model="gpt2", *, name, before, zero=0, **changes):
    """Save with a message in flight, go on; then resume in a new engine: the same bits."""
    folder, found = Path(sys.argv[1], name), []
    for resumed in (False, True):
        engine = begin(local, section, model, zero=zero, seed=1 + resumed, **changes)
        data = batches(engine.data_rank)
        if resumed:
            engine.load_checkpoint(str(folder))
            for _ in range(before * ACCUMULATION):
                next(data)
        else:
            for _ in range(before):
                engine.train_batch(data)
            engine.save_checkpoint(str(folder))
        trained = [float(engine.train_batch(data)) for _ in range(2 * local["every"])]
        mean = engine.step_metrics().get("replica_loss")
        engine.synchronize()
        found.append([trained, mean, weights_digest(engine)])
        end()
    return {"whole": found[0], "resumed": found[1]}


def saved(local, section, model="gpt2", **changes):
    """Return how far the folder of `save_pretrained` is from the weights of this rank."""
    engine = begin(local, section, model, **changes)
    data = batches(engine.data_rank)
    for _ in range(5):
        engine.train_batch(data)
    folder = str(Path(sys.argv[1], "saved", *section))
    wavemare.save_pretrained(engine, folder)
    return apart(engine, AutoModelForCausalLM.from_pretrained(folder))


def carried(local, section, model="gpt2", *, folder, steps=6, zero=0):
    """Save, or go on from the checkpoint of another number of replicas."""
    engine = begin(local, section, model, zero=zero)
    data = batches(engine.data_rank)
    said = refusal(lambda: engine.load_checkpoint(folder)) if Path(folder).exists() else ""
    for _ in range(steps):
        engine.train_batch(data)
    if not said:
        engine.save_checkpoint(folder)
    return {"said": said, "steps": engine.global_steps, **everything(engine)}


def refused(local, section, model="gpt2", **changes):
    return refusal(lambda: begin(local, section, model, **changes))


def own_pipeline(local):
    return refusal(lambda: start(local, model=build_pipeline()))


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {}
    for name, (kind, settings) in json.loads(sys.argv[2]).items():
        results[name] = globals()[kind](**settings)
        end()
    leave(results)
