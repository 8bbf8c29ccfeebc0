# SPDX-License-Identifier: Apache-2.0
"""Scenarios of public bug reports of neighbours, beside plain torch in one process.

Arguments: folder, and a JSON object of [scenario, settings] by name.
"""

import json
import sys
from contextlib import nullcontext
from functools import partial
from itertools import islice

import deepspeed
import peft
import torch
import transformers
from common import (
    HIDDEN,
    LENGTH,
    MICRO,
    QUIET,
    VOCABULARY,
    AllRanks,
    build_gpt2,
    build_moe,
    difference,
    furthest,
    leave,
    refusal,
    token_batches,
    train_plainly,
    warnings_told,
)
from deepspeed.utils import groups
from lora import lora_model
from safetensors.torch import load_file
from tensor_models import build
from torch import distributed as dist

import wavemare

RATE, STEPS = 0.1, 2


def gpt2(**changes):
    return build_gpt2(**{**QUIET, "tie_word_embeddings": False, **changes})


def batches(rank):
    for tokens in token_batches(rank):
        yield {"input_ids": tokens, "labels": tokens}


def all_batches(engine):
    parts = (batches(rank) for rank in range(engine.data_world_size))
    return ({"parts": both} for both in zip(*parts, strict=True))


def start(model, ours, *, zero=0, accumulation=2, rate=RATE, optimizer="SGD", given=None, **config):
    groups.mpu = None
    values = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "steps_per_print": None,
        "optimizer": {"type": optimizer, "params": {"lr": rate}},
        "wavemare": ours,
        **config,
    }
    if "optimizer" in (given or {}):
        del values["optimizer"]
    return wavemare.initialize(model=model, config=values, **(given or {}))[0]


def saved(engine, name="model"):
    """Save the whole model, or its adapter; return its weights by name, as all ranks read them."""
    folder = f"{sys.argv[1]}/saved"
    wavemare.save_pretrained(engine, folder)
    dist.barrier()
    weights = load_file(f"{folder}/{'adapter_' if name == 'adapter' else ''}model.safetensors")
    dist.barrier()  # before the next one replaces it
    return dict(sorted(weights.items()))


def apart(engine, twin):
    """Return the largest difference between the engine's weights and a twin's."""
    ours, theirs = saved(engine), twin.state_dict()
    return difference(ours, {name: theirs[name] for name in ours})


def trained(engine, twin, *, rate=RATE, accumulation=2, groups_of_twin=None, steps=STEPS):
    """Train both; return how far losses, the last norm and weights are apart, and the losses."""
    data = batches(engine.data_rank)
    losses = [engine.train_batch(data).item() for _ in range(steps)]
    norm = engine.get_global_grad_norm()
    chosen = groups_of_twin or [p for p in twin.parameters() if p.requires_grad]
    expected, norms = train_plainly(
        AllRanks(twin),
        torch.optim.SGD(chosen, lr=rate),
        all_batches(engine),
        steps=steps,
        micro_batches=accumulation,
    )
    unlike = max(abs(ours - theirs) for ours, theirs in zip(losses, expected, strict=True))
    return {"losses": unlike, "norm": abs(norm - norms[-1])}


# --- gradients ------------------------------------------------------------------------------------


