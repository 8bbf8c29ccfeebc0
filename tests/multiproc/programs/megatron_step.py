# SPDX-License-Identifier: Apache-2.0
"""A step function in the style of Megatron's pretrain_gpt.py, data-parallel and in a pipeline."""

import sys
from functools import partial
from pathlib import Path

import torch
from common import (
    ACCUMULATION,
    LENGTH,
    MICRO,
    QUIET,
    VOCABULARY,
    build_gpt2,
    configuration,
    leave,
    refusal,
)

import wavemare
from tools.megatron_core import ARGUMENTS, micro_batches
from wavemare.engine import init_distributed
from wavemare.errors import CheckpointError
from wavemare.megatron import load_hf, open_checkpoint
from wavemare.megatron.optimizer import write_universal
from wavemare.megatron.step import megatron_train_step

STEPS = 4
MEGATRON = Path(__file__).parents[2] / "data" / "megatron" / "llama-optimizer"
UNIVERSAL = Path(sys.argv[1], "universal")


def loss_func(loss_mask, output_tensor):
    losses = output_tensor.view(-1).float()
    mask = loss_mask.view(-1).float()
    total = (losses * mask).sum()
    return total, mask.sum().int(), {"lm loss": (float(total.detach()), float(mask.sum()))}


def forward_step(data_iterator, model):
    data = next(data_iterator)
    tokens, labels, loss_mask, attention_mask, position_ids = data.values()
    assert model.vp_stage is None
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask)


def megatron_batches(shard, shards):
    """Yield what Megatron's GPTDataset gives: shifted labels, masks, positions."""
    generator = torch.Generator().manual_seed(9)
    while True:
        text = torch.randint(0, VOCABULARY, (MICRO * shards, LENGTH + 1), generator=generator)
        text = text[shard * MICRO : (shard + 1) * MICRO]
        mask = torch.ones(MICRO, LENGTH)
        mask[:, :3] = 0.0
        later = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
        positions = torch.arange(LENGTH).expand(MICRO, -1)
        yield dict(
            tokens=text[:, :-1].contiguous(),
            labels=text[:, 1:].contiguous(),
            loss_mask=mask,
            attention_mask=later,
            position_ids=positions,
        )


def twin(shards):
    """Train one plain model on all samples, without any engine."""
    model = build_gpt2(**QUIET)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    readers = [megatron_batches(shard, shards) for shard in range(shards)]
    losses = []
    for _ in range(STEPS):
        step_loss = 0.0
        for _ in range(ACCUMULATION):
            for reader in readers:
                data = next(reader)
                logits = model(data["tokens"]).logits[:, 3:]
                wanted = data["labels"][:, 3:]
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
                (loss / ACCUMULATION / shards).backward()
                step_loss += loss.item() / ACCUMULATION / shards
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss)
    return losses


def trained(shard, **changes):
    model = build_gpt2(**QUIET)
    config = {**configuration(0, **changes), "gradient_clipping": 0.0}
    del config["scheduler"]
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}}
    engine, *_ = wavemare.initialize(model=model, config={**config, "optimizer": optimizer})
    reader = megatron_batches(*shard)
    results = [megatron_train_step(engine, forward_step, reader) for _ in range(STEPS)]
    return engine, [float(r.loss) for r in results], [r.reports for r in results]


def of_second_documents(shift):
    """Return the loss of documents that begin half-way, after others with other tokens."""

    def step(data_iterator, model):
        data, half = next(data_iterator), LENGTH // 2
        data["tokens"][:, :half] = (data["tokens"][:, :half] + shift) % VOCABULARY
        data["loss_mask"][:, :half] = 0.0
        data["attention_mask"][..., half:, :half] = True
        return forward_step(iter([data]), model)

    model = build_gpt2(**QUIET, attn_implementation="eager")
    engine, *_ = wavemare.initialize(model=model, config=configuration(0))
    return float(megatron_train_step(engine, step, megatron_batches(rank, 2)).loss)


