# SPDX-License-Identifier: Apache-2.0
"""Train two pipelines of two stages by each schedule with each feature, beside one process.

Usage: schedule_features.py FOLDER SCHEDULE/FEATURE...; each rank leaves what it saw by cell.
"""

import gc
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch
from common import (
    build_moe,
    leave,
    refusal,
)
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from experts import batches as masked
from feature_models import (
    LONGEST,
    SIZE,
    gpt2,
    half_frozen,
    looked_up,
    lora,
    loss_of_batch,
    loss_of_rows,
    of_many_lengths,
    packed,
    pairs,
    steady_moe,
    tied_inside,
    tokens_of,
)
from stage_inputs import bodies, mixed
from torch import distributed as dist
from torch import nn
from torch.optim import SGD

import wavemare
import wavemare.universal
from wavemare.engine.pipe.chunks import ChunkedPipelineModule
from wavemare.errors import ModelError
from wavemare.models import whole_state_dict
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.plan.run_plan import homes_of

STAGES, REPLICAS, MICRO, STEPS, RATE = 2, 2, 4, 3, 0.5


def gpipe(ranks, micro_batches):
    """A plan of the user's: all forward passes, then all backward passes in two parts."""
    kinds = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
    orders = tuple(
        tuple(Action(kind, rank, number) for kind in kinds for number in range(micro_batches))
        for rank in range(ranks)
    )
    return Plan("gpipe", ranks, micro_batches, 1, orders)


# --- features -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Feature:
    """What a column of the table trains with.

    Args:
        model: Makes the model, or a list of layers, with the same weights on all ranks.
        data: Yields the batches of a replica.
        config: Sections of DeepSpeed's configuration.
        ours: Sections of ours.
        pipeline: Keys of ``wavemare.pipeline``.
        replicas: Pipelines that train beside each other.
        dtype: Of the model's weights.
        tolerance: Of the weights' distance from one process's, over that from the first weights.
        loss: Of a model and a batch by name, in the one process.
        steps: How many `trained` does: roundings of 16 bits choose other experts soon.
        run: Trains otherwise than by `trained`.
    """

    model: Callable[[], Any] = gpt2
    data: Callable[[int], Iterator[Any]] = tokens_of
    config: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    replicas: int = REPLICAS
    dtype: torch.dtype = torch.float32
    tolerance: float = 1e-4
    loss: Callable[[Any, Any], torch.Tensor] = loss_of_batch
    steps: int = STEPS
    run: Callable[[str, "Feature"], Any] | None = None


def checkpoints(reentrant):
    return {"pipeline": {"activation_checkpoint_interval": 1, "use_reentrant": reentrant}}


BF16 = {"bf16": {"enabled": True}}
CLIP = {"gradient_clipping": 0.2}
FP16 = {"fp16": {"enabled": True, "loss_scale": 256}}
ROUGH = 0.05
EXPERTS: dict[str, Any] = {"expert_parallel": {"size": 2}}
THEIR_EXPERTS = {
    "expert_parallel": {
        "enabled": True,
        "autoep_size": 2,
        "preset_model": "mixtral",
        "use_grouped_mm": False,
    }
}
SPLIT: dict[str, Any] = {"tensor_parallel": {"size": 2}}
SHARED: dict[str, Any] = {**SPLIT, **EXPERTS}
REPLICAS_ALONE = {"local_steps": {"mode": "average", "every": 1, "replica": STAGES}}
"""Each pipeline steps alone, and all have the mean of the weights after each step."""


WITHOUT_STAGES: dict[str, Any] = {"data": {}, "waves": {"wavelet": {"mode": "sync"}}}
"""Layouts in which each rank, or each two that split the model, has the whole of it."""