def several_passes(how, settings):
    """Several backward passes before a step, where the configuration says one."""
    engine = start(gpt2(), accumulation=1, **settings)
    data, twin = batches(engine.data_rank), gpt2()
    optimizer, expected = torch.optim.SGD(twin.parameters(), lr=RATE), all_batches(engine)
    is_one_pass = how.startswith("two losses")

    def losses_of(model, given):
        first = model(**given)
        return first.loss, first.logits.pow(2).mean() if is_one_pass else None

    def step():
        batch, other = next(data), next(data)
        if how == "coalesced":
            with engine.coalesce_grad_reduction():
                engine.backward(engine(**batch).loss)
                engine.backward(engine(**other).loss)
        else:
            told = how in ("told", "two losses, told")
            if told:
                engine.set_gradient_accumulation_boundary(False)
            loss, second = losses_of(engine, batch)
            engine.backward(loss, retain_graph=is_one_pass)
            if told:
                engine.set_gradient_accumulation_boundary(True)
            if how == "dropped":
                engine.zero_grad()
            engine.backward(engine(**other).loss if second is None else second)
        engine.step()

    said = {refusal(step) for _ in range(STEPS)}
    if said != {"accepted"}:
        engine.destroy()
        return {"said": sorted(said)[-1]}
    for _ in range(STEPS):
        both = next(expected)["parts"], next(expected)["parts"]
        for first, second in zip(*both, strict=True):
            if is_one_pass:
                loss = sum(losses_of(twin, first))
            else:
                loss = twin(**second).loss
                loss = loss if how == "dropped" else loss + twin(**first).loss
            (loss / len(both[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = {"weights": apart(engine, twin)}
    engine.destroy()
    return result


def resized(settings, sizes=(2, 4, 1, 3)):
    """The number of micro-batches changes between steps."""
    engine = start(gpt2(), **settings)
    data, twin = batches(engine.data_rank), gpt2()
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    losses, whole, expected = [], AllRanks(twin), all_batches(engine)
    for count in sizes:
        engine.set_train_batch_size(count * MICRO * engine.data_world_size)
        losses.append(engine.train_batch(data).item())
        plain, _ = train_plainly(whole, optimizer, expected, steps=1, micro_batches=count)
        losses[-1] -= plain[0]
    result = {"losses": max(map(abs, losses)), "weights": apart(engine, twin)}
    engine.destroy()
    return result


def resized_within_a_step():
    engine = start(gpt2(), {})
    engine.backward(engine(**next(batches(0))).loss)
    engine.step()
    said = refusal(lambda: engine.set_train_batch_size(4 * MICRO * engine.data_world_size))
    engine.destroy()
    return {"said": said}


def scaled(settings):
    """How gradients are divided, summed and clipped."""
    engine = start(gpt2(), **settings)
    data, twin = batches(engine.data_rank), gpt2()
    losses = [engine.train_batch(data) for _ in range(STEPS)]
    factor = engine.data_world_size if settings.get("gradient_allreduce_op") == "sum" else 1
    optimizer = torch.optim.SGD(twin.parameters(), lr=RATE)
    expected, clip = all_batches(engine), settings.get("gradient_clipping") or float("inf")
    for _ in losses:
        for _ in range(2):
            (AllRanks(twin)(**next(expected)).loss * factor / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip).item()
        optimizer.step()
        optimizer.zero_grad()
    result = {"norm": abs(engine.get_global_grad_norm() - norm), "weights": apart(engine, twin)}
    engine.destroy()
    return result


def experts(implementation, settings, kind="mixtral"):
    """Experts are computed by another kernel of transformers."""
    model = build_moe(kind)
    model.set_experts_implementation(implementation)
    engine, twin = start(model, **settings), build_moe(kind, eager=True)
    result = trained(engine, twin)
    saved(engine)  # in the names of Mixtral's files
    read = type(twin).from_pretrained(f"{sys.argv[1]}/saved")
    dist.barrier()
    result["weights"] = difference(read.state_dict(), twin.state_dict())
    engine.destroy()
    return result


def few_micro_batches(count, settings, **changes):
    """Micro-batches that are fewer than stages, or no multiple of them; an odd vocabulary."""
    engine = start(gpt2(n_layer=4, **changes), accumulation=count, **settings)
    twin = gpt2(n_layer=4, **changes)
    result = trained(engine, twin, accumulation=count)
    result["weights"] = apart(engine, twin)
    engine.destroy()
    return result


def refused_micro_batches(count, settings):
    said = refusal(lambda: start(gpt2(n_layer=4), accumulation=count, **settings))
    return {"said": said}


# --- adapters -------------------------------------------------------------------------------------


def adapters(reentrant, settings, **lora):
    """LoRA with activation checkpoints, against peft without."""

    def build(*, checkpoints=False):
        model = lora_model(**lora)
        if checkpoints:
            chosen = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
        return model

    refused = []
    model, twin = build(checkpoints=reentrant is not None), build()
    said = refusal(lambda: refused.append(start(model, rate=0.5, **settings)))
    if said != "accepted":
        return {"said": said}
    (engine,) = refused
    result = trained(engine, twin, rate=0.5)
    expected = dict(sorted(peft.get_peft_model_state_dict(twin).items()))
    result["weights"] = difference(saved(engine, "adapter"), expected)
    engine.destroy()
    return result


def reference(settings):
    """The reference of preference training: the model with its adapters switched off."""
    engine, plain = start(lora_model(), rate=0.5, **settings), lora_model().eval()
    engine.train_batch(batches(engine.data_rank))
    tokens = next(batches(engine.data_rank))["input_ids"]
    engine.eval()
    with torch.no_grad():
        trained_logits = engine(input_ids=tokens).logits
        with engine.module.disable_adapter():
            logits = engine(input_ids=tokens).logits
        with plain.disable_adapter():
            expected = plain(input_ids=tokens).logits
    engine.destroy()
    return {
        "logits": furthest([logits], [expected]),
        "moved": furthest([trained_logits], [expected]) > 0.1,
    }


def dropout(settings):
    """Dropout and activation checkpoints of both kinds, against dropout without checkpoints."""
    found = []
    shared = bool(settings["ours"].get("tensor_parallel"))
    for reentrant in (None, False, True):
        drops = dict.fromkeys(QUIET, 0.2)
        model = gpt2(n_layer=4, **drops)
        if reentrant is not None:
            chosen = {"use_reentrant": reentrant}
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=chosen)
        engine = start(model, accumulation=4, **settings)
        torch.manual_seed(100 + (0 if shared else dist.get_rank()))
        data = batches(engine.data_rank)
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        found.append((losses, saved(engine)))
        engine.destroy()
    plain, *others = found
    return {
        "losses": all(losses == plain[0] for losses, _ in others),
        "weights": max(difference(weights, plain[1]) for _, weights in others),
    }


def hooked(settings, *, tied=False):
    """Hooks on the gradients of weights: rows that train, and columns by number."""
    model, twin = gpt2(tie_word_embeddings=tied), gpt2()
    twin.load_state_dict(model.state_dict())
    rows = torch.arange(VOCABULARY)[:, None] % 3 == 0
    if tied:  # a schedule that never waits gives the head a copy of its own
        twin.lm_head.weight.register_hook(rows.mul)
    for one in (model, twin):
        one.transformer.wte.weight.register_hook(rows.mul)
        inner = one.transformer.h[1].mlp.c_fc.weight
        inner.register_hook((torch.arange(inner.shape[1]) % 2).mul)
    engine = start(model, **settings)
    result = trained(engine, twin)
    result["weights"] = apart(engine, twin)
    engine.destroy()
    return result


def measured(settings, kind):
    """Hooks that read the whole gradients of all weights; and one that acts after a gradient."""
    model, twin = (gpt2() if kind == "gpt2" else build(kind) for _ in range(2))
    for one in (*model.parameters(), *twin.parameters()):
        one.register_hook(lambda grad: grad / (0.1 + grad.norm()))
    engine = start(model, accumulation=1, **settings)
    result = trained(engine, twin, accumulation=1)
    result["weights"] = apart(engine, twin)
    engine.destroy()
    model = gpt2()
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda weight: None)
    result["after"] = refusal(lambda: start(model, **settings).destroy())
    return result


def penalized(settings):
    """A penalty over the engine's parameters: what is told without it, and with it.

    Also how far a gradient by ``torch.autograd.grad``, outside of a step, is from a plain one.
    """
    engine, twin = start(gpt2(), accumulation=1, **settings), gpt2()
    data, told = batches(engine.data_rank), []
    batch, own = next(data), engine.module.transformer.ln_f.weight
    slopes = [
        torch.autograd.grad(model(**batch).loss, weight)[0]
        for model, weight in ((engine.module, own), (twin, twin.transformer.ln_f.weight))
    ]
    if not settings.get("zero"):  # there DeepSpeed has a pass of its own
        said = refusal(lambda: torch.autograd.grad(engine(**batch).loss, own))
        assert said.startswith("ConfigError: loss"), said
    for factor in (0.0, 1e-3, 1e-3):
        engine.settle()  # the next pass compares
        with warnings_told("unlike losses") as lines:
            for _ in range(3):
                penalty = sum(weight.square().sum() for weight in engine.module.parameters())
                engine.backward(engine(**next(data)).loss + factor * penalty)
                engine.step()
        told.append(len(lines))
    engine.destroy()
    return {"told": told, "slope": float((slopes[0] - slopes[1]).abs().max())}


def shared(settings, *, frozen):
    """Two layers of a model, and of a pipeline of the caller's own, have one weight."""
    model = gpt2(n_layer=4)
    model.transformer.h[3].mlp.c_fc = model.transformer.h[0].mlp.c_fc
    model.transformer.h[0].mlp.c_fc.requires_grad_(not frozen)
    said = [refusal(lambda: start(model, **settings).destroy())]
    layer = torch.nn.Linear(HIDDEN, HIDDEN).requires_grad_(not frozen)
    layers = [layer, torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN), layer]
    loss_fn = torch.nn.functional.mse_loss
    module = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
    said.append(refusal(lambda: start(module, **settings).destroy()))
    return {"said": said}


