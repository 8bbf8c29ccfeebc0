# SPDX-License-Identifier: Apache-2.0
"""Use ``wavemare.initialize`` in the ways that users do; leave what came out.

Arguments: result folder, then the cases.
"""

import json
import os
import sys
from pathlib import Path

import deepspeed
import torch
import transformers
from common import (
    ACCUMULATION,
    DEVICE,
    HIDDEN,
    LENGTH,
    QUIET,
    build_gpt2,
    configuration,
    leave,
    refusal,
    token_batches,
    weights_digest,
)

import wavemare
from wavemare.engine.observe.progress import PROGRESS

STAGES = {"pipeline": {"stages": 2}}
STEPS = 3


def named_batches(data_rank=0):
    """Hugging Face batches; the second half of every other text is padding."""
    for tokens in token_batches(data_rank):
        mask = torch.ones_like(tokens)
        mask[1:, LENGTH // 2 :] = 0
        labels = tokens.masked_fill(mask == 0, -100)
        yield {"input_ids": tokens, "attention_mask": mask, "labels": labels}


UNTIED = {**QUIET, "tie_word_embeddings": False}


def two_groups(model):
    """The first group is the word positions, which the first stage alone has."""
    positions = model.transformer.wpe.weight
    others = [p for p in model.parameters() if p is not positions]
    return [{"params": [positions], "lr": 3e-2}, {"params": others}]


def two_rates(optimizer):
    rates = [lambda step: 0.5**step, lambda step: 1 + step / 2]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rates)


def case_groups_of_a_stage():
    """A rate for each parameter group, of which the last stage has one: named, and as an object."""
    found = {}
    drained = {"schedule": "pipemare", "pipemare": {"drain_interval": 1}}
    for name, zero, section in (("1f1b", 0, {}), ("pipemare", 0, drained), ("1f1b zero", 1, {})):
        config = plain(zero, wavemare={"pipeline": {"stages": 2, **section}})
        for named in (True, False):
            model = build_gpt2(**UNTIED)
            given = {"model_parameters": two_groups(model)}
            if not named:
                config.pop("optimizer", None)
                given = {"optimizer": torch.optim.AdamW(two_groups(model), lr=1e-2)}
            engine, *_ = wavemare.initialize(
                model=model, config=config, lr_scheduler=two_rates, **given
            )
            data = named_batches()
            losses = [engine.train_batch(data).item() for _ in range(STEPS)]
            groups = engine.optimizer.param_groups
            found[f"{name} {named}"] = {
                "losses": losses,
                "norm": engine.get_global_grad_norm(),
                "rates": engine.lr_scheduler.get_last_lr(),
                "groups": [[group["lr"], len(group["params"])] for group in groups],
            }
            engine.destroy()
    model = build_gpt2(**UNTIED).to(DEVICE)
    optimizer = torch.optim.AdamW(two_groups(model), lr=1e-2)
    scheduler, data, losses = two_rates(optimizer), named_batches(), []
    for _ in range(STEPS):
        loss = torch.stack([model(**next(data)).loss for _ in range(ACCUMULATION)]).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    one = {"losses": losses, "norm": norm.item(), "rates": scheduler.get_last_lr()}
    return {"found": found, "one": one}


def reference_losses(data_ranks, steps=STEPS):
    """Train the unsplit model on the batches of all data ranks; the mean loss of each step."""
    model = build_gpt2(**QUIET).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    streams = [named_batches(rank) for rank in range(data_ranks)]
    means = []
    for _ in range(steps):
        losses = [model(**next(stream)).loss for stream in streams for _ in range(ACCUMULATION)]
        mean = torch.stack(losses).mean()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        means.append(mean.item())
    return means


def plain(zero=0, **changes):
    config = configuration(zero, **changes)
    del config["scheduler"], config["gradient_clipping"]
    return {**config, "gradient_clipping": 0.0}


def describe(engine, losses):
    return {
        "class": type(engine).__name__,
        "subclass": isinstance(engine, deepspeed.DeepSpeedEngine),
        "losses": losses,
        "parameters": sum(p.numel() for p in engine.module.parameters()),
        "optimized": sum(p.numel() for g in engine.optimizer.param_groups for p in g["params"]),
        "groups": len(engine.optimizer.param_groups),
    }


