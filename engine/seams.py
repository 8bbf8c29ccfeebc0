# SPDX-License-Identifier: Apache-2.0
"""What of DeepSpeed's inside we build on: each name, with a digest of the source that was read.

Another version may do otherwise behind the same names. `warn_of_other_version` says so at the
start; `tests/unit/engine/test_seams.py` compares the digests and finds overrides not listed here.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from importlib import import_module

import deepspeed

__all__ = ["ATTRIBUTES", "DEEPSPEED", "FUNCTIONS", "digest", "warn_of_other_version"]

DEEPSPEED = "0.19.8"
"""The version that the digests are of, and that all tests run with."""

FUNCTIONS = {
    "runtime.engine.DeepSpeedEngine": """
        _backward_epilogue=5d5297 _backward_prologue=373ee3 _configure_checkpointing=98e9ab
        _configure_distributed_model=a9a57b _configure_optimizer=dd82a7 _copy_recovery_script=4bfd76
        _get_gradients_for_reduction=e27ed4 _save_checkpoint=7cec5b _save_moe_checkpoint=cf5acf
        _take_model_step=c4c6e0 backward=b8c436 buffered_allreduce_fallback=c36145
        clip_fp32_gradients=c3ad53 deepspeed_io=9be5fb destroy=573c7f forward=d99afa
        load_checkpoint=5728d3 save_checkpoint=c92409 scale=bb48d2 set_train_batch_size=b15192
        step=02d6a4 zero_allow_untested_optimizer=d96e72 zero_optimization=3405fc
        _load_zero_checkpoint=008491""",
    "runtime.pipe.dualpipev.DualPipeVEngine": """
        eval_batch=5a4f7c reset_activation_shape=eeeba4""",
    "runtime.pipe.engine.PipelineEngine": """
        _exec_backward_pass=ae2eef _exec_forward_pass=cf4dfb _exec_load_micro_batch=2243e2
        _exec_optimizer_step=6eb521 _exec_recv_activations=04213b _exec_recv_grads=b0c95d
        _exec_reduce_grads=3620e2 _exec_reduce_tied_grads=00d7e6 _exec_schedule=f16256
        _exec_send_activations=c2127e _exec_send_grads=fc5d06 _inference_schedule=681dc5
        _loss_stage_global_rank=67bf3c _next_batch=1361d9 _reserve_pipe_buffers=7cf073
        _train_schedule=8423c0 eval_batch=439640 reset_activation_shape=c73b7e
        set_dataiterator=1e25f9 set_dataloader=bd75a6 set_train_batch_size=791b72
        train_batch=8be6f9""",
    "runtime.pipe.module.PipelineModule": """
        _build=bbd112 _index_tied_modules=84c85c _partition_layers=728916 _set_bounds=fb08a3
        _synchronize_tied_weights=324986""",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": """
        _get_compact_grad_partition_slice=386a91 average_tensor=6fd000 get_flat_partition=77f7f3
        independent_gradient_partition_epilogue=26ceef reduce_ipg_grads=a41525""",
    "utils.groups": """
        _create_expert_and_data_parallel=52f333 _get_expert_parallel_group_dict=40fa81
        _get_model_parallel_world_size=f00b28""",
}
"""By class or module of DeepSpeed: the functions that are called or overridden, name=digest."""

ATTRIBUTES = {
    "runtime.engine.DeepSpeedEngine": """_running_engine_backward _running_engine_backward_lock
        _running_engine_backward_count _unmanaged_backward_count""",
    "runtime.pipe.module.PipelineModule": "_layer_specs _local_start _local_stop tied_comms",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": """all_grad_tensors averaged_gradients
        round_robin_bit16_offsets""",
}
"""The attributes that are read, which have to stand in the source of their class."""

_told: set[str] = set()


def warn_of_other_version(version: str = deepspeed.__version__) -> None:
    """Warn once of a DeepSpeed that is not `DEEPSPEED`, or a local build of it."""
    if version.partition("+")[0] == DEEPSPEED or version in _told:
        return
    _told.add(version)
    logging.getLogger("wavemare").warning(
        "deepspeed %s: wavemare builds on the inside of deepspeed %s and is tested with that "
        "alone. If something differs from stock, try: pip install deepspeed==%s",
        *(version, DEEPSPEED, DEEPSPEED),
    )


def digest(owner: str, name: str) -> str:
    """Return the digest of a function's source, by its owner as in `FUNCTIONS`."""
    function = getattr(found(owner), name)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    function = next(filter(inspect.isfunction, cells), function)  # behind DeepSpeed's decorators
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:6]


def found(owner: str) -> object:
    """Return a class or module of DeepSpeed."""
    module, _, name = f"deepspeed.{owner}".rpartition(".")
    return getattr(import_module(module), name)
