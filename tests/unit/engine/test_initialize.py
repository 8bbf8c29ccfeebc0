# SPDX-License-Identifier: Apache-2.0
"""What happens to a configuration on its way to DeepSpeed, and what a pipeline refuses to load."""

import inspect

import pytest
import torch
from deepspeed.ops.adam import FusedAdam

from wavemare.engine import PipelineEngine
from wavemare.engine.config import zero_section
from wavemare.engine.initialize import _data_ranks_of, _without_compiled_optimizer
from wavemare.errors import ModelError


@pytest.fixture(autouse=True)
def one_rank_on_a_cpu(monkeypatch):
    monkeypatch.delenv("WAVEMARE_COMPILED_OPS", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_rank", lambda: 0)


def adam(kind="AdamW", **parameters):
    return {"optimizer": {"type": kind, "params": parameters}}


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
def test_torch_steps_with_the_defaults_of_the_optimizer_that_it_replaces(kind):
    chosen = _without_compiled_optimizer(adam(kind, lr=0.1, bias_correction=True), None)
    parameters = chosen["optimizer"]["params"]
    assert parameters.pop("torch_adam") is True
    fused = inspect.signature(FusedAdam).parameters
    weight = torch.nn.Parameter(torch.ones(1))
    group = torch.optim.AdamW([weight], **parameters).param_groups[0]
    for name in ("weight_decay", "betas", "eps", "amsgrad"):
        assert group[name] == fused[name].default, name


def test_nothing_is_offloaded_to_no_device():
    config = {**adam(), "zero_optimization": {"offload_optimizer": {"device": "none"}}}
    assert _without_compiled_optimizer(config, None)["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(
    "config",
    [
        adam(torch_adam=False),
        adam(bias_correction=False),
        adam("Lamb"),
        {**adam(), "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {},
    ],
)
def test_other_choices_are_left_alone(config):
    assert _without_compiled_optimizer(config, None) == config


def test_a_client_optimizer_and_the_switch_leave_the_configuration_alone(monkeypatch):
    assert _without_compiled_optimizer(adam(), object()) == adam()
    monkeypatch.setenv("WAVEMARE_COMPILED_OPS", "1")
    assert _without_compiled_optimizer(adam(), None) == adam()


def test_the_callers_configuration_is_not_changed():
    config = adam(lr=0.1)
    _without_compiled_optimizer(config, None)
    assert config == adam(lr=0.1)


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0), ({"stage": 3}, 3)])
def test_zero_may_be_a_truth_value(value, stage):
    assert zero_section({"zero_optimization": value})["stage"] == stage


def test_a_sequence_parallel_mpu_knows_no_data_ranks():
    class SequenceParallel:
        def get_sequence_parallel_world_size(self):
            return 2

    assert _data_ranks_of(SequenceParallel(), 8) == 4


@pytest.fixture
def engine():
    engine = object.__new__(PipelineEngine)
    torch.nn.Module.__init__(engine)
    engine.dynamic_shape = False
    return engine


def test_a_pipeline_refuses_a_micro_batch_of_another_shape(engine):
    engine._check_shapes(torch.ones(2, 8))
    engine._check_shapes(torch.ones(2, 8))
    with pytest.raises(ModelError, match=r"\(\(2, 8\),\)") as caught:
        engine._check_shapes(torch.ones(1, 8))
    assert caught.value.value == ((1, 8),)
    assert "dynamic_shape" in caught.value.remedy


def test_a_pipeline_compares_all_inputs(engine):
    engine._check_shapes((torch.ones(2, 8), torch.ones(2, 8)))
    with pytest.raises(ModelError):
        engine._check_shapes((torch.ones(2, 8), torch.ones(2, 4)))