def start(schedule, feature, **changes):
    """Return an engine of a cell."""
    pipeline = {"stages": STAGES, **feature.pipeline}
    plan = gpipe if schedule == "plan" else None
    if plan is None:
        pipeline["schedule"] = schedule
    if schedule == "pipemare":  # drained at each step it is synchronous
        pipeline["pipemare"] = {"drain_interval": 1}
    layout = WITHOUT_STAGES.get(schedule, {"pipeline": pipeline})
    torch.manual_seed(5)
    model = feature.model()
    if isinstance(model, list):
        homes = () if plan else homes_of(PipelineConfig(schedule=schedule), STAGES)
        kind: Any = deepspeed.PipelineModule
        if len(homes) > STAGES:
            kind = partial(ChunkedPipelineModule, homes=homes)
        del pipeline["stages"]
        options = {"num_stages": STAGES, "partition_method": "uniform"}
        model = kind(model, loss_fn=nn.functional.mse_loss, **options)
    config = {
        "train_micro_batch_size_per_gpu": SIZE,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
        **feature.config,
        "wavemare": {**layout, **feature.ours},
        **changes,
    }
    return wavemare.initialize(model=model, config=config, plan=plan)[0]


def steps_of(feature):
    """Yield the batches of each optimizer step of all replicas."""
    data = [feature.data(rank) for rank in range(feature.replicas)]
    while True:
        yield [[next(each) for _ in range(MICRO)] for each in data]


def alone(feature, steps):
    """Train in this process by plain PyTorch.

    Returns:
        The losses, the last gradient norm, and the weights before and after.
    """
    torch.manual_seed(5)
    model, config = feature.model(), feature.config
    if isinstance(model, list):
        built = [each.build() if isinstance(each, LayerSpec) else each for each in model]
        if isinstance(model[0], TiedLayerSpec):
            built[1] = built[0]
        model = nn.Sequential(*built)
    model.train()
    for parameter in model.parameters():  # not the frequencies of positions
        parameter.data = parameter.data.to(feature.dtype)
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masters = {name: p.detach().float().requires_grad_() for name, p in weights.items()}
    before = {name: p.detach().clone() for name, p in masters.items()}
    optimizer, losses = SGD(masters.values(), lr=RATE), []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="torch_autocast" in config)
    scale = 2.0**8 if feature.dtype == torch.float16 else 1.0
    count = MICRO * feature.replicas
    for micro_batches in islice(steps_of(feature), steps):
        total = 0.0
        for batch in (each for replica in micro_batches for each in replica):
            with autocast:
                if isinstance(batch, dict):
                    loss = feature.loss(model, batch)
                else:
                    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
            (loss * (scale / count)).backward()
            total += float(loss.detach()) / count
            for name, weight in weights.items():
                if weight.grad is not None:
                    grad = weight.grad.to_dense().float() / scale
                    master = masters[name]
                    master.grad = grad if master.grad is None else master.grad + grad
                    weight.grad = None
        limit = config.get("gradient_clipping", math.inf)
        norm = float(nn.utils.clip_grad_norm_(masters.values(), limit))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(masters[name])
    return losses, norm, before, {name: p.detach() for name, p in weights.items()}


def weights_of(engine):
    """Return the whole model's weights on rank 0, by name; None elsewhere."""
    try:
        return whole_state_dict(engine)
    except ModelError:  # of DeepSpeed's own experts each rank holds some, under names of their own
        local = {n: p.detach() for n, p in engine.module.named_parameters()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, local)
    return {name: p for part in reversed(parts) for name, p in part.items()}


def compared(engine, feature, losses):
    """Compare losses and weights with those of one process."""
    found, norm = weights_of(engine), engine.get_global_grad_norm()
    result = {"losses": losses, "norm": norm, "bits": digest(found)}
    if dist.get_rank() == 0:
        expected, expected_norm, before, after = alone(feature, len(losses))
        names = [name for name in after if name in found]
        moved = norm_of(after[n].float() - before[n] for n in names)
        apart = norm_of(after[n].float() - found[n].float() for n in names)
        wrong = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        result |= {
            "expected": expected,
            "apart": apart / moved,
            "wrong": wrong,
            "names": len(names),
        }
        limit = feature.tolerance
        result["norms"] = norm / expected_norm
        result["equal"] = (
            apart <= limit * moved
            and wrong <= limit * max(expected)
            and (engine.num_replicas > 1 or abs(norm / expected_norm - 1) <= limit)
        )
    return result


