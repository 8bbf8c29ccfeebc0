# SPDX-License-Identifier: Apache-2.0
"""Train mixtures of experts over the ranks, beside the whole model in this process.

Arguments: result folder, then a JSON object: by name of a part, the keyword arguments of each run.
"""

import json
import sys
from functools import partial
from pathlib import Path

import peft
import torch
import transformers
from common import (
    AllRanks,
    build_moe,
    configuration,
    difference,
    furthest,
    leave,
    refusal,
    token_batches,
    train_plainly,
    weights_digest,
)
from torch import distributed as dist

import wavemare
from wavemare.models import from_folder, save_pretrained, whole_state_dict
from wavemare.models.adapters import PREFIX
from wavemare.models.families import whole_logits
from wavemare.parallel.experts import split_experts

ACCUMULATION = 2


def batches(rank):
    for tokens in token_batches(rank):
        mask = torch.ones_like(tokens)
        mask[1, -3:] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def all_batches(model_ranks):
    replicas = range(dist.get_world_size() // model_ranks)
    return zip(*(batches(replica) for replica in replicas), strict=True)


def build(*, lora=False, **keys):
    model = build_moe(**keys)
    if not lora:
        return model
    chosen = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.get_peft_model(model, peft.LoraConfig(r=4, **chosen))


def force_one_expert(model):
    """Have every router choose the first expert: all other ranks get no rows."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(lambda *a: (*a[-1][:2], torch.zeros_like(a[-1][2])))


def train_whole(make, *, forced=False, steps=3, clip=float("inf"), model_ranks=1, **model_keys):
    model = build(**model_keys)
    if forced:
        force_one_expert(model)
    optimizer = make(model.parameters())
    losses, norms = train_plainly(
        AllRanks(model),
        optimizer,
        ({"parts": data} for data in all_batches(model_ranks)),
        steps=steps,
        micro_batches=ACCUMULATION,
        clip=clip,
    )
    return model, losses, norms


def collected(model):
    """Return the whole model's weights on rank 0, else nothing."""
    return whole_state_dict(model) or {}


def engine_of(
    model, *, zero=0, size=2, stages=1, tensor=1, optimizer=None, wavemare_keys=None, **changes
):
    config = configuration(zero, gradient_accumulation_steps=ACCUMULATION, **changes)
    config["optimizer"] = optimizer or {"type": "SGD", "params": {"lr": 0.1}}
    config["zero_allow_untested_optimizer"] = True
    del config["scheduler"]
    sizes = {"expert_parallel": {"size": size}, "tensor_parallel": {"size": tensor}}
    config["wavemare"] = {**sizes, **(wavemare_keys or {})}
    if stages > 1:
        config["wavemare"].setdefault("pipeline", {})["stages"] = stages
    return wavemare.initialize(model=model, config=config)[0]


def equal(
    *,
    forced=False,
    steps=3,
    clip=0.0,
    adam=False,
    size=2,
    zero=0,
    stages=1,
    tensor=1,
    config=None,
    annotated=False,
    **model_keys,
):
    """Return how far the weights and losses of an engine are from the whole model's."""
    kind = torch.optim.AdamW if adam else torch.optim.SGD
    make = partial(kind, lr=1e-2 if adam else 0.1, **({"weight_decay": 0.0} if adam else {}))
    params = {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.0}
    chosen = {"type": "AdamW", "params": params} if adam else None
    model = build(**model_keys)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if annotated:  # Whale's M6: experts are split, all else is replicated, in stages
        split = {"size": size, "modules": ["mlp.experts"]}
        wavemare.annotate(model, {"stages": stages, "split": split, "replica": "rest"})
    engine = engine_of(
        model,
        zero=zero,
        size=1 if annotated else size,
        stages=1 if annotated else stages,
        tensor=tensor,
        optimizer=chosen,
        gradient_clipping=clip,
        **(config or {}),
    )
    if forced:
        force_one_expert(engine.module)
    data, losses, norms = batches(engine.data_rank), [], []
    for _ in range(steps):
        losses.append(engine.train_batch(data).item())
        norms.append(float(engine.get_global_grad_norm() or 0))
    batch = next(batches(engine.data_rank))
    _, logits = engine.eval_batch(iter([batch]), return_logits=True, num_micro_batches=1)
    if stages > 1 and logits is not None:  # split stages have parts of them
        logits = whole_logits(engine.module.loss_fn, logits)
    trained = collected(engine.module)
    named = engine.module.named_parameters()
    held = {n: getattr(p, "ds_shape", p.shape)[0] for n, p in named if "gate_up_proj" in n}
    engine.destroy()
    twin, expected, expected_norms = train_whole(
        make,
        forced=forced,
        steps=steps,
        clip=clip or float("inf"),
        model_ranks=stages * tensor,
        **model_keys,
    )
    whole = {name: p.detach() for name, p in twin.named_parameters()}
    trained = {name: tensor for name, tensor in trained.items() if name in whole}  # no buffers
    first, apart = dist.get_rank() == 0, 0.0
    if logits is not None and not forced:  # all but the last stage have none
        with torch.no_grad():
            apart = furthest([logits], [twin.eval()(**batch).logits])
    return {
        "logits": apart,
        "weights": difference(trained, whole) if first else None,
        "changed": difference(before, whole),
        "losses": max(abs(a - b) for a, b in zip(losses, expected, strict=True)),
        "norms": [norms, expected_norms],
        "held": sorted(set(held.values())),
    }


def resume(*, zero=0, size=2, stages=1, tensor=1, config=None, **keys):
    """Save after two steps; go on, and again from the checkpoint."""
    folder = f"{sys.argv[1]}/checkpoint-{size}-{tensor}-{zero}"
    config = {"stages": stages, "tensor": tensor, **(config or {})}
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    engine = engine_of(build(**keys), zero=zero, size=size, optimizer=adam, **config)
    data = batches(engine.data_rank)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    save_pretrained(engine, f"{folder}-exported", merge=True)
    saved = {n.removeprefix(PREFIX): p for n, p in collected(engine.module).items()}
    ahead = [next(data) for _ in range(2 * ACCUMULATION)]
    expected = [engine.train_batch(iter(ahead[i : i + ACCUMULATION])).item() for i in (0, 2)]
    engine.destroy()
    other = engine_of(build(**keys, seed=8), zero=zero, size=size, optimizer=adam, **config)
    other.load_checkpoint(folder)
    got = [other.train_batch(iter(ahead[i : i + ACCUMULATION])).item() for i in (0, 2)]
    other.destroy()
    whole = engine_of(build(**keys), zero=zero, size=1, optimizer=adam, **config)
    refused = [
        refusal(partial(whole.load_checkpoint, folder, load_module_only=alone))
        for alone in (False, True)
    ]
    whole.destroy()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}-exported")
    exported = None
    if dist.get_rank() == 0:  # adapted weights have other names before they are merged
        names = [name for name, _ in loaded.named_parameters() if name in saved]
        assert sum("experts" in name for name in names) == 4
        exported = furthest([saved[n] for n in names], [loaded.get_parameter(n) for n in names])
    read = None
    if zero == 0:  # each rank reads its own part of the folder
        engine = engine_of(from_folder(f"{folder}-exported"), zero=zero, size=size, **config)
        held = collected(engine.module)
        if dist.get_rank() == 0:
            read = furthest([held[n] for n in names], [loaded.get_parameter(n) for n in names])
        engine.destroy()
    return {
        "expected": expected,
        "got": got,
        "refused": refused,
        "exported": exported,
        "read": read,
        "files": sorted(path.name for path in Path(folder).glob("*/mp_rank*")),
    }


