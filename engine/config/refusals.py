# SPDX-License-Identifier: Apache-2.0
"""Options that exclude each other, as one table: condition, key, value, reason, remedy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from wavemare.comm.config import HALVES, LOOSE_MODES
from wavemare.engine.config.sections import BalanceConfig
from wavemare.engine.config.shape import (
    SECTION,
    ZERO_WEIGHTS,
    is_enabled,
    offloads,
    refuse_idle,
    section_of,
    zero_section,
)
from wavemare.errors import ConfigError

if TYPE_CHECKING:
    from wavemare.engine.config.resolve import WavemareConfig

_Rows = Iterator[tuple[object, str, object, str, str]]
"""Condition under which a row refuses, key, value, reason and remedy."""

_SHARES = f"{SECTION}.balance.shares"
_UNTESTED = "it is not tested"
_ALONE = "not with local steps"
_REMOVE = "Leave it out"
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
_PARTS = "it parts the weights"
_OFF = (None, False, 0)
_BESIDE_REPLICAS: Mapping[str, tuple[tuple[object, ...], str]] = {
    "zero_optimization.stage": ((None, 0, 1, 2), _PARTS),
    "zero_optimization.offload_optimizer.device": ((None, "none"), _UNTESTED),
    "zero_optimization.offload_param.device": ((None, "none"), _UNTESTED),
    "zero_optimization.zenflow": ((None,), _UNTESTED),
    "fp16.enabled": (_OFF, "loss scales differ by replica"),
    "sequence_parallel_size": ((None, 1), _UNTESTED),
    "tensor_parallel.autotp_size": ((None, 1), _UNTESTED),
    "expert_parallel.enabled": (_OFF, _UNTESTED),
    "compile.deepcompile": (_OFF, _UNTESTED),
    "hybrid_engine.enabled": (_OFF, _UNTESTED),
    "curriculum_learning.enabled": (_OFF, _UNTESTED),
    "data_efficiency.enabled": (_OFF, _UNTESTED),
    "elasticity.enabled": (_OFF, _UNTESTED),
    "checkpoint.use_node_local_storage": (_OFF, _UNTESTED),
    "checkpoint.load_universal": (_OFF, _UNTESTED),
    "wavemare.pipeline.stages": ((1,), "weights may not change between a micro-batch's passes"),
    "wavemare.pipeline.schedule": (("1f1b",), "replicas are no pipelines"),
    "wavemare.tensor_parallel.size": ((1,), _UNTESTED),
    "wavemare.expert_parallel.size": ((1,), _UNTESTED),
    "wavemare.wavelet.mode": (("off", "auto", "sync"), _PARTS),
    "wavemare.sparse_collective.mode": (("off",), "it would sum gradients of one replica alone"),
    "wavemare.balance.shares": ((None,), "they count all ranks"),
    "wavemare.balance.mean": (("samples",), "it counts the tokens of one replica alone"),
    "wavemare.guard.nonfinite": (("off", "stop"), "replicas would skip different steps"),
}
"""Keys whose values other than these do not go with local steps, and why."""
_LEAVE = 'set wavemare.sparse_collective.mode to "off"'
_16_BIT_OR_FP32 = 'Use "bf16": {"enabled": true} or fp32, or schedule 1f1b'


def refuse(config: Mapping[str, Any], ours: WavemareConfig, world_size: int) -> None:
    """Refuse the first combination of options that cannot work.

    Raises:
        ConfigError: Naming the key that has no effect or excludes another.
    """
    if ours.sparse_collective.mode == "off":
        refuse_idle(ours.sparse_collective, f"{SECTION}.sparse_collective", "auto")
    if ours.wavelet.mode == "off":
        refuse_idle(ours.wavelet, f"{SECTION}.wavelet", "sync")
    if ours.local_steps.mode == "off":
        refuse_idle(ours.local_steps, f"{SECTION}.local_steps", "diloco")
    for rows in (_layout, _experts, _schedule, _sparse, _waves, _replicas, _health):
        for refused, key, value, reason, remedy in rows(config, ours, world_size):
            if refused:
                raise ConfigError(key, value, reason, remedy)


def _layout(config: Mapping[str, Any], ours: WavemareConfig, world_size: int) -> _Rows:
    stages, size, ranks = ours.pipeline.stages, ours.tensor_parallel.size, ours.model_ranks
    zero = zero_section(config).get("stage", 0)
    count = f"the number of processes ({world_size}) is not a multiple of it"
    yield (
        world_size % stages,
        f"{SECTION}.pipeline.stages",
        stages,
        f"{count}{launch_hint(world_size)}",
        f"Start a multiple of {stages} processes, or change the number of stages",
    )
    product = f" times the {stages} pipeline stages" if stages > 1 else ""
    yield (
        world_size % ranks,
        f"{SECTION}.tensor_parallel.size",
        size,
        f"{count}{product}{launch_hint(world_size)}",
        f"Start a multiple of {ranks} processes, or change the size",
    )
    for name in ("pipe_partitioned", "grad_partitioned"):
        yield (
            size > 1 and stages > 1 and section_of(config, "pipeline").get(name),
            f"pipeline.{name}",
            True,
            "the stages of a split model send each other whole tensors",
            "Leave it out",
        )
    # In a pipeline, bf16 has an optimizer of its own, which counts split weights of all ranks.
    for name in ("fp16",) if stages > 1 else ("fp16", "bf16"):
        yield (
            size > 1 and zero == 0 and is_enabled(config, name),
            f"{name}.enabled",
            True,
            "without ZeRO DeepSpeed's 16-bit optimizers clip by the weights of one rank alone",
            'Set "stage" to 1 or 2 in zero_optimization',
        )
    split = section_of(config, "tensor_parallel").get("autotp_size", 1)
    yield (
        size > 1 and split != 1,
        "tensor_parallel.autotp_size",
        split,
        "DeepSpeed would split the model a second time",
        "Use one of the two",
    )
    yield (
        (stages > 1 or ours.pipeline.is_asynchronous) and zero in (2, 3),
        "zero_optimization.stage",
        zero,
        "gradients or weights that ZeRO partitions cannot stay for a pipeline's micro-batches",
        "Use 0 or 1 with pipeline stages, or wavemare.pipeline.stages 1",
    )


def _experts(config: Mapping[str, Any], ours: WavemareConfig, world_size: int) -> _Rows:
    size, key = ours.expert_parallel.size, f"{SECTION}.expert_parallel.size"
    if size == 1:
        return
    zero = zero_section(config)
    stage = zero.get("stage", 0)
    stages, data_ranks = ours.pipeline.stages, world_size // ours.pipeline.stages
    yield (
        data_ranks % size,
        key,
        size,
        f"the number of data-parallel ranks ({data_ranks}) is not a multiple of it"
        f"{launch_hint(world_size)}",
        f"Start a multiple of {size * stages} processes, or change the size",
    )
    yield (
        stage == ZERO_WEIGHTS or ours.wavelet.mode == "model_parallel",
        "zero_optimization.stage",
        ZERO_WEIGHTS,
        "ZeRO 3 would cut the weights of experts further, over ranks that hold other experts",
        f"Use 0, 1 or 2, or leave out {key}: ZeRO 3 alone shards experts, too",
    )
    for name in ("fp16", "bf16"):
        yield (
            stage == 0 and is_enabled(config, name),
            f"{name}.enabled",
            True,
            "without ZeRO DeepSpeed's 16-bit optimizers clip by the experts of one rank alone",
            'Set "stage" to 1 or 2 in zero_optimization',
        )
        yield (
            stages > 1 and is_enabled(config, name),
            f"{name}.enabled",
            True,
            "experts on several stages are tested in fp32 alone",
            f"Use fp32, or leave out {key} or {SECTION}.pipeline.stages",
        )
    sparse, pipeline = ours.sparse_collective, ours.pipeline
    for refused, name, value, reason in (
        (
            stages > 1 and pipeline.schedule != "1f1b",
            f"{SECTION}.pipeline.schedule",
            pipeline.schedule,
            "of the schedules only 1f1b is tested with divided experts",
        ),
        (
            ours.tensor_parallel.size > 1,
            f"{SECTION}.tensor_parallel.size",
            ours.tensor_parallel.size,
            "layers that are split over ranks do not divide experts yet",
        ),
        (ours.parallel.given, f"{SECTION}.parallel", "...", "a plan does not divide experts"),
        (
            ours.balance.is_active,
            f"{SECTION}.balance",
            ours.balance.model_dump(exclude_unset=True),
            "it is not tested with divided experts",
        ),
        (
            sparse.mode != "off" and stages > 1,
            f"{SECTION}.sparse_collective.mode",
            sparse.mode,
            "it is not tested with divided experts of several stages",
        ),
        (
            sparse.mode != "off" and sparse.compressor,
            f"{SECTION}.sparse_collective.compressor",
            sparse.compressor and sparse.compressor.type,
            "it is not tested with divided experts",
        ),
        *_beside_experts(config, zero),
    ):
        yield refused, name, value, reason, f"Leave it out, or {key}"


def _beside_experts(
    config: Mapping[str, Any], zero: Mapping[str, Any]
) -> Iterator[tuple[object, str, object, str]]:
    """Yield DeepSpeed's options that are not tested with divided experts."""
    for section, name, usual in (
        ("tensor_parallel", "autotp_size", 1),
        ("expert_parallel", "enabled", False),
        ("checkpoint", "use_node_local_storage", False),
        ("compile", "deepcompile", False),
        ("hybrid_engine", "enabled", False),
    ):
        value = section_of(config, section).get(name, usual)
        yield value != usual, f"{section}.{name}", value, "it is not tested with divided experts"
    length = config.get("sequence_parallel_size", 1)
    yield length != 1, "sequence_parallel_size", length, "its ranks share samples"
    for name in ("offload_optimizer", "zenflow"):
        reason = "it is not tested with divided experts"
        yield offloads(zero, name), f"zero_optimization.{name}", zero.get(name, True), reason


