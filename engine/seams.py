# SPDX-License-Identifier: Apache-2.0
"""Private parts of DeepSpeed and torch: the names that we read, and everything that we replace.

`FUNCTIONS` has a digest of each function's source. Another version may behave differently behind
the same names. `warn_of_other_version` says so at the start; `tests/unit/engine/test_seams.py`
compares the digests and finds overrides that are not listed here. The functions below replace what
no hook of DeepSpeed or torch reaches; each says why.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from importlib.metadata import version as installed
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from torch import distributed
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.file_baton import FileBaton

from wavemare.comm.waits import waiting

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

DEEPSPEED = "0.19.8"
"""The version that the digests are of, and that all tests run with."""

FUNCTIONS = {
    "runtime.engine.DeepSpeedEngine": """
        _backward_epilogue=5d5297 _backward_prologue=373ee3 _broadcast_model=56eea8
        _configure_checkpointing=98e9ab _get_rank_zero_ckpt_name=ded768 train_batch_size=913c10
        _get_zero_ckpt_name=ebf13c _reduce_expert_gradients=e85f52
        _configure_distributed_model=a9a57b _get_ckpt_name=5bef33 _get_all_ckpt_names=d3a867
        _configure_lr_scheduler=5f3c01
        _configure_optimizer=dd82a7 _copy_recovery_script=4bfd76
        _get_gradients_for_reduction=e27ed4 _save_checkpoint=7cec5b _save_moe_checkpoint=cf5acf
        allreduce_bucket=aee7bd allreduce_gradients=463dde allreduce_and_copy=c0e79d
        allreduce_no_retain=43b984
        _take_model_step=c4c6e0 backward=b8c436 buffered_allreduce_fallback=c36145
        clip_fp32_gradients=c3ad53 deepspeed_io=9be5fb destroy=573c7f forward=d99afa
        load_checkpoint=5728d3 save_checkpoint=c92409 scale=bb48d2 set_train_batch_size=b15192
        set_train_micro_batch_size=e5bdf7 _start_timers=352ef6 _stop_timers=38ddc0
        step=02d6a4 zero_allow_untested_optimizer=d96e72 zero_optimization=3405fc
        _load_checkpoint=45c195 _load_zero_checkpoint=008491 load_module_state_dict=402cc9
        steps_per_print=47026b get_global_grad_norm=93f2c5 save_16bit_model=a9fbf0
        zero_grad=3fae90""",
    "runtime.pipe.dualpipev.DualPipeVEngine": """
        eval_batch=5a4f7c reset_activation_shape=eeeba4""",
    "runtime.bf16_optimizer.BF16_Optimizer": """
        _setup_for_real_optimizer=d5c428 clear_lp_grads=455d9b get_grads_for_norm=81ed7f
        get_grads_for_reduction=2ed8bb refresh_fp32_params=9571f0 step=9b21d4
        update_hp_grads=e36698 update_lp_params=128911""",
    "runtime.fp16.fused_optimizer.FP16_Optimizer": "refresh_fp32_params=909279",
    "runtime.fp16.unfused_optimizer.FP16_UnfusedOptimizer": "refresh_fp32_params=d36b9d",
    "runtime.pipe.engine.PipelineEngine": """
        _aggregate_total_loss=562a55 _bcast_pipe_scalar=13b548 _bf16_reduce_grads=9b1ca8
        _build_data_iter=238ef4 module_state_dict=32d14a
        _exec_backward_pass=ae2eef _exec_forward_pass=cf4dfb _exec_load_micro_batch=2243e2
        _exec_optimizer_step=6eb521 _exec_recv_activations=04213b _exec_recv_grads=b0c95d
        _exec_reduce_grads=3620e2 _exec_reduce_tied_grads=00d7e6 _exec_schedule=f16256
        _exec_send_activations=c2127e _exec_send_grads=fc5d06 _inference_schedule=681dc5
        _loss_stage_global_rank=67bf3c _next_batch=1361d9 _reserve_pipe_buffers=7cf073
        _train_schedule=8423c0 eval_batch=439640 forward=5c3faa reset_activation_shape=c73b7e
        is_first_stage=4cf9be is_last_stage=29fc2f load_module_state_dict=a5d5a5
        set_dataiterator=1e25f9 set_dataloader=bd75a6 set_train_batch_size=791b72
        train_batch=8be6f9""",
    "runtime.pipe.module.PipelineModule": """
        _build=bbd112 _index_tied_modules=84c85c _partition_layers=728916
        _precompute_checkpointable_values=b8207b _set_bounds=fb08a3
        _synchronize_tied_weights=324986 ckpt_layer_path=3977f9 ckpt_layer_path_list=63ceac
        compile=b61b74 load_state_dir=8ff8a5 save_state_dict=44e467 stage_owner=28dcf9""",
    "runtime.pipe.topology.PipelineParallelGrid": """
        __init__=ed9044 stage_to_global=ddc28c""",
    "runtime.pipe.topology.ProcessTopology": "get_rank_repr=b67fe4",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": """
        _get_compact_grad_partition_slice=386a91 average_tensor=6fd000 get_flat_partition=77f7f3
        independent_gradient_partition_epilogue=26ceef reduce_ipg_grads=a41525
        _buffered_reduce_fallback_preserving_fp32=f1dcab _model_parallel_all_reduce=ea2c37
        buffered_reduce_fallback=1cb18c get_grad_norm_direct=72af09 has_overflow=cadc27
        get_gradient_for_reduction=740064 get_param_comm_dtype=fa98ff get_param_id=960db3
        reduce_independent_p_g_buckets_and_remove_grads=500839 scaled_global_norm=63c6a6
        refresh_fp32_params=9571f0 step=952088 unscale_and_clip_grads=6bf2ce
        update_lp_params=3cdce0""",
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": """
        _get_norm_groups=6a068f has_overflow=1008a8 refresh_fp32_params=9571f0 step=c751b3""",
    "moe.utils": """configure_moe_param_groups=c2eb33
        split_params_into_different_moe_groups_for_optimizer=5c2e39""",
    "runtime.utils": """
        all_gather_dp_groups=87c5e3 clip_grad_norm_=72d40c clip_tensors_by_global_norm=7acb1d
        combine_grad_norm_groups=37a114
        get_global_norm_of_tensors=2345c9""",
    "utils.groups": """
        _create_expert_and_data_parallel=52f333 _get_expert_data_parallel_rank=62ac04
        _get_expert_parallel_group=84bd9f _get_expert_parallel_rank=e1de17
        _get_expert_parallel_group_dict=40fa81
        _get_model_parallel_world_size=f00b28""",
}
"""By class or module of DeepSpeed: functions that we call, override or rely on, name=digest."""

ATTRIBUTES = {
    "runtime.bf16_optimizer.BF16_Optimizer": """clip_grad fp32_groups_gradients_flat
        fp32_groups_has_gradients mpu non_expert_gradients""",
    "runtime.engine.DeepSpeedEngine": """_running_engine_backward _running_engine_backward_lock
        _running_engine_backward_count _running_engine_step has_moe_layers save_non_zero_checkpoint
        _is_gradient_accumulation_boundary _manual_backward_expected _unmanaged_backward_count
        engine_timers""",
    "runtime.pipe.engine.PipelineEngine": """_compute_loss _curr_ckpt_path eval_return_logits
        fwd_outputs""",
    "runtime.pipe.module.PipelineModule": "_layer_specs _local_start _local_stop tied_comms",
    "runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": """all_grad_tensors averaged_gradients
        bit16_groups clip_grad compute_grad_norm cpu_offload grad_start_offset ipg_buckets
        model_parallel_group overflow overlap_comm parallel_partitioned_bit16_groups
        param_to_partition_ids params_in_partition
        reduce_bucket_size reduction_stream round_robin_bit16_offsets""",
    "runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": """averaged_gradients
        fp32_partitioned_groups_flat offload_optimizer use_muon""",
    "utils.timer.SynchronizedWallClockTimer": "started_",
}
"""The attributes that are read, which have to stand in the source of their class."""

_told: set[str] = set()


def warn_of_other_version(version: str | None = None) -> None:
    """Warn once of a DeepSpeed that is not `DEEPSPEED`, or a local build of it."""
    version = version or installed("deepspeed")
    if version.partition("+")[0] == DEEPSPEED or version in _told:
        return
    _told.add(version)
    logging.getLogger("wavemare").warning(
        "deepspeed %s: wavemare uses internals of deepspeed %s and is tested only with that "
        "version. If something differs from stock, try: pip install deepspeed==%s",
        *(version, DEEPSPEED, DEEPSPEED),
    )


_dispatch_lock = threading.Lock()


@contextmanager
def dispatch_to(engines: Mapping[str, Any]) -> Iterator[None]:
    """Have ``deepspeed.initialize`` build our engines.

    It has no class parameter, and looks its engines up by name at call time. Replacing the names
    for one call keeps all else that it does, whatever version is installed.
    """
    with _dispatch_lock, replaced(import_module("deepspeed"), engines):
        yield


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Give an object or module other attributes inside the block."""
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    vars(owner).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(owner)[name]
        vars(owner).update(own)