def sparse(*, zero=0, **keys):
    """Train with each kind of reduction; return how far the weights are from DeepSpeed's own."""
    weights, digests, metrics = {}, {}, {}
    for mode in ("off", "ordered", "pushpull", "auto"):
        section = {} if mode == "off" else {"sparse_collective": {"mode": mode}}
        engine = engine_of(build_moe(**keys), zero=zero, wavemare_keys=section)
        data = batches(engine.data_rank)
        for _ in range(3):
            engine.train_batch(data)
        digests[mode], weights[mode] = weights_digest(engine), collected(engine.module)
        metrics[mode] = sorted(engine.step_metrics())
        engine.destroy()
    apart = None
    if dist.get_rank() == 0:
        apart = difference(weights["off"], weights["auto"])
    return {"digests": digests, "apart": apart, "metrics": metrics}


def refused(*, size=2, model_keys=None, unlike=False, adapted=False, kind=None, **changes):
    """Return the error of a model or configuration that is not supported."""
    model = build_moe(**(model_keys or {}))
    if adapted:
        model = peft.get_peft_model(model, peft.LoraConfig(target_parameters=["experts.down_proj"]))
    if unlike:
        with torch.no_grad():
            model.lm_head.weight[0, 0] += dist.get_rank()
    if kind is not None:
        model.config.model_type = kind
    return refusal(lambda: engine_of(model, size=size, **changes))


def split_again():
    model = build_moe()
    split_experts(model, None)
    return refusal(lambda: split_experts(model, None))


PARTS = {
    "equal": equal,
    "resume": resume,
    "sparse": sparse,
    "refused": refused,
    "again": split_again,
}

if __name__ == "__main__":
    wavemare.init_distributed()
    runs = json.loads(sys.argv[2])
    leave({name: PARTS[run.pop("part")](**run) for name, run in runs.items()})
