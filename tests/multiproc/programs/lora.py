# SPDX-License-Identifier: Apache-2.0
"""Train LoRA models of peft in pipelines and by ZeRO, and save their adapters.

Usage: lora.py FOLDER ACTION...; each rank leaves the results by action.
"""

import gc
import os
import sys
from contextlib import nullcontext
from functools import partial

import peft
import torch
import transformers
from common import DEVICE, configuration, leave, own_groups, refusal, token_batches
from hf_common import arguments, json_file
from safetensors.torch import load_file

import wavemare
import wavemare.hf
from wavemare.models import save_pretrained

STEPS, RATE = 2, 0.5
WITHOUT_STAGES = ("zero0", "zero1", "zero2", "zero3", "tensor", "added")


def base_model():
    transformers.set_seed(7)
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,  # which all ranks that split layers hold
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return transformers.Qwen3ForCausalLM(config)


def lora_model(**changes):
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(base_model(), peft.LoraConfig(**{**options, **changes}))


def batches():
    for tokens in token_batches(0):
        yield {"input_ids": tokens, "labels": tokens}


def start(schedule="1f1b", *, model=None, stages=2, zero=0, tensor=1, bf16=None, **pipeline):
    ours = {"pipeline": {"stages": stages, "schedule": schedule, **pipeline}}
    ours["tensor_parallel"] = {"size": tensor}
    config = configuration(zero, wavemare=ours, gradient_clipping=0.0)
    config["bf16"] = bf16 or {"enabled": False}
    del config["scheduler"]
    config["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    config["zero_allow_untested_optimizer"] = True
    model = lora_model() if model is None else model
    return wavemare.initialize(model=model, config=config)[0]


def alone(**changes):
    """Return a model that one process has trained."""
    model, data = lora_model(**changes).to(DEVICE).train(), batches()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(STEPS):
        for _ in range(2):
            (model(**next(data), use_cache=False).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def difference(folder, model):
    """Return how far the adapter of a folder is from a model's, and whether its names are."""
    ours = load_file(f"{folder}/adapter_model.safetensors")
    theirs = peft.get_peft_model_state_dict(model)
    assert list(ours) == sorted(theirs)
    return max(float((ours[name] - theirs[name].cpu()).detach().abs().max()) for name in ours)


def saved(engine, name, **changes):
    """Save adapter and whole model, and compare both folders with one process."""
    save_pretrained(engine, name)
    save_pretrained(engine, f"{name}-merged", merge=True)
    torch.distributed.barrier()
    theirs, ids = alone(**changes), next(batches())["input_ids"]
    loaded = peft.PeftModel.from_pretrained(base_model(), name).to(DEVICE).eval()
    whole = transformers.AutoModelForCausalLM.from_pretrained(f"{name}-merged").to(DEVICE).eval()
    found = {"files": sorted(os.listdir(name)), "whole": sorted(os.listdir(f"{name}-merged"))}
    with torch.no_grad():
        expected = theirs(ids).logits
        found["logits"] = float((loaded(ids).logits - expected).abs().max())
        merged = theirs.merge_and_unload()(ids).logits
        found["merged"] = float((whole(ids).logits - merged).abs().max())
    found["moved"] = difference(name, lora_model(**changes))
    return found | {"adapter": difference(name, alone(**changes))}


def pipeline(schedule, **changes):
    engine, data = start(schedule, model=lora_model(**changes)), batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    return saved(engine, f"{schedule}{len(changes)}", **changes)


def pipemare():
    """A stale pipeline learns one batch, and saves what it has learnt."""
    engine, batch = start("pipemare"), next(batches())
    losses = [float(engine.train_batch(iter([batch] * 4))) for _ in range(20)]
    save_pretrained(engine, "pipemare")
    torch.distributed.barrier()
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(base_model(), "pipemare").to(DEVICE).eval()
        loss = model(**batch).loss
    return {"losses": losses, "saved": float(loss)}


def zero(stage):
    engine, data = start(stages=1, zero=stage), batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    return saved(engine, f"zero{stage}")


def tensor(stages=1):
    """Split every layer, of which each has adapters."""
    engine, data = start(stages=stages, tensor=2), batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    model = lora_model(lora_dropout=0.1)
    refused = refusal(lambda: start(model=model, stages=stages, tensor=2))
    return saved(engine, "tensor") | {"refused": refused}


def resume(exclude):
    engine, data = start(), batches()
    engine.train_batch(data)
    engine.save_checkpoint(f"resume{exclude}", exclude_frozen_parameters=exclude)
    again, engines = batches(), [engine, start()]
    for _ in range(2):
        next(again)
    engines[1].load_checkpoint(f"resume{exclude}", load_module_strict=not exclude)
    losses = [float(e.train_batch(d)) for e, d in zip(engines, (data, again), strict=True)]
    states = [e.module.local_weights() for e in engines]
    same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    size = sum(f.stat().st_size for f in os.scandir(f"resume{exclude}/global_step1"))
    return {"same": same and losses[0] == losses[1], "bytes": size}


def live_bytes():
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def memory():
    """What a correction of PipeMare keeps, of the model's weights and of the adapters'."""
    found = {}
    for name, model in (("model", base_model), ("lora", lora_model)):
        for mode in ("off", "ema"):
            setting = {"pipemare": {"discrepancy_correction": {"mode": mode}}}
            before = live_bytes()
            engine, data = start("pipemare", model=model(), untie=True, **setting), batches()
            for _ in range(3):
                engine.train_batch(data)
            engine.drain()
            engine.optimizer.zero_grad()
            found[f"{name} {mode}"] = live_bytes() - before
            trained = [p.nbytes for p in engine.module.parameters() if p.requires_grad]
            found[name] = sum(trained)
            engine.destroy()
            del engine
    return found


def trainer():
    """The Trainer trains an adapter in a pipeline, and saves it."""
    tokens = next(batches())["input_ids"]
    rows = [{"input_ids": row, "labels": row} for row in tokens] * 8
    config = json_file(0, {"pipeline": {"stages": 2}})
    ours = wavemare.hf.Trainer(
        args=arguments("trained", config, max_steps=4), model=lora_model(), train_dataset=rows
    )
    ours.train()
    ours.save_model("trained-adapter")
    torch.distributed.barrier()
    with torch.no_grad():
        loaded = peft.PeftModel.from_pretrained(base_model(), "trained-adapter").eval()
        losses = [float(m(tokens, labels=tokens).loss) for m in (lora_model().eval(), loaded)]
    return {"losses": losses, "engine": type(ours.deepspeed).__name__}


def calls(schedule):
    """What calls of peft on a pipeline give, and on the same model in one process."""
    model = lora_model()
    engine, batch = start(schedule, model=model), next(batches())

    def loss():
        return float(engine.eval_batch(iter([batch]), num_micro_batches=1))

    def on(part, evaluate):
        found = {"before": evaluate()}
        with part.disable_adapter():
            found["disabled"] = evaluate()
        found["enabled"] = evaluate()
        part.merge_adapter()
        found["merged"] = evaluate()
        part.unmerge_adapter()
        part.set_adapter("default")
        found["again"] = evaluate()
        found["active"] = [part.active_adapter, list(part.active_adapters), list(part.peft_config)]
        return found

    alone = lora_model().to(DEVICE).eval()
    with torch.no_grad():
        expected = on(alone, lambda: float(alone(**batch).loss))
    found = on(engine.module, loss)
    with model.disable_adapter():
        found["by the model"] = loss()
    with engine.disable_adapter():
        found["by the engine"] = loss()
    found["trained"] = [float(engine.train_batch(iter([batch] * 2))) for _ in range(2)]
    engine.module.merge_adapter()
    refused = {"merge": refusal(lambda: save_pretrained(engine, "merged-twice", merge=True))}
    engine.module.unmerge_adapter()
    save_pretrained(engine, "merged-once", merge=True)
    refused["other"] = refusal(lambda: engine.module.set_adapter("other"))
    for name in ("merge_and_unload", "add_adapter", "load_adapter", "print_trainable_parameters"):
        refused[name] = refusal(getattr(engine.module, name))
    return {"found": found, "expected": expected, "refused": refused}


def said_to(model, other):
    """Return what a model that an engine has says to peft's calls for further adapters."""
    return {
        "add": refusal(lambda: model.add_adapter("other", peft.LoraConfig(**other))),
        "weigh": refusal(lambda: model.add_weighted_adapter(["default"], [1.0], "third")),
        "load": refusal(lambda: model.load_adapter("added", "fourth")),
    }


def added():
    """Add adapters to models that engines have; follow what the refusal says."""
    layouts = {"zero1": {"stages": 1, "zero": 1}, "zero3": {"stages": 1, "zero": 3}}
    layouts |= {"tensor": {"stages": 1, "tensor": 2}, "1f1b": {}, "zbv": {"schedule": "zbv"}}
    other = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": False}
    if torch.distributed.get_rank() == 0:
        lora_model(**other).save_pretrained("added")
    torch.distributed.barrier()
    found = {}
    for layout, options in layouts.items():
        with nullcontext() if layout in WITHOUT_STAGES else own_groups():
            model = lora_model()
            engine = start(model=model, **options)
            found[layout] = said_to(model, other)
            if layout == "zero1":
                model.set_adapter("other")
                found[layout]["train"] = refusal(partial(engine.train_batch, batches()))
            else:
                found[layout]["merge"] = refusal(model.merge_and_unload)
            engine.destroy()
            model = lora_model(**other)
            if layout == "zero3":
                model.add_adapter("beside", peft.LoraConfig(**other))
            engine, data = start(model=model, **options), batches()
            found[layout]["loss"] = [float(engine.train_batch(data)) for _ in range(2)]
            engine.destroy()
    return found


LAST_LAYER = {
    "target_modules": ["q_proj"],
    "layers_to_transform": [3],
    "layers_pattern": "layers",
    "lora_dropout": 0.0,
}


def frozen(schedule="1f1b", *, zero=1):
    """Train adapters of the last stage alone; the other one has nothing to train."""
    engine, data = start(schedule, model=lora_model(**LAST_LAYER), zero=zero), batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    name = f"frozen-{schedule}"
    engine.save_checkpoint(f"{name}-checkpoint")
    again = start(schedule, model=lora_model(**LAST_LAYER), zero=zero)
    again.load_checkpoint(f"{name}-checkpoint")
    found = saved(engine, name, **LAST_LAYER)
    batch = next(data)
    losses = [float(each.train_batch(iter([batch] * 4))) for each in (engine, again)]
    return found | {"losses": losses}


def frozen_in_bf16():
    """The same in 16 bits, one batch again and again; the first stage's weights stay."""
    model = lora_model(**LAST_LAYER)
    engine, batch = start(model=model, zero=0, bf16={"enabled": True}), next(batches())
    before = {name: weight.clone() for name, weight in engine.module.local_weights().items()}
    losses = [float(engine.train_batch(iter([batch] * 2))) for _ in range(10)]
    after = engine.module.local_weights()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    return {"losses": losses, "moved": moved}


def refused():
    some = {"use_dora": True}
    nothing = lora_model()
    nothing.requires_grad_(False)
    return {
        "dora": refusal(lambda: start(model=lora_model(**some), stages=1, tensor=2)),
        "nothing": refusal(lambda: start(model=nothing, zero=1)),
    }


if __name__ == "__main__":
    wavemare.init_distributed()
    os.chdir(sys.argv[1])
    actions = {
        **{name: partial(pipeline, name) for name in ("1f1b", "zb-h1", "zbv")},
        **{f"zero{stage}": partial(zero, stage) for stage in range(4)},
        "tensor": tensor,
        "tensor in stages": partial(tensor, 2),
        "pipemare": pipemare,
        "resume": partial(resume, False),
        "resume without base": partial(resume, True),
        "memory": memory,
        "trainer": trainer,
        "refused": refused,
        "added": added,
        "dora": partial(pipeline, "1f1b", use_dora=True),
        "dora zb-h1": partial(pipeline, "zb-h1", use_dora=True),
        "frozen": frozen,
        "frozen pipemare": partial(frozen, "pipemare"),
        "frozen bf16": frozen_in_bf16,
        **{f"calls {name}": partial(calls, name) for name in ("1f1b", "zbv")},
    }
    results = {}
    for name in sys.argv[2:]:
        # DeepSpeed's engines without stages share groups.
        with nullcontext() if name in WITHOUT_STAGES else own_groups():
            results[name] = actions[name]()
    leave(results)
