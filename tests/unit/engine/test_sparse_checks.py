# SPDX-License-Identifier: Apache-2.0
from types import SimpleNamespace

import pytest
import torch

from wavemare.comm.config import LOOSE_MODES, SparseCollectiveConfig
from wavemare.comm.executors import EXECUTOR_TYPES
from wavemare.engine.sparse_attach import attach_sparse_gradients
from wavemare.errors import ConfigError


def test_the_loose_modes_are_those_of_the_executors():
    loose = {name for name, kind in EXECUTOR_TYPES.items() if not kind.deterministic}
    assert loose == LOOSE_MODES


def engine(module=None, **changes):
    values = {"zero": 0, "fp16": False, "bf16": False, "experts": False, "sequence": 1, **changes}
    return SimpleNamespace(
        module=module or torch.nn.Linear(2, 2),
        has_moe_layers=values["experts"],
        sequence_parallel_size=values["sequence"],
        zero_optimization_stage=lambda: values["zero"],
        fp16_enabled=lambda: values["fp16"],
        bfloat16_enabled=lambda: values["bf16"],
    )


def refusal(engine):
    with pytest.raises(ConfigError) as caught:
        attach_sparse_gradients(engine, SparseCollectiveConfig(mode="pushpull"), 1.0)
    return caught.value


def test_experts_and_shared_samples_are_refused():
    assert "experts" in refusal(engine(experts=True)).reason
    refused = refusal(engine(sequence=2))
    assert "sequence" in refused.reason
    assert (refused.key, refused.value) == ("wavemare.sparse_collective.mode", "pushpull")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"zero": 1}, "zero_optimization.stage"),
        ({"zero": 2}, "zero_optimization.stage"),
        ({"fp16": True}, "fp16.enabled"),
        ({"bf16": True}, "bf16.enabled"),
    ],
)
def test_sparse_gradients_are_refused_where_the_optimizer_flattens_them(changes, key):
    module = torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True))
    refused = refusal(engine(module, **changes))
    assert refused.key == key
    assert "0.weight" in refused.reason
