# SPDX-License-Identifier: Apache-2.0
"""The contract with DeepSpeed: each private seam that the engines use, by name.

When a new DeepSpeed moves one of them, the test of that name fails and says what to look at. What
gradients go through, from the backward pass to the step, is in `test_seams_gradients.py`.
"""

import inspect
from importlib import import_module
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import schedule, topology
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

import wavemare
from wavemare.engine import Engine
from wavemare.engine.initialize import ENGINES
from wavemare.engine.pipe.linked import OverlappedPipelineEngine
from wavemare.engine.pipe.pipemare import PipeMareEngine
from wavemare.engine.seams import (
    ATTRIBUTES,
    DEEPSPEED,
    FUNCTIONS,
    digest,
    found,
    warn_of_other_version,
)

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


def overridden():
    """Return the methods of DeepSpeed's that our engines have their own of, as `FUNCTIONS` has."""
    for engine in (*ENGINES.values(), OverlappedPipelineEngine, PipeMareEngine):
        stock = [kind for kind in engine.__mro__ if kind.__module__.startswith("deepspeed.")]
        for kind in engine.__mro__:
            for name in vars(kind) if kind.__module__.startswith("wavemare.") else ():
                for owner in stock if not name.startswith("__") else ():
                    if inspect.isfunction(vars(owner).get(name)):
                        place = f"{owner.__module__}.{owner.__qualname__}"
                        yield place.removeprefix("deepspeed."), name


def test_deepspeeds_inside_is_what_the_engines_were_written_against():
    read = {(owner, *one.split("=")) for owner, names in FUNCTIONS.items() for one in names.split()}
    assert read == {(owner, name, digest(owner, name)) for owner, name, _ in read}
    assert {*overridden()} <= {(owner, name) for owner, name, _ in read}
    for owner, names in ATTRIBUTES.items():
        source = inspect.getsource(found(owner))
        assert not [name for name in names.split() if f"self.{name}" not in source], owner


def test_another_deepspeed_is_told_once(caplog):
    for version in (DEEPSPEED, f"{DEEPSPEED}+local", "0.19.999", "0.19.999"):
        warn_of_other_version(version)
    (told,) = caplog.messages
    assert "0.19.999" in told
    assert f"deepspeed=={DEEPSPEED}" in told


SEAMS = {
    deepspeed.PipelineEngine: """
        _next_batch _exec_load_micro_batch _train_schedule _inference_schedule
        _loss_stage_global_rank _INSTRUCTION_MAP train_batch eval_batch _exec_reduce_grads
        _exec_optimizer_step _reentrant_activation_checkpointing clip_fp32_gradients
        reset_activation_shape set_train_batch_size""",
    deepspeed.DeepSpeedEngine: """
        load_universal_checkpoint use_node_local_storage get_global_grad_norm get_lr
        _configure_optimizer zero_allow_untested_optimizer zero_use_cpu_optimizer
        zero_offload_optimizer zero_optimization _take_model_step""",
    PipelineModule: "_partition_layers _set_bounds _build _synchronize_tied_weights",
    topology.PipelineParallelGrid: """
        get_slice_parallel_world_size get_pipe_parallel_group get_data_parallel_group
        get_pipe_parallel_world_size""",
    groups: """
        mpu _get_model_parallel_world_size _get_expert_parallel_group_dict
        _create_expert_and_data_parallel""",
}


@pytest.mark.parametrize(
    ("owner", "seam"), [(owner, seam) for owner, names in SEAMS.items() for seam in names.split()]
)
def test_deepspeed_has_the_seam(owner, seam):
    assert hasattr(owner, seam)


@pytest.mark.parametrize("attribute", ["_layer_specs", "_local_start", "_local_stop"])
def test_the_pipeline_module_keeps_its_layers_in_the_attribute(attribute):
    assert f"self.{attribute}" in inspect.getsource(PipelineModule)


def test_micro_batches_are_fetched_through_next_batch():
    load = deepspeed.PipelineEngine._INSTRUCTION_MAP[schedule.LoadMicroBatch]
    assert "_next_batch" in load.__code__.co_names


def test_shared_memory_communication_is_switched_off_through_the_compatible_ops():
    backend = import_module("deepspeed.comm.torch")
    names = backend.build_shm_op.__code__.co_names
    assert "__compatible_ops__" in names
    assert "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__


def test_reserving_no_pipe_buffers_changes_nothing():
    engine = SimpleNamespace(num_pipe_buffers=0, pipe_buffers={"inputs": []})
    deepspeed.PipelineEngine._reserve_pipe_buffers(engine, 0)
    assert engine.pipe_buffers == {"inputs": []}


KINDS = {
    "OptimizerStep": "optimizer_step",
    "ReduceGrads": "reduce_grads",
    "ReduceTiedGrads": "reduce_tied_grads",
    "LoadMicroBatch": "load_micro_batch",
    "ForwardPass": "forward_pass",
    "BackwardPass": "backward_pass",
    "SendActivation": "send_activations",
    "RecvActivation": "recv_activations",
    "SendGrad": "send_grads",
    "RecvGrad": "recv_grads",
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_instruction_map_has_deepspeeds_method(kind):
    found = deepspeed.PipelineEngine._INSTRUCTION_MAP[getattr(schedule, kind)]
    assert found is getattr(deepspeed.PipelineEngine, f"_exec_{KINDS[kind]}")


def test_train_batch_runs_what_train_schedule_returns():
    names = deepspeed.PipelineEngine.train_batch.__code__.co_names
    assert {"_train_schedule", "_exec_schedule"} <= set(names)


def test_the_grid_lists_the_ranks_of_each_pipeline():
    source = inspect.getsource(topology.PipelineParallelGrid.__init__)
    assert "self.pipe_groups = self._topo.get_axis_comm_lists('pipe')" in source
    layout = topology.PipeDataParallelTopology(num_pp=3, num_dp=2)
    assert layout.get_axis_comm_lists("pipe") == [[0, 2, 4], [1, 3, 5]]


def test_slices_are_the_model_axis():
    grid = SimpleNamespace(slice_parallel_size=3)
    assert topology.PipelineParallelGrid.get_slice_parallel_world_size(grid) == 3
    source = inspect.getsource(topology.PipelineParallelGrid.__init__)
    assert "self.slice_parallel_size = self.model_parallel_size" in source


def test_a_pipeline_module_keeps_its_tied_layers_by_key():
    source = inspect.getsource(PipelineModule.__init__)
    assert "self.tied_comms = self._index_tied_modules()" in source
    source = inspect.getsource(PipelineModule._index_tied_modules)
    assert "tied_comms[key] = " in source


def test_a_pipeline_module_has_no_additional_losses_unless_its_author_adds_some():
    assert PipelineModule.get_additional_losses(None) is None


def test_weights_may_change_behind_autograds_back_inside_preserve_version_counter():
    weight = torch.nn.Parameter(torch.tensor([2.0]))
    inputs = torch.tensor([3.0], requires_grad=True)
    output = weight * inputs
    with torch.no_grad(), _unsafe_preserve_version_counter((weight,)):
        weight.mul_(10)
    output.backward()
    assert inputs.grad.item() == 20.0  # of the newest weight
    output = weight * inputs
    with torch.no_grad():
        weight.mul_(10)
    with pytest.raises(RuntimeError, match="inplace operation"):
        output.backward()