def norm_of(tensors):
    return math.sqrt(sum(float(t.double().pow(2).sum()) for t in tensors))


def digest(weights):
    if weights is None:
        return None
    return sum(hash(tuple(p.flatten().tolist())) for p in weights.values())


def trained(schedule, feature):
    engine = start(schedule, feature)
    data = feature.data(engine.data_rank)
    losses = []
    for _ in range(feature.steps):
        loss = float(engine.train_batch(data))
        losses.append(engine.step_metrics().get("replica_loss", loss))
    result = compared(engine, feature, losses)
    engine.destroy()
    return result


def compiled(schedule, feature):
    engine = start(schedule, feature)
    engine.compile(backend="aot_eager")
    data = feature.data(engine.data_rank)
    result = compared(engine, feature, [float(engine.train_batch(data)) for _ in range(STEPS)])
    engine.destroy()
    return result


def evaluated(schedule, feature):
    """Evaluate micro-batches of another shape between the steps."""
    engine, losses, found = start(schedule, feature), [], []
    data = feature.data(engine.data_rank)
    for _ in range(STEPS):
        losses.append(float(engine.train_batch(data)))
        other = ({n: t[:1, :7].contiguous() for n, t in each.items()} for each in tokens_of(9))
        found.append(float(engine.eval_batch(other, num_micro_batches=2)))
    result = compared(engine, feature, losses)
    if dist.get_rank() == 0:
        for step, ours in enumerate(found, 1):
            *_, weights = alone(feature, step)
            model = feature.model().eval()
            model.load_state_dict(weights, strict=False)
            with torch.no_grad():
                parts = [
                    model(**{n: t[:1, :7] for n, t in each.items()}).loss
                    for each in islice(tokens_of(9), 2)
                ]
            wrong = abs(float(sum(parts)) / 2 - ours)
            result["equal"] &= wrong < 1e-4
    engine.destroy()
    return result


def resumed(schedule, feature):
    """Go on from a checkpoint to the bits of the run that was not stopped."""
    folder = Path(sys.argv[1], f"resumed-{schedule}")
    engine = start(schedule, feature)
    data = feature.data(engine.data_rank)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder)
    whole = [float(engine.train_batch(data)) for _ in range(2)], digest(weights_of(engine))
    engine.destroy()
    engine = start(schedule, feature)
    engine.load_checkpoint(folder)
    data = islice(feature.data(engine.data_rank), 2 * MICRO, None)
    again = [float(engine.train_batch(data)) for _ in range(2)], digest(weights_of(engine))
    engine.destroy()
    return {"equal": whole == again}


def resumed_elsewhere(schedule, feature):
    """Go on from a universal checkpoint with four stages and another schedule."""
    folder = Path(sys.argv[1], f"elsewhere-{schedule}")
    changes = {"checkpoint": {"load_universal": True}}
    engine = start(schedule, feature)
    data = feature.data(engine.data_rank)
    for _ in range(2):
        engine.train_batch(data)
    engine.save_checkpoint(folder, "first")
    whole = [float(engine.train_batch(data)) for _ in range(2)]
    engine.destroy()
    if dist.get_rank() == 0:
        words = ["--input_folder", f"{folder}/first", "--output_folder", f"{folder}/second"]
        words += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        with mock.patch.object(sys, "argv", ["universal", *words]):
            wavemare.universal.main()
        Path(folder, "latest_universal").write_text("second")
    dist.barrier()
    other = "zbv" if schedule != "zbv" else "1f1b"
    engine = start(other, feature, **changes)
    engine.load_checkpoint(folder)
    data = islice(feature.data(engine.data_rank), 2 * MICRO, None)
    again = [float(engine.train_batch(data)) for _ in range(2)]
    engine.destroy()
    return {"equal": max(abs(a - b) for a, b in zip(whole, again, strict=True)) < 1e-4}