def trained(model=None, **given):
    """Train an engine on named batches; describe it."""
    model = build_gpt2(**QUIET) if model is None else model
    engine, *_ = wavemare.initialize(model=model, **given)
    data = named_batches(engine.data_rank)
    found = describe(engine, [engine.train_batch(data).item() for _ in range(STEPS)])
    return {**found, "data": [engine.data_rank, engine.data_world_size]}


def case_pipeline():
    """A transformers model becomes a pipeline, with parameter groups of the whole model."""
    model = build_gpt2(**QUIET)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    last = model.transformer.ln_f.bias  # torch takes one without a list, too
    others = [p for p in model.parameters() if p.dim() <= 1 and p is not last]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.01}]
    groups.append({"params": last, "weight_decay": 0.01})
    return trained(model, model_parameters=groups, config=plain(wavemare=STAGES))


def case_client_optimizer():
    """A torch optimizer made for the whole model steps this stage's part."""
    model = build_gpt2(**QUIET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = plain(wavemare=STAGES)
    del config["optimizer"]
    return trained(model, optimizer=optimizer, config=config)


def case_interleaved_evaluation():
    """Evaluations of other shapes and sizes between the steps change nothing."""
    config = plain(wavemare=STAGES)
    engine, *_ = wavemare.initialize(model=build_gpt2(**QUIET), config=config)
    data, losses, evaluations = named_batches(), [], []
    for step in range(STEPS):
        small = [{k: v[:1, : LENGTH // 2 + step] for k, v in next(named_batches(9)).items()}] * 3
        evaluations.append(engine.eval_batch(iter(small), num_micro_batches=3).item())
        losses.append(engine.train_batch(data).item())
    with torch.no_grad():
        first = {k: v[:1, : LENGTH // 2] for k, v in next(named_batches(9)).items()}
        expected = build_gpt2(**QUIET).eval()(**first).loss.item()
    return {**describe(engine, losses), "evaluations": evaluations, "expected": expected}


def case_dynamic_shapes():
    """With ``dynamic_shape`` every micro-batch may have a shape of its own."""
    section = {"pipeline": {"stages": 2, "dynamic_shape": True}}
    engine, *_ = wavemare.initialize(
        model=build_gpt2(**QUIET), config=plain(wavemare=section, gradient_accumulation_steps=3)
    )

    def mixed():
        stream = named_batches()
        while True:
            for rows, length in ((2, LENGTH), (1, 8), (2, 12)):
                yield {k: v[:rows, :length].contiguous() for k, v in next(stream).items()}

    data, model = mixed(), build_gpt2(**QUIET)
    reference = mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found, expected = [], []
    for _ in range(STEPS):
        found.append(engine.eval_batch(mixed()).item())
        found.append(engine.train_batch(data).item())
        with torch.no_grad():
            stream = mixed()
            losses = [model.eval()(**next(stream)).loss for _ in range(3)]
            expected.append(torch.stack(losses).mean().item())
        loss = torch.stack([model.train()(**next(reference)).loss for _ in range(3)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    return {"losses": found, "expected": expected}


def case_first_weights():
    """What the ranks begin with, and how many weights were sent, if they were unlike or not."""
    rank, send = torch.distributed.get_rank(), deepspeed.comm.broadcast
    found = {}
    for zero in (0, 1, 3):
        for name, value in (("alike", 0.0), ("unlike", -0.0 if rank else 0.0)):
            model, sent = build_gpt2(), []
            with torch.no_grad():
                model.transformer.h[1].mlp.c_fc.weight[3, 5] = value
            deepspeed.comm.broadcast = lambda *a, **k: sent.append(send(*a, **k))  # noqa: B023
            engine, *_ = wavemare.initialize(model=model, config=plain(zero))
            deepspeed.comm.broadcast = send
            found[f"{name} {zero}"] = [weights_digest(engine), len(sent)]
            engine.destroy()
    return found


def case_data_parallel():
    """The data-parallel engine trains batches like the pipeline's, and averages over ranks."""
    return trained(config=plain(2))


def case_training_data(pipeline=True):
    """A dataset given to ``initialize`` feeds ``train_batch`` by itself."""
    dataset = [next(named_batches()) for _ in range(8)]
    dataset = [{k: v[0] for k, v in batch.items()} for batch in dataset]
    config = plain(wavemare=STAGES if pipeline else {})
    engine, *_ = wavemare.initialize(
        model=build_gpt2(**QUIET), training_data=dataset, config=config
    )
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    engine.destroy()
    return {"losses": losses, "timed": engine.tput_timer.global_step_count}


def case_training_data_plain():
    return case_training_data(pipeline=False)


def case_bf16():
    return trained(config=plain(1, wavemare=STAGES, bf16={"enabled": True}))


def case_dualpipev():
    """DeepSpeed's DualPipeV gives the losses that stock DeepSpeed gives."""
    results = {}
    for name, initialize in (("stock", deepspeed.initialize), ("ours", wavemare.initialize)):
        torch.manual_seed(3)
        layers = [torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(8)]
        module = deepspeed.DualPipeVModule(
            layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss
        )
        config = plain(gradient_accumulation_steps=4)
        engine, *_ = initialize(model=module, config=config)
        generator = torch.Generator().manual_seed(5)
        data = ((torch.randn(2, HIDDEN, generator=generator),) * 2 for _ in iter(int, 1))
        losses = [engine.train_batch(data).item() for _ in range(STEPS)]
        results[name] = {"class": type(engine).__module__, "losses": losses}
    return results | {"step": PROGRESS.step}  # for the watchdog


def case_one_file():
    """A file with our section loads in stock DeepSpeed too, given through ``args``."""
    rank = torch.distributed.get_rank()
    file = Path(sys.argv[1], f"config_{rank}.json")
    file.write_text(json.dumps(plain(1, wavemare={"pipeline": {"stages": 1}})))
    given = {"deepspeed_config": str(file), "local_rank": int(os.environ["LOCAL_RANK"])}
    arguments = type("Arguments", (), given)
    stock, *_ = deepspeed.initialize(args=arguments, model=build_gpt2(**QUIET))
    ours, *_ = wavemare.initialize(args=arguments, model=build_gpt2(**QUIET))
    return {"stock": type(stock).__module__, "ours": type(ours).__module__}


def case_refusals():
    def refused(**given):
        return refusal(lambda: wavemare.initialize(**given))

    pipeline = wavemare.to_pipeline(build_gpt2(**QUIET), num_stages=2)
    linear = torch.nn.Linear(2, 2)
    model = build_gpt2(**QUIET)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}], lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return {
        "scheduler": refused(
            model=model, optimizer=optimizer, lr_scheduler=scheduler, config=plain(wavemare=STAGES)
        ),
        "no pipeline of it": refused(model=linear, config=plain(wavemare=STAGES)),
        "other stages": refused(model=pipeline, config=plain(wavemare={"pipeline": {"stages": 1}})),
        "no configuration": refused(model=linear),
        "batch": refused(model=linear, config=plain(train_batch_size=7)),
        "stages do not divide": refused(
            model=linear, config=plain(wavemare={"pipeline": {"stages": 3}})
        ),
    }


def case_after_others():
    """Data-parallel engines after engines of other groups that have ended."""
    found = {}
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    llama = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **sizes)
    split = {"tensor_parallel": {"autotp_size": 2}}
    befores = {
        "pipeline": (build_gpt2(**QUIET), {"wavemare": STAGES}),
        "split": (transformers.LlamaForCausalLM(llama), split),
        "ours": (build_gpt2(**QUIET), {"wavemare": {"tensor_parallel": {"size": 2}}}),
    }
    for name, (model, section) in befores.items():
        before, *_ = wavemare.initialize(model=model, config=plain(**section))
        refused = refusal(lambda: wavemare.initialize(model=build_gpt2(**QUIET), config=plain()))
        before.destroy()
        found[name] = [refused, trained(config=plain(1))["losses"]]
    return {**found, "alone": trained(config=plain(1))["losses"]}


def case_four_ranks():
    """Two stages, two replicas: the loss is the mean over micro-batches and replicas."""
    return trained(config=plain(1, wavemare=STAGES))


if __name__ == "__main__":
    wavemare.init_distributed()
    results = {case: globals()[f"case_{case}"]() for case in sys.argv[2:]}
    if torch.distributed.get_rank() == 0:
        results["reference"] = [reference_losses(1), reference_losses(2)]
    leave(results)