def _schedule(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    pipeline, key = ours.pipeline, f"{SECTION}.pipeline"
    asynchronous = pipeline.is_asynchronous
    yield (
        not asynchronous and "pipemare" in pipeline.model_fields_set,
        f"{key}.pipemare",
        pipeline.pipemare.model_dump(exclude_unset=True),
        f"it has no effect on the schedule {pipeline.schedule!r}",
        f'Set {key}.schedule to "pipemare", or remove the key',
    )
    yield (
        pipeline.chunks is not None and pipeline.schedule != "interleaved",
        f"{key}.chunks",
        pipeline.chunks,
        f"it has no effect on the schedule {pipeline.schedule!r}",
        f'Set {key}.schedule to "interleaved", or remove the key',
    )
    limit = pipeline.memory_limit
    yield (
        limit is not None and pipeline.schedule != "auto",
        f"{key}.memory_limit",
        limit,
        f"it has no effect on the schedule {pipeline.schedule!r}",
        f'Set {key}.schedule to "auto", or remove the key',
    )
    yield (
        math.isnan(pipeline.memory_share) and pipeline.memory_bytes is None,
        f"{key}.memory_limit",
        limit,
        "it is neither a share of 1F1B's activations nor bytes",
        'Give one such as "0.63x" or "4GB"',
    )
    if pipeline.is_planned:
        yield from _planned(config, ours)
    if not asynchronous:
        return
    yield (
        pipeline.untie is False,
        f"{key}.untie",
        False,
        "asynchronous stages would have to meet at each step to share a weight",
        "Leave it out, or use schedule 1f1b",
    )
    yield (
        pipeline.overlap_forward_backward
        and pipeline.pipemare.discrepancy_correction.mode == "predict",
        f"{key}.pipemare.discrepancy_correction.mode",
        "predict",
        "a forward pass with predicted weights cannot run together with a backward pass with the "
        "newest",
        "Use another mode, or leave out overlap_forward_backward",
    )
    yield (
        is_enabled(config, "fp16"),
        "fp16.enabled",
        True,
        "a dynamic loss scale is one number for all stages at the same step, and asynchronous "
        "stages are at different ones",
        _16_BIT_OR_FP32,
    )
    for name in ("torch_autocast", "amp"):
        yield (
            is_enabled(config, name),
            f"{name}.enabled",
            True,
            "autocast keeps casts of the weights for the backward pass, which the weight "
            "correction would not change, and which fill the memory with old versions",
            _16_BIT_OR_FP32,
        )


def _planned(config: Mapping[str, Any], ours: WavemareConfig) -> _Rows:
    """Refuse what does not go with plans whose backward passes are split."""
    schedule = ours.pipeline.schedule
    yield (
        ours.pipeline.overlap_forward_backward,
        f"{SECTION}.pipeline.overlap_forward_backward",
        True,
        f"the schedule {schedule!r} has an order of its own, without pairs of passes",
        "Leave it out, or use schedule 1f1b",
    )
    chunked = schedule != "zb-h1"
    yield (
        chunked and ours.sparse_collective.mode != "off",
        f"{SECTION}.sparse_collective.mode",
        ours.sparse_collective.mode,
        f"the schedule {schedule!r} is not tested with it",
        'Use "off", or schedule zb-h1',
    )
    yield (
        chunked and ours.pipeline.dynamic_shape,
        f"{SECTION}.pipeline.dynamic_shape",
        True,
        f"the schedule {schedule!r} is not tested with it",
        "Pad all batches alike, or use schedule zb-h1",
    )
    yield (
        ours.tensor_parallel.size > 1,
        f"{SECTION}.tensor_parallel.size",
        ours.tensor_parallel.size,
        f"the schedule {schedule!r} is not tested with layers that are split over ranks",
        "Use 1, or schedule 1f1b",
    )
    yield (
        is_enabled(config, "fp16"),
        "fp16.enabled",
        True,
        f"the schedule {schedule!r} is not tested with a loss scale",
        _16_BIT_OR_FP32,
    )
    for name in ("torch_autocast", "amp"):
        yield (
            is_enabled(config, name),
            f"{name}.enabled",
            True,
            "layers under autocast cannot defer the gradients of their weights",
            _16_BIT_OR_FP32,
        )
    yield (
        section_of(config, "compile").get("deepcompile"),
        "compile.deepcompile",
        True,
        "compiled layers cannot defer the gradients of their weights",
        "Leave it out, or use schedule 1f1b",
    )


def _sparse(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    sparse, key = ours.sparse_collective, f"{SECTION}.sparse_collective"
    if sparse.mode == "off":
        return
    zero = zero_section(config)
    stage = zero.get("stage", 0)
    scatters = stage and zero.get("reduce_scatter", True)
    yield (
        sparse.deterministic and sparse.mode in LOOSE_MODES,
        f"{key}.mode",
        sparse.mode,
        "it does not sum in the order of the ranks, which deterministic asks for",
        "Set deterministic to false, or choose auto, ordered, pushpull or allgather",
    )
    yield (
        scatters and sparse.mode not in ("auto", *HALVES),
        f"{key}.mode",
        sparse.mode,
        f"it has no reduce-scatters, which ZeRO {stage} makes",
        f"Choose auto, {' or '.join(HALVES)}, or use ZeRO 0",
    )
    yield (
        sparse.hierarchical and scatters,
        f"{key}.hierarchical",
        True,
        f"it has no effect on the reduce-scatters of ZeRO {stage}",
        "Leave it out, or use ZeRO 0",
    )
    yield (
        stage == ZERO_WEIGHTS,
        "zero_optimization.stage",
        stage,
        "ZeRO 3 scatters gradients layer by layer, which the sparse collective does not do",
        f"Use 0, 1 or 2, or {_LEAVE}",
    )
    for refused, name, value, reason in _beside_sparse(config, zero):
        why = f"{reason}, which the sparse collective does not know"
        yield refused, name, value, why, f"Remove the key, or {_LEAVE}"
    yield (
        sparse.compressor is not None and is_enabled(config, "fp16"),
        "fp16.enabled",
        True,
        "a step that overflows is skipped, and loses what a compressor has sent in it",
        'Use "bf16": {"enabled": true}, or no compressor',
    )
    yield (
        sparse.compressor is not None and ours.guard.nonfinite == "skip",
        f"{SECTION}.guard.nonfinite",
        "skip",
        "a skipped step loses what a compressor has sent in it",
        'Use "stop"',
    )


def _beside_sparse(
    config: Mapping[str, Any], zero: Mapping[str, Any]
) -> list[tuple[object, str, object, str]]:
    """Return DeepSpeed's options that the sparse collective does not support."""
    tensor_parallel = section_of(config, "tensor_parallel").get("autotp_size", 1)
    sequence_parallel = config.get("sequence_parallel_size", 1)
    return [
        *(
            (
                offloads(zero, name),
                f"zero_optimization.{name}",
                zero.get(name, True),
                "gradients leave for the host as soon as they are gathered",
            )
            for name in ("offload_optimizer", "zenflow")
        ),
        (
            tensor_parallel != 1,
            "tensor_parallel.autotp_size",
            tensor_parallel,
            "its ranks hold parts of the weights",
        ),
        (
            sequence_parallel != 1,
            "sequence_parallel_size",
            sequence_parallel,
            "its ranks share samples and average otherwise",
        ),
        *(
            (section_of(config, name).get(option), f"{name}.{option}", True, reason)
            for name, option, reason in (
                ("expert_parallel", "enabled", "gradients of experts belong to other groups"),
                ("compile", "deepcompile", "compiled graphs reduce gradients by themselves"),
                ("hybrid_engine", "enabled", "DeepSpeed's hybrid engine reduces gradients itself"),
            )
        ),
    ]


def _waves(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    mode, key = ours.wavelet.mode, f"{SECTION}.wavelet.mode"
    if mode == "off":
        return
    yield (
        ours.pipeline.stages > 1,
        key,
        mode,
        f"the micro-batches of {ours.pipeline.stages} pipeline stages are in turns already",
        'Use one stage, or mode "off"',
    )
    for name in ("curriculum_learning", "progressive_layer_drop", "flops_profiler"):
        yield (
            is_enabled(config, name),
            f"{name}.enabled",
            True,
            "it changes or watches whole forward passes, which waves interleave",
            f'Leave it out, or set {key} "off"',
        )
    yield (
        ours.balance.is_active,
        key,
        mode,
        "waves scale the losses of micro-batches that are alike on all ranks",
        'Set it "off", or leave out wavemare.balance',
    )


def _replicas(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    """Refuse what replicas with local steps cannot go with, and keys without effect."""
    local, key = ours.local_steps, f"{SECTION}.local_steps"
    every, count, overlap, given = local.every, local.fragments, local.overlap, local.outer
    if local.mode == "off":
        return
    idle, average = "it has no effect without overlap", "it has no effect on an average"
    late = f"a message may travel for every / fragments = {every // count} steps at most"
    for refused, name, value, reason, remedy in (
        (every % count, "fragments", count, "every is not a multiple of it", "Give a divisor"),
        (overlap * count > every, "overlap", overlap, late, "Give less"),
        (not overlap and "mixing" in local.model_fields_set, "mixing", local.mixing, idle, _REMOVE),
        (local.mode == "average" and given.model_fields_set, "outer", given, average, _REMOVE),
    ):
        yield refused, f"{key}.{name}", value, reason, remedy
    values = {**config, SECTION: ours.model_dump()}
    for name, (allowed, reason) in _BESIDE_REPLICAS.items():
        found: Any = values
        for word in name.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        yield found not in allowed, name, found, f"{reason}: {_ALONE}", f"{_REMOVE}, or {key}"
    optimizer, plan = section_of(config, "optimizer").get("type"), f"{SECTION}.parallel"
    half = is_enabled(config, "bf16") and not zero_section(config).get("stage", 0)
    rounding = "without ZeRO 1 or 2 the changes of bf16 weights are mostly rounding"
    for refused, name, found, reason in (
        (half, "bf16.enabled", True, rounding),
        (str(optimizer).lower() in _ONE_BIT, "optimizer.type", optimizer, "it exchanges by itself"),
        (ours.parallel.given, plan, "...", _UNTESTED),
    ):
        yield refused, name, found, f"{reason}: {_ALONE}", f"{_REMOVE}, or {key}"


def _health(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    guard = ours.guard
    for key, value in (
        ("checkpoint.writer", section_of(config, "checkpoint").get("writer")),
        ("datastates_ckpt", config.get("datastates_ckpt")),
    ):
        yield (
            ours.checkpoint.background and value,
            key,
            value,
            "DeepSpeed's writer and ours cannot both write in the background",
            "Leave it out, or wavemare.checkpoint.background",
        )
    given = "nonfinite" in guard.model_fields_set and guard.nonfinite != "off"
    yield (
        is_enabled(config, "fp16") and given,
        f"{SECTION}.guard.nonfinite",
        guard.nonfinite,
        "with fp16 gradients overflow in a healthy run, and its loss scaler skips them",
        "Leave it out",
    )
    yield (
        "max_skips" in guard.model_fields_set and guard.nonfinite != "skip",
        f"{SECTION}.guard.max_skips",
        guard.max_skips,
        f"it has no effect on nonfinite {guard.nonfinite!r}",
        f'Set {SECTION}.guard.nonfinite to "skip", or remove the key',
    )


def check_sequence_parallel(config: Mapping[str, Any], ours: WavemareConfig, stages: int) -> None:
    """Refuse what does not go with ranks that share sequences by DeepSpeed's Ulysses.

    Raises:
        ConfigError: Naming the key.
    """
    zero = zero_section(config).get("stage", 0)
    if zero != ZERO_WEIGHTS:
        reason = (
            "without ZeRO 3 DeepSpeed divides the gradients by too few ranks: they are as many "
            "times too large as ranks share a sequence"
        )
        raise ConfigError("zero_optimization.stage", zero, reason, "Use 3, or leave out mpu")
    for key, value, usual in (
        ("pipeline.stages", stages, 1),
        ("tensor_parallel.size", ours.tensor_parallel.size, 1),
        ("expert_parallel.size", ours.expert_parallel.size, 1),
        ("wavelet.mode", ours.wavelet.mode, "off"),
        ("balance", ours.balance.model_dump(exclude_defaults=True), {}),
        ("sparse_collective.mode", ours.sparse_collective.mode, "off"),
    ):
        if value != usual:
            reason = "it does not go with an mpu whose ranks share sequences"
            raise ConfigError(f"{SECTION}.{key}", value, reason, "Leave out one of the two")


def check_shares(balance: BalanceConfig, sizes: Mapping[str, int], data_ranks: int) -> None:
    """Check the numbers against the batch sizes.

    Raises:
        ConfigError: They are not one for each rank, or do not sum to what the sizes say.
    """
    given, size_key = balance.shares, "train_micro_batch_size_per_gpu"
    if given is None or size_key not in sizes:
        return
    key, wanted = _SHARES, sizes[size_key] * data_ranks
    if len(given) != data_ranks:
        reason = f"there are {len(given)} numbers for {data_ranks} data-parallel ranks"
        raise ConfigError(key, given, reason, f"Give {data_ranks} numbers")
    if min(given) < 1:
        reason = "each rank takes part with one or more"
        raise ConfigError(key, given, reason, "Give positive numbers, or start fewer ranks")
    if sum(given) != wanted:
        reason = (
            f"they sum to {sum(given)}, and {size_key} x data-parallel ranks = "
            f"{sizes[size_key]} x {data_ranks} = {wanted}"
        )
        remedy = f"Give numbers that sum to {wanted}, or change {size_key}, which is their mean"
        raise ConfigError(key, given, reason, remedy)


def launch_hint(world_size: int) -> str:
    """Return how to start more processes, if there is only this one."""
    if world_size > 1:
        return ""
    return "; this is one process, and deepspeed, torchrun or mpirun start more"
