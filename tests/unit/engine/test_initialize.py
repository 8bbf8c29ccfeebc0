# SPDX-License-Identifier: Apache-2.0
"""What happens to a configuration on its way to DeepSpeed, and what a pipeline refuses to load."""

import inspect
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule

from wavemare.engine import PipelineEngine
from wavemare.engine.config import zero_section
from wavemare.engine.initialize import _check, _data_ranks_of, _without_compiled_optimizer
from wavemare.errors import ModelError, PlanError
from wavemare.pipeline.plan import Plan


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


def staged(kind=deepspeed.PipelineModule, stages=2):
    """Return a model of so many stages of which nothing but its grid is there."""
    model = object.__new__(kind)
    torch.nn.Module.__init__(model)
    grid = SimpleNamespace(
        get_pipe_parallel_world_size=lambda: stages, get_slice_parallel_world_size=lambda: 1
    )
    model.mpu = lambda: grid
    return model


CIRCLE = """
plan schedule=1f1b stages=2 micro_batches=1 steps=1 send_slots=0
0: 0L0 0F0 0RG0 0SA0 0B0 0R0 0S0
1: 1RA0 1L0 1F0 1B0 1SG0 1R0 1S0
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_refuses_a_plan_that_cannot_run_before_the_model_is_touched(monkeypatch, rank):
    asked = []

    def circle(pipeline, *shape, clips):
        asked.append((pipeline.schedule, *shape, clips))
        return Plan.parse(CIRCLE)

    monkeypatch.setattr("wavemare.engine.initialize.dist.get_rank", lambda: rank)
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_world_size", lambda: 2)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "wavemare": {"pipeline": {"schedule": "pipemare", "stages": 2}},
    }
    _check(dict(config), staged(), None, None)
    monkeypatch.setattr("wavemare.engine.initialize.run_plan", circle)
    with pytest.raises(PlanError, match="wait"):
        _check(dict(config), staged(), None, None)
    assert asked == [("pipemare", 2, 4, True)]


def test_the_plans_of_others_are_not_checked(monkeypatch):
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_world_size", lambda: 2)
    monkeypatch.setattr("wavemare.engine.initialize.run_plan", None)
    config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    _check(dict(config), staged(DualPipeVModule), None, None)
    _check(dict(config), torch.nn.Linear(2, 2), None, None)