# --- rates ----------------------------------------------------------------------------------------


def group_rates(settings):
    """Parameter groups of rates and decays of their own."""

    def grouped(model):
        named = list(model.named_parameters())
        blocks = [p for name, p in named if ".h." in name]
        rest = [p for name, p in named if ".h." not in name]
        return [
            {"params": blocks, "lr": 0.1, "weight_decay": 0.0},
            {"params": rest, "lr": 0.01, "weight_decay": 0.1},
        ]

    model, twin = gpt2(), gpt2()
    engine = start(model, rate=0.5, given={"model_parameters": grouped(model)}, **settings)
    result = trained(engine, twin, groups_of_twin=grouped(twin))
    result["weights"] = apart(engine, twin)
    engine.destroy()
    return result


def loaded_whole(settings):
    """The whole model's weights into the engine's module, which may have a part of them."""
    engine, whole = start(gpt2(), **settings), gpt2().state_dict()
    said = refusal(lambda: engine.module.load_state_dict(whole))
    engine.destroy()
    return {"said": said}


def frozen_late(settings):
    """Layers that are frozen between steps: what is told, and whether they move."""
    model = gpt2()
    engine = start(model, rate=0.01, optimizer="AdamW", **settings)
    data, inner = batches(engine.data_rank), model.transformer.h[0].mlp.c_fc.weight
    with warnings_told("frozen layers") as told:
        engine.train_batch(data)
        inner.requires_grad_(False)
        before = inner.detach().clone()
        for _ in range(STEPS):
            engine.train_batch(data)
    engine.destroy()
    return {"told": len(told), "moved": not torch.equal(before, inner)}


