# SPDX-License-Identifier: Apache-2.0
"""One training with an mpu in each dialect, and pipelines with an mpu of their own layout."""

import importlib.util
from types import SimpleNamespace

import torch
from common import (
    QUIET,
    build_gpt2,
    build_pipeline,
    configuration,
    leave,
    token_batches,
    weights_digest,
)
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.utils import groups

import wavemare
from wavemare.engine import init_distributed
from wavemare.errors import ConfigError
from wavemare.parallel import ProcessGrid


def megatron(grid):
    names = (
        "get_tensor_model_parallel_group",
        "get_pipeline_model_parallel_group",
        "get_data_parallel_group",
        "get_model_parallel_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "get_data_parallel_rank",
        "get_data_parallel_world_size",
    )
    return SimpleNamespace(**{name: getattr(grid, name) for name in names})


def trained(mpu, data_rank, zero_stage):
    groups.mpu = None  # where DeepSpeed keeps that of the engine before
    model = build_gpt2(**QUIET)
    engine, *_ = wavemare.initialize(model=model, config=configuration(zero_stage), mpu=mpu)
    batches = token_batches(data_rank)
    for _ in range(6):
        tokens = next(batches)
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
    return {"digest": weights_digest(engine), "data_ranks": engine.data_world_size}


init_distributed()
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
ours = ProcessGrid.of(tensor=2)
result = {}
for zero_stage in (0, 1):
    dialects = {
        "ours": ours,
        "megatron": megatron(ours),
        "deepspeed": PipelineParallelGrid(PipeModelDataParallelTopology(1, 2, world // 2)),
    }
    result[f"zero_{zero_stage}"] = {
        name: trained(mpu, rank // 2, zero_stage) for name, mpu in dialects.items()
    }
result["plain"] = trained(None, rank // 2, 0)

groups.mpu = None
layout = {"wavemare": {"pipeline": {"stages": 2}}}
staged = {"gradient_clipping": 0.0, **layout}
own = ProcessGrid.of(pipeline=2)
engine, *_ = wavemare.initialize(
    model=build_pipeline(), config=configuration(0, **staged), mpu=megatron(own)
)
result["stage"] = [engine.stage_id, own.get_pipeline_model_parallel_rank()]
result["replica"] = [engine.grid.get_data_parallel_rank(), own.get_data_parallel_rank()]
try:
    wavemare.initialize(model=build_pipeline(), config=configuration(0, **staged), mpu=ours)
except ConfigError as error:
    result["refused"] = str(error)
if importlib.util.find_spec("megatron"):
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(2, 1)
    result["core"] = trained(parallel_state, rank // 2, 0)
leave(result)
