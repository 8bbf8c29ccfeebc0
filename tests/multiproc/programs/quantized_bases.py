# SPDX-License-Identifier: Apache-2.0
"""Train LoRA models whose base is in 4 or 8 bits, in pipelines, split over ranks and by ZeRO.

Usage: quantized_bases.py FOLDER ACTION...; each rank leaves the results by action. What "int8"
begins has a base of torchao, the others one of bitsandbytes.
"""

import os
import sys
from contextlib import nullcontext
from functools import partial

import bitsandbytes
import peft
import torch
import transformers
from common import configuration, leave, own_groups, refusal, token_batches
from safetensors.torch import load_file

import wavemare
from wavemare.engine.parts import own_part
from wavemare.models import from_folder, save_pretrained, whole_state_dict

STEPS, RATE = 2, 0.5
WITHOUT_STAGES = ("zero0", "zero1", "zero2", "tensor", "packed, tensor", "narrow")
PACKED_INPUTS = ["input_ids", "position_ids"]


def settings(**changes):
    options = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}
    return transformers.BitsAndBytesConfig(load_in_4bit=True, **{**options, **changes})


def int8():
    from torchao.quantization import Int8WeightOnlyConfig

    return transformers.TorchAoConfig(Int8WeightOnlyConfig())


def base_folder(width=128):
    """Write a tiny model on rank 0; its folder."""
    name = f"base{width}"
    if torch.distributed.get_rank() == 0 and not os.path.exists(name):
        transformers.set_seed(7)
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=1,
            max_position_embeddings=32,
        )
        transformers.LlamaForCausalLM(config).save_pretrained(name)
    torch.distributed.barrier()
    return name


def lora_model(*, late=False, width=128, lora=(), config=None, **quantization):
    folder, config = base_folder(width), config or settings(**quantization)
    if late:
        base = from_folder(folder, quantization_config=config)
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=config, dtype=torch.float32
        )
    transformers.set_seed(3)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(**{**options, **dict(lora)}))


def int8_model(**options):
    return lora_model(config=int8(), **options)


def batches():
    for tokens in token_batches(0):
        yield {"input_ids": tokens, "labels": tokens}


def packed():
    """Yield samples of eight rows, which are attended to one by one."""
    parts = token_batches(0)
    while True:
        ids = torch.cat([next(parts) for _ in range(16)], dim=1)
        positions = (torch.arange(ids.shape[1]) % 32).expand_as(ids).contiguous()
        labels = ids.masked_fill(positions == 0, -100)
        yield {"input_ids": ids, "position_ids": positions, "labels": labels}