ADAM = {"type": "AdamW", "params": {"lr": 0.01}}
ZERO = {"zero_optimization": {"stage": 1}}
FEATURES: dict[str, Feature] = {
    "two replicas": Feature(),
    "ZeRO 1": Feature(config=ZERO),
    "tensor parallelism": Feature(ours=SPLIT, replicas=1),
    "tensor parallelism, clipping": Feature(config=CLIP, ours=SPLIT, replicas=1),
    "tensor parallelism, clipping, ZeRO 1": Feature(
        config={**CLIP, **ZERO}, ours=SPLIT, replicas=1
    ),
    "tensor parallelism, clipping, bf16": Feature(
        config={**BF16, **CLIP}, ours=SPLIT, replicas=1, dtype=torch.bfloat16, tolerance=ROUGH
    ),
    "tensor parallelism, clipping, LoRA": Feature(
        lora, config={"gradient_clipping": 0.02}, ours=SPLIT, replicas=1
    ),
    "clipping": Feature(config=CLIP),
    "clipping, bf16": Feature(config={**BF16, **CLIP}, dtype=torch.bfloat16, tolerance=ROUGH),
    "clipping, fp16": Feature(config={**FP16, **CLIP}, dtype=torch.float16, tolerance=ROUGH),
    "experts": Feature(build_moe, masked, ours=EXPERTS),
    "experts, clipping": Feature(build_moe, masked, CLIP, EXPERTS),
    "experts, clipping, bf16": Feature(
        build_moe,
        masked,
        {**BF16, "gradient_clipping": 1.0},  # longer steps: weights are rounded
        EXPERTS,
        dtype=torch.bfloat16,
        tolerance=ROUGH,
        steps=1,
    ),
    "experts in bf16": Feature(
        build_moe, masked, BF16, EXPERTS, dtype=torch.bfloat16, tolerance=ROUGH, steps=1
    ),
    "experts in bf16, ZeRO 1": Feature(
        build_moe,
        masked,
        {**BF16, **ZERO},
        EXPERTS,
        dtype=torch.bfloat16,
        tolerance=ROUGH,
        steps=1,
    ),
    "experts in fp16, ZeRO 1": Feature(
        build_moe, masked, {**FP16, **ZERO}, EXPERTS, dtype=torch.float16, tolerance=ROUGH, steps=1
    ),
    "experts, sparse collective": Feature(
        build_moe, masked, ours={**EXPERTS, "sparse_collective": {"mode": "auto"}}
    ),
    "DeepSpeed's experts": Feature(build_moe, masked, THEIR_EXPERTS),
    "DeepSpeed's experts, clipping": Feature(build_moe, masked, {**THEIR_EXPERTS, **CLIP}),
    "DeepSpeed's experts, ZeRO 3": Feature(
        build_moe, masked, {**THEIR_EXPERTS, "zero_optimization": {"stage": 3}}
    ),
    "tensor parallelism and experts": Feature(build_moe, masked, ours=SHARED, replicas=1),
    "tensor parallelism and experts, clipping": Feature(
        build_moe, masked, CLIP, SHARED, replicas=1
    ),
    "tensor parallelism and experts, clipping, ZeRO 1": Feature(
        build_moe, masked, {**CLIP, **ZERO}, SHARED, replicas=1
    ),
    "tensor parallelism and experts, clipping, bf16": Feature(
        steady_moe,
        masked,
        {**BF16, "gradient_clipping": 1.0},
        SHARED,
        replicas=1,
        dtype=torch.bfloat16,
        tolerance=ROUGH,
    ),
    "tensor parallelism and experts in bf16, ZeRO 1": Feature(
        steady_moe,
        masked,
        {**BF16, **ZERO},
        SHARED,
        replicas=1,
        dtype=torch.bfloat16,
        tolerance=ROUGH,
    ),
    "tensor parallelism and experts in fp16, ZeRO 1": Feature(
        steady_moe,
        masked,
        {**FP16, **ZERO},
        SHARED,
        replicas=1,
        dtype=torch.float16,
        tolerance=ROUGH,
        steps=1,
    ),
    "tensor parallelism and experts, sparse collective": Feature(
        build_moe, masked, ours={**SHARED, "sparse_collective": {"mode": "auto"}}, replicas=1
    ),
    "sparse collective": Feature(ours={"sparse_collective": {"mode": "auto"}}),
    "local steps": Feature(ours=REPLICAS_ALONE),
    "local steps, ZeRO 1": Feature(config=ZERO, ours=REPLICAS_ALONE),
    "local steps, bf16": Feature(
        config=BF16, ours=REPLICAS_ALONE, dtype=torch.bfloat16, tolerance=ROUGH
    ),
    "local steps, frozen stage": Feature(half_frozen, ours=REPLICAS_ALONE),
    "LoRA": Feature(lora),
    "DoRA": Feature(partial(lora, use_dora=True)),
    "frozen stage": Feature(half_frozen),
    "dynamic shapes": Feature(data=of_many_lengths, pipeline={"dynamic_shape": True}),
    "packed rows": Feature(
        partial(gpt2, n_positions=LONGEST, use_cache=True),
        packed,
        pipeline={"inputs": ["input_ids", "position_ids"]},
        tolerance=1e-5,
        loss=loss_of_rows,
    ),
    "packed rows, ZeRO 1": Feature(
        partial(gpt2, n_positions=LONGEST, use_cache=True),
        packed,
        config=ZERO,
        pipeline={"inputs": ["input_ids", "position_ids"]},
        tolerance=1e-5,
        loss=loss_of_rows,
    ),
    "float without gradient": Feature(partial(bodies, mixed), pairs),
    "reentrant checkpoints": Feature(config=checkpoints(True)),
    "checkpoints": Feature(config=checkpoints(False)),
    "bf16": Feature(config=BF16, dtype=torch.bfloat16, tolerance=ROUGH),
    "bf16, ZeRO 1": Feature(config={**BF16, **ZERO}, dtype=torch.bfloat16, tolerance=ROUGH),
    "autocast": Feature(
        config={"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, tolerance=ROUGH
    ),
    "fp16": Feature(config=FP16, dtype=torch.float16, tolerance=ROUGH),
    "fp16, ZeRO 1": Feature(config={**FP16, **ZERO}, dtype=torch.float16, tolerance=ROUGH),
    "compiled layers": Feature(run=compiled),
    "weights tied within a stage": Feature(tied_inside, pairs),
    "weights tied across stages": Feature(
        partial(gpt2, tie_word_embeddings=True), pipeline={"untie": False}
    ),
    "Embedding(sparse=True)": Feature(looked_up, partial(pairs, ids=True)),
    "auxiliary losses": Feature(partial(build_moe, auxiliary=True), masked),
    "evaluation of other shapes": Feature(run=evaluated),
    "exact resume": Feature(config=ZERO, run=resumed),
    "tensor parallelism, packed rows": Feature(
        partial(gpt2, n_positions=LONGEST, use_cache=True),
        packed,
        ours=SPLIT,
        pipeline={"inputs": ["input_ids", "position_ids"]},
        replicas=1,
        tolerance=1e-5,
        loss=loss_of_rows,
    ),
    "resume elsewhere": Feature(config={**ZERO, "optimizer": ADAM}, run=resumed_elsewhere),
}


def cell(name):
    """Return what a cell gives: a comparison, or the refusal of all ranks."""
    schedule, feature = name.split("/")
    chosen, found = FEATURES[feature], {}
    if schedule in WITHOUT_STAGES:
        chosen = replace(chosen, replicas=dist.get_world_size() // STAGES * chosen.replicas)
    started = time.monotonic()
    run = chosen.run or trained
    refused = refusal(lambda: found.update(run(schedule, chosen)))
    gc.collect()
    found["seconds"] = time.monotonic() - started
    return found if refused == "accepted" else {"refused": refused}


if __name__ == "__main__":
    wavemare.init_distributed()
    # DeepSpeed asks whether the processor is fast in it; torch computes in it on any.
    type(get_accelerator()).is_fp16_supported = lambda _: True
    results: dict[str, Any] = {}
    for name in sys.argv[2:]:
        try:
            results[name] = cell(name)
        except Exception as error:  # the cell is wrong; the others are still of use
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    leave(results)