def adapted_late(settings):
    """An adapter of peft that comes between steps: what the next step says, and after thawing."""
    model = gpt2()
    engine = start(model, rate=0.01, optimizer="AdamW", **settings)
    data = batches(engine.data_rank)
    engine.train_batch(data)
    trained = list(model.parameters())
    peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_fc"], fan_in_fan_out=True))
    said = refusal(lambda: engine.train_batch(data))
    for weight in trained:
        weight.requires_grad_(True)
    before = model.transformer.h[0].ln_1.weight.detach().clone()
    engine.train_batch(data)
    engine.destroy()
    moved = not torch.equal(before, model.transformer.h[0].ln_1.weight)
    return {"said": said, "moved": moved}


def whole_tensors():
    """Optimizers beside ZeRO, which cuts flat tensors, and without it."""
    return {
        f"{name} {zero}": refusal(lambda n=name, z=zero: start(gpt2(), {}, zero=z, optimizer=n))
        for name in ("Adafactor", "RMSprop")
        for zero in range(4)
    }


def empty_group(*, as_function):
    """A group without weights, which a scheduler counts, and DeepSpeed drops."""
    model = gpt2()
    chosen = [{"params": [], "lr": 1.0}, {"params": list(model.parameters()), "lr": 0.1}]
    factors = [lambda step: 7.0, lambda step: 1 / (step + 1)]
    optimizer = torch.optim.SGD(chosen)
    given = {"optimizer": optimizer}
    if as_function:
        given["lr_scheduler"] = lambda made: torch.optim.lr_scheduler.LambdaLR(made, factors[1])
    else:
        given["lr_scheduler"] = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
    started = []
    said = refusal(lambda: started.append(start(model, {}, given=given)))
    rates = []
    for engine in started:
        data = batches(engine.data_rank)
        for _ in range(STEPS):
            engine.train_batch(data)
            rates += engine.get_lr()
        engine.destroy()
    return {"said": said, "rates": rates}


def resumed(settings):
    """A scheduler of the caller's own goes on, after a load that is saved again without a step."""

    def begin():
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
        return start(model, given={"optimizer": optimizer, "lr_scheduler": scheduler}, **settings)

    def steps(engine, data):
        for _ in range(STEPS):
            yield engine.train_batch(data).item(), engine.get_lr()[0]

    folder = f"{sys.argv[1]}/resumed_{len(json.dumps(settings))}_{settings.get('zero')}"
    engine = begin()
    data = batches(engine.data_rank)
    list(steps(engine, data))
    engine.save_checkpoint(folder, "first")
    expected, weights = list(steps(engine, data)), saved(engine)
    engine.destroy()
    again = begin()
    again.load_checkpoint(folder, "first")
    again.save_checkpoint(folder, "second")
    again.destroy()
    last = begin()
    last.load_checkpoint(folder, "second")
    data = islice(batches(last.data_rank), 2 * STEPS, None)
    found = list(steps(last, data))
    result = {"alike": found == expected, "weights": difference(saved(last), weights)}
    last.destroy()
    return result


# --- weights, losses, data ------------------------------------------------------------------------


