# SPDX-License-Identifier: Apache-2.0
"""The contract with DeepSpeed about gradients: the seams between the backward pass and the step.

The others are in `test_seams.py`.
"""

import inspect
import re
from types import SimpleNamespace
from unittest.mock import MagicMock

import deepspeed
import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from deepspeed.runtime import bf16_optimizer as bf16_module
from deepspeed.runtime import utils as runtime_utils
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import BF16_Optimizer as PipelineBF16Optimizer
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

ENGINE, PIPELINE = deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine


def names_in(function):
    return set(inspect.unwrap(function).__code__.co_names)


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def behind(function):
    """The function behind DeepSpeed's decorators, which do not tell of it."""
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    decorated = [value for value in held if inspect.isfunction(value)]
    return behind(decorated[0]) if decorated else function


def test_the_optimizer_step_instruction_takes_the_model_step():
    engine = MagicMock()
    engine.wall_clock_breakdown.return_value = False
    engine.global_rank = 1
    PIPELINE._exec_optimizer_step(engine)
    engine._take_model_step.assert_called_once_with(None)


def model_step(*, clipping=1.0, bf16=False, zero=False):
    engine = MagicMock()
    engine.gradient_clipping.return_value = clipping
    engine.fp16_enabled.return_value = False
    engine.bfloat16_enabled.return_value = bf16
    engine.zero_optimization.return_value = zero
    engine.torch_autocast_z0_gradscaler = None
    engine.optimizer.overflow = False
    engine.global_rank, engine.global_steps, engine.global_samples = 1, 0, 0
    engine.steps_per_print.return_value = None
    engine.train_batch_size.return_value = 8
    ENGINE._take_model_step(engine, None)
    assert (engine.global_steps, engine.global_samples) == (1, 8)
    engine.optimizer.step.assert_called_once_with()
    engine.lr_scheduler.step.assert_called_once_with()
    return engine.clip_fp32_gradients.call_count


def test_take_model_step_clips_through_clip_fp32_gradients_in_fp32_without_zero_alone():
    assert model_step() == 1
    assert model_step(clipping=0.0) == 0
    assert model_step(bf16=True) == 0
    assert model_step(zero=True) == 0


CALLS = [
    (PIPELINE._exec_reduce_grads, "_bf16_reduce_grads allreduce_gradients using_bf16_optimizer"),
    (
        PIPELINE._exec_backward_pass,
        """clear_lp_grads update_hp_grads immediate_grad_update _running_engine_backward
        using_bf16_optimizer""",
    ),
    (PIPELINE._bf16_reduce_grads, "buffered_allreduce_fallback"),
    (ENGINE.step, "_take_model_step"),
    (
        ENGINE._backward_epilogue,
        "allreduce_gradients inside_no_sync_ctxt enable_backward_allreduce",
    ),
    (ENGINE._get_gradients_for_reduction, "parameters requires_grad numel"),
    (ENGINE.allreduce_bucket, "communication_data_type gradient_average"),
    (
        BF16_Optimizer.step,
        """get_grads_for_norm get_global_norm_of_tensors mpu clip_tensors_by_global_norm
        clip_grad""",
    ),
    (BF16_Optimizer.get_grads_for_reduction, "non_expert_gradients"),
    (
        DeepSpeedZeroOptimizer.get_grad_norm_direct,
        "dp_process_group _model_parallel_all_reduce model_parallel_rank",
    ),
    (DeepSpeedZeroOptimizer.scaled_global_norm, "get_grad_norm_direct"),
    # The owner of a range is the number of its partition.
    (DeepSpeedZeroOptimizer.average_tensor, "param_to_partition_ids grad_start_offset"),
]


@pytest.mark.parametrize(("function", "names"), CALLS)
def test_deepspeeds_function_uses_the_names(function, names):
    assert set(names.split()) <= names_in(function)


def test_reduce_grads_is_of_the_data_parallel_group_alone():
    assert "_exec_reduce_tied_grads" not in names_in(PIPELINE._exec_reduce_grads)


def test_using_bf16_optimizer_means_the_class_that_we_look_for():
    assert PipelineBF16Optimizer is BF16_Optimizer
    assert (
        "self.using_bf16_optimizer = type(self.optimizer) == BF16_Optimizer"
        in inspect.getsource(PIPELINE.__init__)
    )


