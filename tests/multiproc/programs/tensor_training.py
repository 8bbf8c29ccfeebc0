# SPDX-License-Identifier: Apache-2.0
"""Train models split over two ranks, under ZeRO 0 to 3, beside stock DeepSpeed on whole ones.

Stock trains on all ranks with data parallelism alone: the two ranks of a split model's share a
batch there as well, so that the mean over all ranks is that over the models.
"""

import sys

import deepspeed
import torch
from common import difference, leave
from deepspeed.utils import groups
from tensor_models import batch, build

import wavemare
from wavemare.engine import init_distributed
from wavemare.models import whole_state_dict
from wavemare.parallel import ProcessGrid
from wavemare.parallel.tensor.split import split_model

STEPS, CLIP, TENSOR = 5, 0.05, 2
CASES = [(name, int(stage)) for stage in sys.argv[2] for name in sys.argv[3:]]


def train(initialize, model, stage, data_rank, **arguments):
    config = {
        "train_micro_batch_size_per_gpu": 3,
        # An epsilon above the rounding errors of gradients that are zero, as of biases of keys.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": CLIP,
        "steps_per_print": None,
    }
    engine, *_ = initialize(model=model, config=config, **arguments)
    losses, norms = [], []
    for step in range(STEPS):
        loss = engine(**batch(model, seed=10 * step + data_rank)).loss
        engine.backward(loss)
        if stage == 0:
            norms.append(norm(engine))
        engine.step()
        losses.append(loss.item())
        if stage:
            norms.append(float(engine.get_global_grad_norm()))
    return engine, losses, norms


def norm(engine):
    """The norm that clipping at stage 0 takes; clipping to infinity changes nothing."""
    parameters = list(engine.module.parameters())
    found = deepspeed.runtime.utils.clip_grad_norm_(parameters, float("inf"), mpu=engine.mpu)
    return float(found)


if __name__ == "__main__":
    init_distributed()
    data_rank = torch.distributed.get_rank() // TENSOR
    whole = {
        case: train(deepspeed.initialize, build(case[0]), case[1], data_rank) for case in CASES
    }
    mesh = ProcessGrid.of(tensor=TENSOR)
    assert mesh.get_data_parallel_rank() == data_rank
    result = {}
    for name, stage in CASES:
        expected_engine, expected, expected_norms = whole[name, stage]
        model = split_model(build(name), mesh.get_model_parallel_group())
        engine, losses, norms = train(wavemare.initialize, model, stage, data_rank, mpu=mesh)
        merged = whole_state_dict(engine)
        with deepspeed.zero.GatheredParameters(list(expected_engine.module.parameters())):
            state = {k: v.clone() for k, v in expected_engine.module.state_dict().items()}
        result[f"{name} {stage}"] = {
            "losses": losses,
            "expected": expected,
            "norms": norms,
            "expected_norms": expected_norms,
            "clip": CLIP,
            "data_ranks": engine.data_world_size,
            "difference": None if merged is None else difference(merged, state),
            "moved": difference(state, build(name).state_dict()),
        }
        groups.mpu = None
    leave(result)