def import_muon() -> None:
    """Import DeepSpeed's Muon, which ZeRO compares each optimizer with, without a compiler.

    ``torch.compile`` imports Inductor when it decorates a function. This takes about three seconds
    at each start. Here it waits until one of Muon's functions is called.
    """
    name = "deepspeed.runtime.zero.muon.original_muon"
    if name in sys.modules:
        return
    later: list[Any] = []

    def compile_later(function: Any) -> Any:
        later.append(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            while later:  # all of them, as they call each other
                each = later.pop()
                vars(module)[each.__name__] = torch.compile(each)
            return vars(module)[function.__name__](*args, **kwargs)

        return call

    with replaced(torch, {"compile": compile_later}):
        module = import_module(name)


def mark_waits() -> None:
    """Mark the waits of torch from now on; a second call does nothing.

    Every collective, DeepSpeed's too, waits in one of these methods, and none has a hook. A mark
    costs 3 microseconds. With NCCL ``Work.wait`` returns at once, and the host waits for its
    device: NCCL's own watchdog ends such a run.
    """
    if hasattr(distributed.Work.wait, "__wrapped__"):
        return
    _mark(distributed.Work, "wait", _collective)
    _mark(distributed.distributed_c10d.Store, "wait", lambda _: "the store of the process group")
    _mark(distributed.distributed_c10d.Store, "get", lambda _: "the store of the process group")
    _mark(FileBaton, "wait", _lock)


def _mark(owner: Any, name: str, describe: Callable[[Any], str]) -> None:
    method = getattr(owner, name)

    @functools.wraps(method)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with waiting(describe(self)):
            return method(self, *args, **kwargs)

    setattr(owner, name, marked)


def _collective(_: Any) -> str:
    caller = sys._getframe(2)  # the caller of `marked`
    of_torch = str(caller.f_globals.get("__name__")).startswith("torch.distributed")
    return caller.f_code.co_name if of_torch else "a message or collective"


def _lock(baton: FileBaton) -> str:
    lock = f"the lock {baton.lock_file_path} of an extension build"
    return f"{lock}; if no build is running, remove that file"


def keeping_versions(parameters: tuple[torch.Tensor, ...]) -> AbstractContextManager[None]:
    """Change weights in place inside, without telling autograd.

    Backward passes of micro-batches in flight want what autograd forbids: the present weights.
    """
    return _unsafe_preserve_version_counter(parameters)


@contextmanager
def finding_recorders() -> Iterator[None]:
    """Let DeepSpeed's own ``expert_parallel`` find what transformers records of a router.

    It looks a class up by its name, with a default. Since transformers 5.24 the registry takes
    a module alone, and answers a name with nothing.
    """
    try:
        registry: Any = import_module("transformers.utils.output_capturing")._CanRecordRegistry
    except (ImportError, AttributeError):  # another version
        yield
        return

    def get(self: Any, model: Any, default: Any = None) -> Any:
        if isinstance(model, str):
            return dict.get(self, model, default)
        return own(self, model)

    own, registry.get = registry.get, get
    try:
        yield
    finally:
        registry.get = own


@contextmanager
def noting_groups(made: list[Any]) -> Iterator[None]:
    """Add the process groups that are made inside to a list, DeepSpeed's too.

    DeepSpeed makes them by torch's function of that name, and keeps no list of them.
    """
    make = distributed.new_group

    @functools.wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = make(*args, **kwargs)
        if not kwargs.get("use_local_synchronization"):  # `group_for` keeps that for others
            made.append(group)
        return group

    with replaced(distributed, {"new_group": new_group}):
        yield
    await_connections()


def await_connections(group: Any = None) -> None:
    """Wait until all ranks of a group have connected the groups of gloo's that they have made.

    ``new_group`` returns on each rank as soon as its own connections stand. It fails on the other
    ranks if this one destroys the group, or leaves, while they still look at theirs.
    """
    if distributed.get_backend(group) == "gloo":
        distributed.barrier(group)


def end_workers(batches: Any) -> None:
    """End the processes that read for an engine's own loader.

    They hear of it while something refers to the loader's queues. Where the garbage collector finds
    iterator and queues together, it closes the queues first, and torch waits 5 s for each process.

    Args:
        batches: The loader of ``training_data`` that the engine has made an iterator of, or None.
    """
    loader = getattr(batches, "loader", None)
    if isinstance(loader, DeepSpeedDataLoader):
        loader.data = loader.data_iterator = None


def destroy_groups(made: list[Any]) -> None:
    """Destroy process groups, the last first, and empty the list.

    Ranks may call it at different times. Groups that are destroyed already are passed over.
    """
    while made:
        with suppress(ValueError):  # torch no longer knows it
            distributed.destroy_process_group(made.pop())


_NEVER_SENT = 1 << 30
"""A tag that no message has."""


def fail_group(group: Any) -> None:
    """Let the ranks that wait in a group of gloo's fail at once, now and later.

    gloo closes the connections of a group in which a receive has timed out, and has no other call
    for that. NCCL has none that other ranks would notice before its own timeout.
    """
    if distributed.get_backend(group) != "gloo":
        return
    own = distributed.get_rank()
    peers = [rank for rank in distributed.get_process_group_ranks(group) if rank != own]
    with suppress(RuntimeError):
        # A message of another size with the same tag would abort the process.
        never: Any = distributed.irecv(torch.empty(1), peers[0], group=group, tag=_NEVER_SENT)
        never.wait(timedelta(milliseconds=1))


@dataclass
class _Grid:
    """The living engines that were built with a grid, and the process groups to destroy last."""

    engines: WeakSet[Any] = field(default_factory=WeakSet)
    groups: list[Any] = field(default_factory=list)


_grids: dict[int, _Grid] = {}


def hold_grid(mpu: Any, engine: object, made: Iterable[Any] = ()) -> None:
    """Note that an engine is built with a grid; call it before DeepSpeed reads the grid.

    Args:
        mpu: The grid.
        engine: Of DeepSpeed's.
        made: Process groups that belong to the engines of this grid, and to nobody else.
    """
    if mpu is not None:
        grid = _grids.setdefault(id(mpu), _Grid())
        grid.engines.add(engine)
        grid.groups += made


def forget_grid(mpu: Any, engine: object) -> None:
    """Let the next engine have other groups than a destroyed one: DeepSpeed keeps its grid.

    The last engine of a grid also destroys the groups that were made for it. An engine that the
    garbage collector destroys leaves them: its model may live on, and the other ranks may not be
    collecting theirs. Nor does it take the grid from another engine that is built with it.
    """
    groups: Any = import_module("deepspeed.utils.groups")
    grid = _grids.get(id(mpu))
    if grid is None:
        return
    grid.engines.discard(engine)
    if grid.engines:
        return
    del _grids[id(mpu)]
    if groups.mpu is mpu:
        groups.mpu = None
        if mpu is groups:  # DeepSpeed's own tensor parallelism
            groups.mesh_device = groups._TENSOR_MODEL_PARALLEL_GROUP = None
            groups._DATA_PARALLEL_GROUP = None
    if not getattr(engine, "is_collected", False):
        destroy_groups(grid.groups)


def discard_open_step(engine: EngineMixin) -> None:
    """Drop the gradients that no optimizer step has taken; the next micro-batch begins a step.

    DeepSpeed drops them only after its own steps. After an error, or a load of other weights, the
    next step would count them.
    """
    from wavemare.engine.optim.adapter import adapt  # needs DeepSpeed, which not all here do

    adapt(engine).discard_gradients()
    engine._unmanaged_backward_count = 0
    engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
    engine._running_engine_step = False
    for name in engine.timers.timers:  # an error leaves them running
        engine.timers(name).reset()
