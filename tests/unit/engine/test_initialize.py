# SPDX-License-Identifier: Apache-2.0
"""What happens to a configuration on its way to DeepSpeed and what is refused before."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from torch import distributed

from support.refusals import refuses
from wavemare.engine.config.resolve import zero_section
from wavemare.engine.initialize import ENGINES, build_engine
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.plan.plan import Plan
from wavemare.pipeline.plan.schedules import SCHEDULES

SIZES = {"train_micro_batch_size_per_gpu": 2}


@pytest.fixture(autouse=True)
def one_rank_on_a_cpu(monkeypatch):
    monkeypatch.delenv("WAVEMARE_COMPILED_OPS", raising=False)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_rank", lambda: 0)
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_world_size", lambda: 1)


@pytest.fixture
def group_of_one():
    """A process group in which ranks hear themselves alone."""
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.fixture
def given(monkeypatch):
    """Return the configuration that DeepSpeed is given in the place of one of ours."""

    def given(config, **arguments):
        def initialize(*, config, **_):
            return config, None, None, None

        monkeypatch.setattr(deepspeed, "initialize", initialize)
        arguments = {"model": torch.nn.Linear(2, 2), **arguments}
        return build_engine({**SIZES, **config}, **arguments)[0]

    return given


def adam(kind="AdamW", **parameters):
    return {"optimizer": {"type": kind, "params": parameters}}


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
def test_torch_steps_with_the_defaults_of_the_optimizer_that_it_replaces(given, kind):
    config = adam(kind, lr=0.1, bias_correction=True, set_grad_none=True)
    parameters = given(config)["optimizer"]["params"]
    assert parameters.pop("torch_adam") is True
    fused = inspect.signature(FusedAdam).parameters
    weight = torch.nn.Parameter(torch.ones(1))
    group = torch.optim.AdamW([weight], **parameters).param_groups[0]
    for name in ("weight_decay", "betas", "eps", "amsgrad"):
        assert group[name] == fused[name].default, name
    assert config == adam(
        kind, lr=0.1, bias_correction=True, set_grad_none=True
    )  # the caller's own


def test_nothing_is_offloaded_to_no_device(given):
    config = {**adam(), "zero_optimization": {"offload_optimizer": {"device": "none"}}}
    assert given(config)["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(
    "config",
    [
        adam(torch_adam=False),
        adam(bias_correction=False),
        adam(set_grad_none=False),
        adam("Lamb"),
        {**adam(), "zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        {**adam(), "zero_optimization": {"cpu_offload": True}},
        {},
    ],
)
def test_other_choices_are_left_alone(given, config):
    assert given(config) == {**SIZES, **config}


@pytest.mark.parametrize("key", ["amp", "elasticity", "zero_optimization.mics_shard_size"])
def test_what_deepspeed_has_removed_is_refused_in_its_words(given, key):
    section, _, name = key.rpartition(".")
    with refuses(ConfigError, key):
        given({section: {name: 2}} if section else {name: {}})


def test_a_client_optimizer_and_the_switch_leave_the_configuration_alone(given, monkeypatch):
    assert given(adam(), optimizer=object()) == {**SIZES, **adam()}
    monkeypatch.setenv("WAVEMARE_COMPILED_OPS", "1")
    assert given(adam()) == {**SIZES, **adam()}


@pytest.mark.parametrize(("value", "stage"), [(True, 1), (False, 0), ({"stage": 3}, 3)])
def test_zero_may_be_a_truth_value(value, stage):
    assert zero_section({"zero_optimization": value})["stage"] == stage


def test_a_sequence_parallel_mpu_knows_no_data_ranks(given, monkeypatch):
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_world_size", lambda: 8)
    mpu = SimpleNamespace(get_sequence_parallel_world_size=lambda: 2)
    config = {"train_batch_size": "auto", "gradient_accumulation_steps": 3}
    assert given(config, mpu=mpu)["train_batch_size"] == 2 * 3 * 4


@pytest.mark.parametrize("name", ENGINES)
def test_deepspeed_finds_our_engine_under_the_name_of_its_own(monkeypatch, name):
    assert name in deepspeed.initialize.__code__.co_names, f"it no longer looks up {name}"
    stock, found = getattr(deepspeed, name), []

    def initialize(**_):
        found.append(getattr(deepspeed, name).func)
        raise KeyError

    monkeypatch.setattr(deepspeed, "initialize", initialize)
    with pytest.raises(KeyError):
        build_engine(dict(SIZES), model=torch.nn.Linear(2, 2))
    assert found == [ENGINES[name]]
    assert issubclass(found[0], stock)
    assert getattr(deepspeed, name) is stock


def test_an_engine_of_deepspeeds_own_is_noticed(monkeypatch):
    stock = object.__new__(deepspeed.DeepSpeedEngine)
    monkeypatch.setattr(deepspeed, "initialize", lambda **_: (stock, None, None, None))
    with pytest.raises(RuntimeError, match="the dispatch by name changed"):
        build_engine(dict(SIZES), model=torch.nn.Linear(2, 2))


def staged():
    """Return a model of two stages of which nothing but its grid is there."""
    model = object.__new__(deepspeed.PipelineModule)
    torch.nn.Module.__init__(model)
    grid = SimpleNamespace(
        get_pipe_parallel_world_size=lambda: 2, get_slice_parallel_world_size=lambda: 1
    )
    model.mpu = lambda: grid
    return model


CIRCLE = """
plan schedule=1f1b stages=2 micro_batches=1 steps=1 send_slots=1
0: 0L0 0F0 0RG0 0SA0 0B0 0R0 0S0
1: 1RA0 1L0 1F0 1B0 1SG0 1R0 1S0
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_refuses_a_plan_that_cannot_run_before_the_model_is_touched(
    monkeypatch, rank, group_of_one
):
    asked = []

    def circle(num_stages, micro_batches, num_steps, **options):
        asked.append((num_stages, micro_batches, options))
        return Plan.parse(CIRCLE)

    monkeypatch.setattr("wavemare.engine.initialize.dist.get_rank", lambda: rank)
    monkeypatch.setattr("wavemare.engine.initialize.dist.get_world_size", lambda: 2)
    config = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "wavemare": {"pipeline": {"schedule": "pipemare", "stages": 2, "pipemare": {"slack": 9}}},
    }
    monkeypatch.setitem(SCHEDULES, "pipemare", replace(SCHEDULES["pipemare"], make=circle))
    with refuses(PlanError, "plan", "1f1b"):
        build_engine(config, model=staged())
    assert asked == [(2, 4, {"norms": True, "correct": True, "slack": 9})]