def goes_on(zero_stage, sections):
    """Return the losses of ten steps after those that megatron-core did, with other ranks."""
    pipeline, shards = "pipeline" in sections, 1 if sections else 2
    model = load_hf(MEGATRON, vocab_size=64).train()  # the padding is in Megatron's softmax
    for parameter in model.parameters():
        parameter.data.zero_()
    layers = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    adam = {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4 // shards,
        "optimizer": {"type": "AdamW", "params": adam},
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": 1.0,
        "steps_per_print": None,
        "checkpoint": {"load_universal": True},
        "wavemare": sections,
    }
    engine, *_ = wavemare.initialize(
        model=model,
        config=config,
        model_parameters=[{"params": layers}, {"params": norms, "weight_decay": 0.0}],
    )
    try:
        _, client = engine.load_checkpoint(str(UNIVERSAL))
    except CheckpointError:
        engine.destroy()
        raise
    place = [engine.global_steps, client["consumed_train_samples"]]
    first = ARGUMENTS | {"iteration": place[0]}
    reader = micro_batches(first, place[1], 0 if sections else rank, shards)
    losses = []
    for _ in range(10):
        loss = megatron_train_step(engine, forward_step, reader).loss.detach().clone()
        if not pipeline:
            torch.distributed.all_reduce(loss)
            loss /= 2
        losses.append(float(loss))
    engine.destroy()
    return place, losses


init_distributed()
rank = torch.distributed.get_rank()
if rank == 0:
    write_universal(open_checkpoint(MEGATRON, vocab_size=64), UNIVERSAL)
torch.distributed.barrier()
going_on = {
    f"{name} ZeRO {zero_stage}": goes_on(zero_stage, sections)
    for name, sections, stages in (
        ("data", {}, (1, 2, 3)),
        ("pipeline", {"pipeline": {"stages": 2}}, (1,)),
    )
    for zero_stage in stages
}
split = {"tensor_parallel": {"size": 2}}
refused = refusal(lambda: goes_on(1, split))
result = {"twin_1": twin(1), "twin_2": twin(2), "next": going_on, "refused": refused}
_, result["data"], result["data_reports"] = trained((rank, 2))
result["documents"] = [of_second_documents(shift) for shift in (0, 7)]
stages = {"wavemare": {"pipeline": {"stages": 2, "inputs": ["input_ids"]}}}
engine, result["pipeline"], result["pipeline_reports"] = trained((0, 1), **stages)


def uses_output(data_iterator, model):
    output, loss = forward_step(data_iterator, model)
    return output.mean(), loss


def packed(data_iterator, model):
    data = next(data_iterator)
    data["position_ids"] = data["position_ids"] % 5
    return forward_step(iter([data]), model)


def masked(data_iterator, model):
    data = next(data_iterator)
    data["attention_mask"] = torch.zeros_like(data["attention_mask"])
    return forward_step(iter([data]), model)


reader = megatron_batches(0, 1)
loss_fn = engine.module.loss_fn
result["refusals"] = [
    refusal(lambda step=step: megatron_train_step(engine, step, reader))
    for step in (uses_output, packed, masked)
]
result["restored"] = engine.module.loss_fn is loss_fn
stages["wavemare"]["guard"] = {"nonfinite": "stop"}
engine, *_ = wavemare.initialize(model=build_gpt2(**QUIET), config=configuration(0, **stages))
if engine.is_last_stage():
    vectors = [p for p in engine.module.parameters() if p.ndim == 1]
    vectors[-1].data.fill_(float("nan"))
result["spoilt"] = refusal(lambda: megatron_train_step(engine, forward_step, reader))
asynchronous = {"wavemare": {"pipeline": {"stages": 2, "schedule": "pipemare"}}}
engine, *_ = wavemare.initialize(model=build_gpt2(**QUIET), config=configuration(0, **asynchronous))
result["asynchronous"] = refusal(lambda: megatron_train_step(engine, forward_step, reader))
leave(result)