ATTRIBUTES = {
    BF16_Optimizer.__init__: """
        mpu clip_grad fp32_groups_gradients_flat fp32_groups_has_gradients""",
    DeepSpeedZeroOptimizer.__init__: """
        model_parallel_group model_parallel_rank clip_grad reduce_bucket_size reduce_scatter
        overlap_comm reduction_stream use_grad_accum_attribute ipg_buckets bit16_groups
        param_to_partition_ids grad_start_offset""",
    deepspeed.DeepSpeedEngine: """
        gradient_average sequence_parallel_size has_moe_layers config _unmanaged_backward_count""",
}


@pytest.mark.parametrize("owner", ATTRIBUTES)
def test_deepspeed_sets_the_attributes(owner):
    source = inspect.getsource(owner)
    for name in ATTRIBUTES[owner].split():
        assert re.search(rf"self\.{name}(: .*)? = ", source), name


METHODS = [
    (BF16_Optimizer, "get_grads_for_norm", "for_clipping"),
    (BF16_Optimizer, "clear_lp_grads", "set_to_none"),
    (BF16_Optimizer, "update_hp_grads", "clear_lp_grads"),
    (deepspeed.DeepSpeedEngine, "buffered_allreduce_fallback", "grads elements_per_buffer"),
    (DeepSpeedZeroOptimizer, "average_tensor", "tensor communication_data_type"),
    (DeepSpeedZeroOptimizer, "reduce_ipg_grads", "comm_dtype"),
    (
        DeepSpeedZeroOptimizer,
        "buffered_reduce_fallback",
        "rank grads communication_data_type elements_per_buffer log",
    ),
    (
        DeepSpeedZeroOptimizer,
        "_buffered_reduce_fallback_preserving_fp32",
        "grads grad_params communication_data_type elements_per_buffer",
    ),
    (DeepSpeedZeroOptimizer, "get_param_comm_dtype", "param"),
    (DeepSpeedZeroOptimizer, "get_param_id", "param"),
    (DeepSpeedZeroOptimizer, "get_gradient_for_reduction", "param"),
    (
        DeepSpeedZeroOptimizer,
        "_get_compact_grad_partition_slice",
        "group_idx partition_id param_id num_elements",
    ),
]


@pytest.mark.parametrize(("owner", "method", "parameters"), METHODS)
def test_deepspeed_has_the_method(owner, method, parameters):
    assert parameters_of(getattr(owner, method)) == ["self", *parameters.split()]


def test_the_norm_of_tensors_without_an_mpu_reduces_nothing(monkeypatch):
    refuse = MagicMock(side_effect=AssertionError("a collective"))
    monkeypatch.setattr(runtime_utils.dist, "all_reduce", refuse)
    cpu = SimpleNamespace(current_device_name=lambda: "cpu")
    monkeypatch.setattr(runtime_utils, "get_accelerator", lambda: cpu)
    norm = runtime_utils.get_global_norm_of_tensors([torch.tensor([3.0]), torch.tensor([4.0])])
    assert float(norm) == 5.0


@pytest.mark.parametrize("bound", [1.0, 2.0, 8.0])
def test_bf16_gradients_are_multiplied_by_the_bound_over_the_norm_and_an_epsilon(bound):
    gradient = torch.tensor([4.0], dtype=torch.float64)
    norm = torch.tensor(4.0, dtype=torch.float64)
    runtime_utils.clip_tensors_by_global_norm([gradient], max_norm=bound, global_norm=norm)
    factor = min(1.0, bound / (4 + 1e-6))
    assert float(gradient) == pytest.approx(4 * factor, rel=1e-14)


@pytest.mark.parametrize("bound", [1.0, 2.0, 8.0, 0.0])
def test_zero_gradients_are_multiplied_by_the_bound_over_the_norm_and_an_epsilon(bound):
    optimizer = SimpleNamespace(clip_grad=bound, loss_scale=1.0, device="cpu")
    gradient = torch.tensor([4.0], dtype=torch.float64)
    norm = torch.tensor(4.0, dtype=torch.float64)
    DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, [gradient], norm)
    factor = min(1.0, bound / (4 + 1e-6)) if bound else 1.0
    assert float(gradient) == pytest.approx(4 * factor, rel=1e-14)