def start(model, schedule="1f1b", *, stages=2, zero=0, tensor=1, inputs=None, **config):
    ours = {
        "pipeline": {"stages": stages, "schedule": schedule, "inputs": inputs},
        "tensor_parallel": {"size": tensor},
    }
    config = configuration(zero, wavemare=ours, gradient_clipping=0.0, **config)
    del config["scheduler"]
    config["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    config["zero_allow_untested_optimizer"] = True
    return wavemare.initialize(model=model, config=config)[0]


def alone(model, data, steps=STEPS):
    """Train a model in this process."""
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for _ in range(steps):
        for _ in range(2):
            (model(**next(data), use_cache=False).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def of_numbers(weight):
    """A weight as its own library dequantizes it."""
    if isinstance(weight, bitsandbytes.nn.Params4bit):
        return bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
    return weight.dequantize()


def dequantized(model):
    """The weights of a model with its adapter added to them, by hand."""
    state = {}
    for name, layer in model.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            whole = of_numbers(layer.base_layer.weight)
            added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
            state[f"{name}.weight"] = whole + layer.scaling["default"] * added
    return state


def saved(engine, name, make, data):
    """Save adapter and whole model, and compare both folders with one process."""
    save_pretrained(engine, name)
    save_pretrained(engine, f"{name}-merged", merge=True)
    torch.distributed.barrier()
    before = peft.get_peft_model_state_dict(make())
    model = alone(make(), data)
    theirs, ours = (
        peft.get_peft_model_state_dict(model),
        load_file(f"{name}/adapter_model.safetensors"),
    )
    whole = transformers.AutoModelForCausalLM.from_pretrained(f"{name}-merged")
    merged, state = dequantized(model), whole.state_dict()
    return {
        "names": list(ours) == sorted(theirs),
        "adapter": max(float((ours[n] - theirs[n]).detach().abs().max()) for n in ours),
        "moved": max(float((ours[n] - before[n]).detach().abs().max()) for n in ours),
        "merged": max(float((state[n] - w).detach().abs().max()) for n, w in merged.items()),
        "config": hasattr(whole.config, "quantization_config"),
        "layers": len(merged),
    }


def trained(name, make=lora_model, make_data=batches, **options):
    engine, data = start(make(), **options), make_data()
    for _ in range(STEPS):
        engine.train_batch(data)
    return saved(engine, name, make, make_data())


def pipemare(make=lora_model):
    engine, batch = start(make(), "pipemare"), next(batches())
    return [float(engine.train_batch(iter([batch] * 4))) for _ in range(20)]


def late():
    """What a stage reads late equals what it has of a whole model, and it has its own alone."""
    engines = []
    for is_late in (False, True):
        model = lora_model(late=is_late, bnb_4bit_use_double_quant=True)
        sizes = [p.nbytes for p in model.parameters() if isinstance(p, bitsandbytes.nn.Params4bit)]
        engines.append(start(model))
        del model
    early, read = (engine.module for engine in engines)
    bits = [
        torch.equal(one.data, other.data) and torch.equal(one.absmax, other.absmax)
        for one, other in zip(early.parameters(), read.parameters(), strict=True)
        if isinstance(one, bitsandbytes.nn.Params4bit)
    ]
    own = [p.nbytes for p in read.parameters() if isinstance(p, bitsandbytes.nn.Params4bit)]
    batch = next(batches())
    losses = [float(engine.train_batch(iter([batch] * 2))) for engine in engines]
    return {
        "equal": all(bits),
        "layers": [len(bits), len(sizes)],
        "losses": losses,
        "own": sum(own),
    }


def resume():
    """A checkpoint goes on; one of another base is loaded with its weights in 4 bits."""
    engine, data = start(lora_model(), zero=1), batches()
    engine.train_batch(data)
    engine.save_checkpoint("resume")
    other = lora_model()
    with torch.no_grad():
        for parameter in other.parameters():
            if isinstance(parameter, bitsandbytes.nn.Params4bit):
                parameter.data.zero_()
                parameter.quant_state.absmax.mul_(3)
    again = start(other, zero=1)
    again.load_checkpoint("resume")
    rest = batches()
    for _ in range(2):
        next(rest)
    losses = [float(each.train_batch(d)) for each, d in ((engine, data), (again, rest))]
    return [*losses, refusal(lambda: start(lora_model(), zero=0).load_checkpoint("resume"))]


def int8_late():
    """What a stage reads late is what it has of a whole model, and it has its own alone."""
    engines = [start(int8_model(late=is_late)) for is_late in (False, True)]
    with own_part():
        early, read = (
            {n: w for n, w in engine.module.state_dict().items() if "base_layer" in n}
            for engine in engines
        )
    with torch.no_grad():  # adapters of a late base begin with other random numbers
        for one, other in zip(*(e.module.parameters() for e in engines), strict=True):
            if one.requires_grad:
                other.copy_(one)
    batch = next(batches())
    found = {
        "equal": early.keys() == read.keys()
        and all(map(torch.equal, early.values(), read.values())),
        "layers": sum(w.dtype == torch.int8 for w in read.values()),
        "losses": [float(engine.train_batch(iter([batch] * 2))) for engine in engines],
    }
    for engine in engines:
        engine.module.merge_adapter()
    merged = [float(e.eval_batch(iter([batch]), num_micro_batches=1)) for e in engines]
    alone(whole := int8_model(), iter([batch] * 2), 1)
    whole.merge_adapter()
    with torch.no_grad():
        return {**found, "merged": [*merged, float(whole(**batch, use_cache=False).loss)]}


def int8_resume():
    """A checkpoint has the base with its scales, and goes on with another base given."""
    engine, data = start(int8_model(), zero=1), batches()
    engine.train_batch(data)
    engine.save_checkpoint("int8-resume")
    again = start(int8_model(), zero=1)
    with torch.no_grad():
        for parameter in again.module.parameters():
            if parameter.dtype == torch.int8:
                parameter.zero_()
                parameter.scale.mul_(3)
    again.load_checkpoint("int8-resume")
    rest = batches()
    for _ in range(2):
        next(rest)
    losses = [float(each.train_batch(d)) for each, d in ((engine, data), (again, rest))]
    return [*losses, refusal(lambda: start(int8_model(), zero=0).load_checkpoint("int8-resume"))]


def int8_whole():
    weight = int8_model().get_base_model().model.layers[3].mlp.up_proj.base_layer.weight
    state = whole_state_dict(start(int8_model()))
    if state is None:
        return None
    own = state["base_model.model.model.layers.3.mlp.up_proj.base_layer.weight"]
    names = [n for n in state if "scale" in n]
    return {"equal": torch.equal(own, weight.dequantize()), "names": names}


def evaluated():
    """An evaluation leaves the weights in the form that gives gradients."""
    engine, batch = start(lora_model()), next(batches())
    first = float(engine.train_batch(iter([batch] * 2)))
    evaluation = float(engine.eval_batch(iter([batch]), num_micro_batches=1))
    return [first, evaluation, float(engine.train_batch(iter([batch] * 2)))]


def whole_weights():
    weights = lora_model().get_base_model().model.layers[3].mlp.up_proj.base_layer.weight
    state = whole_state_dict(start(lora_model()))
    if state is None:
        return None
    expected = bitsandbytes.functional.dequantize_4bit(weights.data, weights.quant_state)
    own = state["base_model.model.model.layers.3.mlp.up_proj.base_layer.weight"]
    return {"equal": torch.equal(own, expected), "names": [n for n in state if "absmax" in n]}


if __name__ == "__main__":
    wavemare.init_distributed()
    os.chdir(sys.argv[1])
    double = partial(lora_model, bnb_4bit_use_double_quant=True)
    actions = {
        **{n: partial(trained, n, schedule=n) for n in ("1f1b", "zb-h1", "zbv", "interleaved")},
        "stages and zero1": partial(trained, "stages-zero1", zero=1),
        "double": partial(trained, "double", double),
        **{
            f"zero{stage}": partial(trained, f"zero{stage}", stages=1, zero=stage)
            for stage in (1, 2)
        },
        "tensor": partial(trained, "tensor", double, stages=1, tensor=2),
        "narrow": lambda: refusal(lambda: start(lora_model(width=64), stages=1, tensor=2)),
        "dora": partial(trained, "dora", partial(lora_model, lora={"use_dora": True})),
        **{
            f"packed, {n}": partial(
                trained, f"packed-{n}", make_data=packed, schedule=n, inputs=PACKED_INPUTS
            )
            for n in ("1f1b", "zbv")
        },
        "packed, tensor": partial(trained, "packed-tensor", make_data=packed, stages=1, tensor=2),
        "pipemare": pipemare,
        "late": late,
        "resume": resume,
        "evaluated": evaluated,
        "whole": whole_weights,
        **{
            f"int8 {n}": partial(trained, f"int8-{n}", int8_model, schedule=n)
            for n in ("1f1b", "zbv", "interleaved")
        },
        "int8 stages and zero1": partial(trained, "int8-stages-zero1", int8_model, zero=1),
        **{
            f"int8 zero{stage}": partial(
                trained, f"int8-zero{stage}", int8_model, stages=1, zero=stage
            )
            for stage in (0, 1, 2)
        },
        "int8 tensor": partial(trained, "int8-tensor", int8_model, stages=1, tensor=2),
        "int8 dora": partial(trained, "int8-dora", partial(int8_model, lora={"use_dora": True})),
        "int8 packed, zbv": partial(
            trained,
            "int8-packed",
            int8_model,
            make_data=packed,
            schedule="zbv",
            inputs=PACKED_INPUTS,
        ),
        "int8 pipemare": partial(pipemare, int8_model),
        "int8 late": int8_late,
        "int8 resume": int8_resume,
        "int8 whole": int8_whole,
    }
    results = {}
    for name in sys.argv[2:]:
        # DeepSpeed's engines without stages share groups.
        without = name.removeprefix("int8 ") in WITHOUT_STAGES
        with nullcontext() if without else own_groups():
            results[name] = actions[name]()
    leave(results)