def frozen(settings):
    """Frozen weights come back from a checkpoint into a model that had other ones."""

    def begin(*, other=False):
        model = gpt2()
        if other:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not ("h.1.mlp" in name or "wpe" in name or "h.0.ln" in name))
        return start(model, **settings)

    folder = f"{sys.argv[1]}/frozen_{len(json.dumps(settings))}_{settings.get('zero')}"
    engine = begin()
    engine.train_batch(batches(engine.data_rank))
    engine.save_checkpoint(folder)
    expected = saved(engine)
    engine.destroy()
    other = begin(other=True)
    other.load_checkpoint(folder)
    result = {"weights": difference(saved(other), expected)}
    other.destroy()
    return result


def evaluated(settings, accumulation=4):
    """The loss of an evaluation, of as many micro-batches as a step has."""
    engine = start(gpt2(), accumulation=accumulation, **settings)
    engine.train_batch(batches(engine.data_rank))
    twin = gpt2()
    twin.load_state_dict(saved(engine), strict=False)
    halves = bool(settings.get("bf16"))
    twin = AllRanks(twin.to(torch.bfloat16) if halves else twin).eval()
    loss = engine.eval_batch(batches(engine.data_rank)).item()
    with torch.no_grad():
        every = [twin(**parts).loss for parts in islice(all_batches(engine), accumulation)]
    engine.destroy()
    expected = torch.stack(every).float().mean().item()
    return {"loss": abs(loss - expected), "value": loss}


EPOCH = 20
"""Rows that are shuffled, of five steps."""


def shuffled(settings, *, draws):
    """Ranks shuffle apart, alike, or alike until an epoch ends after which one has drawn more.

    With ``evaluation`` they shuffle the rows of an evaluation apart. Returns what was said, and at
    which step.
    """
    engine = start(gpt2(), **settings)
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, VOCABULARY, (EPOCH, LENGTH), generator=generator)
    torch.manual_seed(1000 + (dist.get_rank() if draws == "apart" else 0))
    alike = draws in ("alike", "evaluation")
    seed = torch.Generator().manual_seed(5) if alike else None
    load = partial(torch.utils.data.DataLoader, rows, batch_size=MICRO, shuffle=True)

    def data(loader):
        while True:
            for tokens in loader:
                yield {"input_ids": tokens, "labels": tokens}
            if not alike:
                torch.rand(dist.get_rank())  # as dropout of other stages does

    batches, said = data(load(generator=seed)), "accepted"
    for step in range(8):
        if step == 5:
            engine.save_checkpoint(f"{sys.argv[1]}/shuffled")
        if step == 3 and draws == "evaluation":
            torch.rand(dist.get_rank())
            said = refusal(lambda: engine.eval_batch(data(load())))
        else:
            said = refusal(lambda: engine.train_batch(batches))
        if said != "accepted":
            break
    engine.destroy()
    return {"said": said, "step": step}


def second(settings):
    """Ranks read one micro-batch apart, the second of the first step: what is said, and when."""
    engine = start(gpt2(), **settings)

    def data():
        for number, batch in enumerate(batches(0)):
            shift = dist.get_rank() * (number == 1)
            yield {name: tokens.roll(shift, 0) for name, tokens in batch.items()}

    read, said, step = data(), "accepted", 0
    while step < 3 and said == "accepted":
        said = refusal(lambda: engine.train_batch(read))
        step += said == "accepted"
    engine.destroy()
    return {"said": said, "step": step}


def placeholders():
    """Stages may have placeholders for what they do not need; the reader's own error is told."""
    layers = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(2)]
    loss_fn = torch.nn.functional.mse_loss
    said = {}
    for name in ("placeholders", "an error"):
        module = deepspeed.PipelineModule(layers, num_stages=2, loss_fn=loss_fn)
        engine = start(module, {"pipeline": {"stages": 2}})
        whole = torch.randn(MICRO, HIDDEN, generator=torch.Generator().manual_seed(1))
        nothing = torch.zeros(MICRO, HIDDEN)
        first = engine.is_first_stage()

        def pairs(name=name, first=first, whole=whole, nothing=nothing):
            if name == "an error" and first:
                raise RuntimeError("the disk is gone")
            while True:
                yield (whole, nothing) if first else (nothing, whole)

        try:
            engine.train_batch(pairs())
            said[name] = "trained"
        except RuntimeError as error:  # CommError is one
            said[name] = str(error)
        with nullcontext() if name == "placeholders" else torch.no_grad():
            engine.destroy()
    return said


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    wavemare.init_distributed()
    chosen = json.loads(sys.argv[2])
    leave({name: globals()[case](**settings) for name, (case, settings) in chosen.items()})
