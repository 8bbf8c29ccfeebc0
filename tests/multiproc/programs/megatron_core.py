# SPDX-License-Identifier: Apache-2.0
"""megatron-core's own GPTModel under our engines, with its step function and process groups.

Arguments after the folder: JSON, a list of cases. Each has a checkpoint of megatron-core
(``folder``), changes of its arguments (``changes``), and runs: pairs of a number of tensor-parallel
ranks and a list of ZeRO stages.
"""

import itertools
import json
import sys

import torch
from common import leave, refusal, weights_digest

import wavemare
from tools.megatron_core import (
    OnCpu,
    build_model,
    forward_step,
    load_arguments,
    load_weights,
    micro_batches,
    stub_cuda,
)
from wavemare.engine import init_distributed
from wavemare.megatron.step import megatron_train_step

STEPS, BEFORE = 6, 3
CLIP = 0.5
numbers = itertools.count()


def build(**layout):
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    model = build_model(arguments, tensor_model_parallel_size=tensor, **layout)
    load_weights(step, model)
    return model.train()


def train_twin():
    """Train one whole model with torch's AdamW."""
    model = build(sequence_parallel=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    reader = micro_batches(arguments, 0, 0, 1)
    count = arguments["global_batch_size"] // arguments["micro_batch_size"]
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / count))
    losses, norms = [], []
    for _ in range(STEPS):
        total = 0.0
        for _ in range(count):
            output, loss_of = forward_step(reader, model)
            summed, tokens, _ = loss_of(output)
            loss = summed / tokens / count
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1.0))  # as it is in a new process
    return {"losses": losses, "norms": norms}


def start(zero_stage, model=None, **changes):
    parameters = {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}
    micro = arguments["micro_batch_size"]
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": arguments["global_batch_size"] // micro // ranks,
        "optimizer": {"type": "AdamW", "params": parameters},
        "zero_optimization": {"stage": zero_stage},
        "gradient_clipping": CLIP,
        "steps_per_print": None,
    }
    given = {"model": model or build(), "config": config, "mpu": parallel_state, **changes}
    return wavemare.initialize(**given)[0]


def regroup(tensor):
    """Make Megatron's process groups anew."""
    global ranks  # noqa: PLW0603
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor)
    ranks = parallel_state.get_data_parallel_world_size()


def steps(engine, reader, count):
    losses, norms, reports = [], [], []
    for _ in range(count):
        result = megatron_train_step(engine, forward_step, reader)
        mean = result.loss.detach().clone()
        torch.distributed.all_reduce(mean, group=parallel_state.get_data_parallel_group())
        losses.append(float(mean) / ranks)
        norms.append(float(engine.get_global_grad_norm()))
        reports += [report["lm loss"].tolist() for report in result.reports]
    return losses, norms, reports


def trained(zero_stage):
    """Train, save on the way, and go on twice: at once, and in another engine."""
    own = parallel_state.get_data_parallel_rank()
    reader = micro_batches(arguments, 0, own, ranks)
    engine = start(zero_stage)
    losses, norms, reports = steps(engine, reader, BEFORE)
    folder = f"{sys.argv[1]}/{next(numbers)}"
    engine.save_checkpoint(folder, tag="saved")
    more, more_norms, _ = steps(engine, reader, STEPS - BEFORE)
    digest = weights_digest(engine)
    engine.destroy()

    engine = start(zero_stage)
    engine.load_checkpoint(folder, tag="saved")
    reader = micro_batches(arguments, BEFORE * arguments["global_batch_size"], own, ranks)
    again, _, _ = steps(engine, reader, STEPS - BEFORE)
    resumed = weights_digest(engine)
    engine.destroy()
    return {
        "losses": losses + more,
        "norms": norms + more_norms,
        "reports": reports,
        "digests": [digest, resumed],
        "again": [more, again],
    }


def run(case):
    """Train one model: by torch alone, and by our engines with each layout."""
    global arguments, step  # noqa: PLW0603
    regroup(1)
    arguments, step = load_arguments(case["folder"])
    arguments |= case["changes"]
    found = {"twin": train_twin()}
    for tensor, stages in case["runs"]:
        regroup(tensor)
        for zero_stage in stages:
            found[f"tensor_{tensor}_zero_{zero_stage}"] = trained(zero_stage)
    return found


def refusals():
    """Return what is said of models that our engines would train otherwise than Megatron does."""
    regroup(2)
    staged, biased = build(), build()
    staged.post_process = False
    biased.config.moe_router_enable_expert_bias = True
    by_token, fused = build(), build()
    by_token.config.calculate_per_token_loss = True
    fused.config.gradient_accumulation_fusion = True
    wrapped = build()
    wrapped.ddp_config = None
    given = [staged, biased, by_token, fused, wrapped]
    told = [refusal(lambda model=model: start(0, model)) for model in given]
    return [*told, refusal(lambda: start(0, mpu=None))]


stub_cuda()
init_distributed()
from megatron.core import parallel_state  # noqa: E402
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402

with OnCpu():
    result = {name: run(case) for name, case in json.loads(sys.argv[2]).items()}
    result["refusals"] = refusals()
leave(result)