def test_the_zero_optimizer_reduces_over_its_model_parallel_group_or_not_at_all(monkeypatch):
    reduce = MagicMock()
    monkeypatch.setattr(stage_1_and_2.dist, "all_reduce", reduce)
    optimizer = SimpleNamespace(model_parallel_group=None)
    DeepSpeedZeroOptimizer._model_parallel_all_reduce(optimizer, torch.ones(1), "sum")
    reduce.assert_not_called()


def test_the_base_engine_runs_a_forward_and_a_backward_pass():
    engine = deepspeed.DeepSpeedEngine
    assert parameters_of(behind(engine.forward)) == ["self", "inputs", "kwargs"]
    backward = inspect.signature(behind(engine.backward)).parameters
    assert list(backward) == ["self", "loss", "retain_graph", "scale_wrt_gas"]
    assert backward["scale_wrt_gas"].default is True


def test_deepspeeds_own_optimizers_have_the_step_hooks():
    assert issubclass(FusedAdam, torch.optim.Optimizer)


# --- what the sparse collective relies on --------------------------------------------------------


def test_gradients_without_zero_are_reduced_through_buffered_allreduce_fallback():
    reduce = behind(ENGINE.allreduce_gradients)
    assert "buffered_allreduce_fallback" in names_in(reduce)


def test_gradients_without_zero_that_a_rank_lacks_are_zero():
    source = inspect.getsource(ENGINE._get_gradients_for_reduction)
    assert "param.grad = torch.zeros(" in source


def test_the_engine_tells_the_type_in_which_gradients_travel():
    assert isinstance(ENGINE.communication_data_type, property)


def test_the_bf16_optimizer_reduces_the_gradients_of_its_groups():
    source = inspect.getsource(BF16_Optimizer._setup_for_real_optimizer)
    assert "self.non_expert_gradients.append(fp32_flat_buffer)" in source
    assert "self.fp32_groups_gradients.append(fp32_gradients)" in source


def test_zero_reduces_gathered_gradients_in_reduce_ipg_grads_alone():
    names = names_in(DeepSpeedZeroOptimizer.reduce_ipg_grads)
    reducing = {
        "average_tensor",
        "buffered_reduce_fallback",
        "_buffered_reduce_fallback_preserving_fp32",
    }
    assert reducing <= names
    for name, method in inspect.getmembers(DeepSpeedZeroOptimizer, inspect.isfunction):
        if name != "reduce_ipg_grads":
            assert not reducing & names_in(method), name


def test_zero_ends_a_backward_pass_by_reduce_ipg_grads_without_a_type_before_it_reads_gradients():
    epilogue = inspect.getsource(DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue)
    assert epilogue.index("self.reduce_ipg_grads()") < epilogue.index("get_all_grad_tensors(")
    during = inspect.getsource(
        DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads
    )
    assert "self.reduce_ipg_grads(comm_dtype=comm_dtype)" in during


def test_zero_copies_a_reduced_gradient_after_it_was_reduced():
    source = inspect.getsource(DeepSpeedZeroOptimizer.reduce_ipg_grads)
    assert source.index("self.average_tensor(") < source.index("self.copy_grads_in_partition(")


def test_zeros_buckets_know_their_parameters_gradients_and_producers():
    bucket = stage_1_and_2.IPGBucket()
    assert (bucket.params, bucket.grads, set(bucket.copy_streams)) == ([], [], set())
    gather = inspect.getsource(
        DeepSpeedZeroOptimizer.reduce_independent_p_g_buckets_and_remove_grads
    )
    assert "bucket.params.append((i, param.param_idx_in_group, param_id))" in gather
    assert "bucket.grads.append(grad_reduc)" in gather


@pytest.mark.parametrize(
    ("place", "seams"),
    [
        (
            stage_1_and_2,
            ("averaged_gradients", "params_in_partition", "check_grad_overflow", "has_overflow"),
        ),
        (stage3, ("averaged_gradients", "_get_norm_groups", "fp32_partitioned_groups_flat")),
        (bf16_module, ("fp32_groups_gradients_flat", "_hp_grad")),
    ],
    ids=["ZeRO 1 and 2", "ZeRO 3", "bf16"],
)
def test_the_optimizers_keep_gradients_and_skip_steps_where_the_guard_looks(place, seams):
    source = inspect.getsource(place)
    for seam in seams:
        assert seam in source, seam
