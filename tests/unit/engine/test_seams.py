"""The contract with DeepSpeed: each private seam that the engines use, by name.

When a new DeepSpeed moves one of them, the test of that name fails and says what to look at.
"""

import inspect
from importlib import import_module

import deepspeed
import pytest
from deepspeed.runtime.pipe import schedule

import wavemare
from wavemare.engine import DualPipeVEngine, Engine, PipelineEngine
from wavemare.engine.initialize import ENGINES, _dispatch_to_ours

PARAMETERS = [
    "args",
    "model",
    "optimizer",
    "model_parameters",
    "training_data",
    "lr_scheduler",
    "distributed_port",
    "mpu",
    "dist_init_required",
    "collate_fn",
    "config",
    "mesh_param",
    "config_params",
]


def test_initialize_has_the_thirteen_parameters_of_deepspeed_in_order():
    stock = inspect.signature(deepspeed.initialize).parameters
    ours = inspect.signature(wavemare.initialize).parameters
    assert list(stock) == list(ours) == PARAMETERS
    assert [p.default for p in stock.values()] == [p.default for p in ours.values()]


@pytest.mark.parametrize("name", ENGINES)
def test_initialize_looks_up_the_engine_by_its_name_in_the_deepspeed_module(name):
    code = deepspeed.initialize.__code__
    assert name in code.co_names, f"deepspeed.initialize no longer looks up {name}"
    stock = getattr(deepspeed, name)
    with _dispatch_to_ours():
        assert getattr(deepspeed, name) is ENGINES[name]
    assert getattr(deepspeed, name) is stock


def test_the_names_are_restored_after_an_error():
    stock = deepspeed.PipelineEngine
    with pytest.raises(KeyError), _dispatch_to_ours():
        raise KeyError
    assert deepspeed.PipelineEngine is stock


@pytest.mark.parametrize(
    ("ours", "stock"),
    [
        (Engine, deepspeed.DeepSpeedEngine),
        (PipelineEngine, deepspeed.PipelineEngine),
        (DualPipeVEngine, deepspeed.DualPipeVEngine),
    ],
)
def test_engines_are_subclasses_of_deepspeeds(ours, stock):
    assert issubclass(ours, stock)


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (
            "save_checkpoint",
            ["self", "save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"],
        ),
        (
            "load_checkpoint",
            [
                "self",
                "load_dir",
                "tag",
                "load_module_strict",
                "load_optimizer_states",
                "load_lr_scheduler_states",
                "load_module_only",
                "custom_load_fn",
            ],
        ),
    ],
)
def test_checkpoint_methods_keep_deepspeeds_parameters(method, parameters):
    for engine in (deepspeed.DeepSpeedEngine, Engine):
        assert list(inspect.signature(getattr(engine, method)).parameters) == parameters


@pytest.mark.parametrize(
    "seam",
    [
        "_next_batch",
        "_exec_load_micro_batch",
        "_train_schedule",
        "_inference_schedule",
        "_loss_stage_global_rank",
        "_INSTRUCTION_MAP",
        "train_batch",
        "eval_batch",
    ],
)
def test_the_pipeline_engine_has_the_seam(seam):
    assert hasattr(deepspeed.PipelineEngine, seam)


def test_micro_batches_are_fetched_through_next_batch():
    load = deepspeed.PipelineEngine._INSTRUCTION_MAP[schedule.LoadMicroBatch]
    assert "_next_batch" in load.__code__.co_names


@pytest.mark.parametrize(
    "seam",
    ["load_universal_checkpoint", "use_node_local_storage", "get_global_grad_norm", "get_lr"],
)
def test_the_engine_has_the_seam(seam):
    assert hasattr(deepspeed.DeepSpeedEngine, seam)


def test_shared_memory_communication_is_switched_off_through_the_compatible_ops():
    backend = import_module("deepspeed.comm.torch")
    names = backend.build_shm_op.__code__.co_names
    assert "__compatible_ops__" in names
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
