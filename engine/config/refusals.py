# SPDX-License-Identifier: Apache-2.0
"""Options that exclude each other: what goes beside a feature, and rows of condition and reason."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from wavemare.comm.config import HALVES, LOOSE_MODES
from wavemare.engine.config.sections import BalanceConfig, LocalStepsConfig, ParallelConfig
from wavemare.engine.config.shape import (
    SECTION,
    ZERO_WEIGHTS,
    is_enabled,
    refuse_idle,
    section_of,
    zero_section,
)
from wavemare.errors import ConfigError
from wavemare.pipeline.plan.partition import PARTITION_KEY
from wavemare.pipeline.plan.schedules import SCHEDULES

if TYPE_CHECKING:
    from wavemare.engine.config.resolve import WavemareConfig

_Rows = Iterator[tuple[object, str, object, str, str]]
"""Condition under which a row refuses, key, value, reason and remedy."""
_Beside = Mapping[str, tuple[tuple[object, ...], str]]
"""Keys, the values of each that a feature goes with, and why it goes with no other."""

_SHARES = f"{SECTION}.balance.shares"
_UNTESTED = "it is not tested"
_REMOVE = "Leave it out"
_ONE_BIT = ("onebitadam", "onebitlamb", "zerooneadam")
_OFF = (None, False, 0)
_ONE = (None, 1)
_PARTS = "it partitions the weights"
_LOSSES = "losses are of micro-batches that are alike on all ranks"

_OF_DEEPSPEED: _Beside = {
    "zero_optimization.offload_optimizer.device": ((None, "none"), _UNTESTED),
    "zero_optimization.cpu_offload": (_OFF, _UNTESTED),
    "zero_optimization.zenflow": ((None,), _UNTESTED),
    "sequence_parallel_size": (_ONE, "ranks that share samples are not tested"),
    "tensor_parallel.autotp_size": (_ONE, _UNTESTED),
    "expert_parallel.enabled": (_OFF, "experts that differ by rank would be taken for equal ones"),
    "compile.deepcompile": (_OFF, _UNTESTED),
    "hybrid_engine.enabled": (_OFF, _UNTESTED),
}
_BESIDE_STAGES: _Beside = {
    "flops_profiler.enabled": (_OFF, "DeepSpeed never shows the profile"),
    "expert_parallel.enabled": (
        _OFF,
        "DeepSpeed looks for experts in the whole model; wavemare.expert_parallel divides them",
    ),
}
_BESIDE_SHARES: _Beside = {
    "data_efficiency.data_sampling.curriculum_learning.enabled": (_OFF, "it makes equal shares"),
}
_BESIDE_EXPERTS: _Beside = {
    **_OF_DEEPSPEED,
    "expert_parallel.enabled": (_OFF, "experts would be divided twice"),
    "checkpoint.use_node_local_storage": (_OFF, _UNTESTED),
    f"{SECTION}.parallel": ((ParallelConfig().model_dump(),), "a plan does not divide them"),
    "wavemare.balance.shares": ((None,), _UNTESTED),
    "wavemare.balance.mean": (("samples",), _UNTESTED),
    "wavemare.sparse_collective.compressor": ((None,), _UNTESTED),
}


class Removed(NamedTuple):
    """What an earlier version read in the section ``wavemare``, and this one does not.

    Args:
        reason: Why it is refused.
        remedy: The way that works.
        value: Of a key that remains, the ending of the values that are gone. None where the whole
            key is gone; false, its default, is then passed over.
    """

    reason: str
    remedy: str
    value: str | None = None


REMOVED: Mapping[str, Removed] = {
    "pipeline.overlap_forward_backward": Removed(
        "pairs of passes in a stage were removed",
        'Leave it out; to hide all-reduces use one stage and wavelet.mode "auto"',
    ),
    "pipeline.memory_limit": Removed(
        "a limit in bytes was removed",
        'Give a share of what 1F1B keeps on its first rank, such as "0.63x"',
        value="GB",
    ),
    "wavelet.compile": Removed(
        "waves compile no model",
        'Call engine.compile(), or use DeepSpeed\'s section "compile"',
    ),
    "wavelet.mode": Removed(
        "it was a name for ZeRO 3",
        'Set "stage" to 3 in zero_optimization, and leave out the mode',
        value="model_parallel",
    ),
    "sparse_collective.mode": Removed(
        "it was OmniReduce's protocol, to compare with: auto never chose it",
        'Set "auto", or "pushpull", which sends as many bytes and gives the same sums',
        value="streaming",
    ),
    "sparse_collective.known_rows": Removed(
        "each call now looks at a sample of the rows that are not listed",
        'Set "on", or "off" to search in each call',
        value="check",
    ),
    "sparse_collective.compressor.type": Removed(
        "norms relative to those of the weights were removed",
        'Set "block_topk", which sends the blocks with the largest norms',
        value="block_topk_ratio",
    ),
}
"""By the key, counted from the section."""
_OPTIONS = "chunks", "memory_limit", "slack"
"""Keys of a pipeline that are options of some schedules."""
_BESIDE_PIPEMARE: _Beside = {
    "fp16.enabled": (_OFF, 'stages at different steps cannot share a loss scale; use "bf16"'),
    "torch_autocast.enabled": (_OFF, 'autocast would keep casts of old weights; use "bf16"'),
    "wavemare.pipeline.untie": ((None, True), "stages cannot meet at each step to share a weight"),
}
_BESIDE_SPLIT_PASSES: _Beside = {
    "compile.deepcompile": (_OFF, "layers cannot defer the gradients of their weights"),
}
_BESIDE_OWN_CUTS: _Beside = {
    "zero_optimization.stage": ((None, 0), "ranks of one stage have other layers to divide"),
    "fp16.enabled": (_OFF, 'its optimizer divides a stage; use "torch_autocast"'),
    "bf16.enabled": (_OFF, 'its optimizer divides a stage; use "torch_autocast"'),
    "checkpoint.use_node_local_storage": (_OFF, _UNTESTED),
    "checkpoint.load_universal": (_OFF, _UNTESTED),
    "wavemare.pipeline.schedule": (
        tuple(name for name, row in SCHEDULES.items() if row.flushes),
        "ranks of one stage would step other layers",
    ),
    "wavemare.expert_parallel.size": ((1,), _UNTESTED),
    "wavemare.sparse_collective.mode": (("off",), _UNTESTED),
    "wavemare.local_steps.mode": (("off",), _UNTESTED),
}
_BESIDE_SPARSE: _Beside = {
    "zero_optimization.stage": ((None, 0, 1, 2), "gradients cannot be scattered layer by layer"),
    **_OF_DEEPSPEED,
}
_BESIDE_COMPRESSOR: _Beside = {
    "fp16.enabled": (_OFF, "a step that overflows loses what was sent in it"),
    "wavemare.guard.nonfinite": (("off", "stop"), "a skipped step loses what was sent in it"),
}
_BESIDE_WAVES: _Beside = {
    "wavemare.pipeline.stages": ((1,), "stages interleave their micro-batches already"),
    "flops_profiler.enabled": (_OFF, "it would watch whole forward passes"),
    "wavemare.balance.shares": ((None,), _LOSSES),
    "wavemare.balance.mean": (("samples",), _LOSSES),
}
_BESIDE_REPLICAS: _Beside = {
    **_OF_DEEPSPEED,
    "zero_optimization.stage": ((None, 0, 1, 2), _PARTS),
    "zero_optimization.offload_param.device": ((None, "none"), _UNTESTED),
    "fp16.enabled": (_OFF, "loss scales differ by replica"),
    "data_efficiency.enabled": (_OFF, _UNTESTED),
    "checkpoint.use_node_local_storage": (_OFF, _UNTESTED),
    "checkpoint.load_universal": (_OFF, _UNTESTED),
    "checkpoint.writer.decoupled": (_OFF, "it does not save the common weights"),
    "datastates_ckpt": ((None,), "it does not save the common weights"),
    "wavemare.pipeline.schedule": (
        tuple(name for name, row in SCHEDULES.items() if row.flushes),
        "weights may not change between a micro-batch's passes",
    ),
    f"{SECTION}.parallel": ((ParallelConfig().model_dump(),), _UNTESTED),
    "wavemare.sparse_collective.mode": (("off",), "it would sum gradients of one replica alone"),
    "wavemare.balance.shares": ((None,), "they are given for the ranks of all replicas"),
    "wavemare.balance.mean": (("samples",), "it counts the tokens of one replica alone"),
    "wavemare.guard.nonfinite": (("off", "stop"), "replicas would skip different steps"),
}
_BESIDE_SEQUENCES: _Beside = {
    "zero_optimization.stage": ((3,), "DeepSpeed divides gradients by too few ranks without it"),
    "wavemare.pipeline.stages": ((1,), _UNTESTED),
    "wavemare.tensor_parallel.size": ((1,), _UNTESTED),
    "wavemare.expert_parallel.size": ((1,), _UNTESTED),
    "wavemare.wavelet.mode": (("off",), _UNTESTED),
    "wavemare.balance.shares": ((None,), _UNTESTED),
    "wavemare.balance.mean": (("samples",), _UNTESTED),
    "wavemare.sparse_collective.mode": (("off",), _UNTESTED),
}


def without_removed(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``wavemare`` without removed keys whose value changes nothing.

    Raises:
        ConfigError: A key or value that was removed, with the way that works.
    """
    result = copy.deepcopy(dict(section))
    for path, removed in REMOVED.items():
        *names, key = path.split(".")
        part: Any = result
        for name in names:
            part = part.get(name) if isinstance(part, dict) else None
        if not isinstance(part, dict) or key not in part:
            continue
        value, end = part[key], removed.value
        gone = end is None or (isinstance(value, str) and value.endswith(end))
        if gone and value is not False:
            raise ConfigError(f"{SECTION}.{path}", value, removed.reason, removed.remedy)
        if end is None:
            del part[key]
    return result


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
    values = {**config, SECTION: ours.model_dump()}
    for rows in (_layout, _experts, _schedule, _sparse, _waves, _replicas, _health):
        _raise_first(rows(values, ours, world_size))


def refuse_split(config: Mapping[str, Any], key: str) -> None:
    """Refuse what does not go beside the split backward passes of a plan that is not a schedule's.

    Args:
        config: The whole configuration.
        key: Of the plan.

    Raises:
        ConfigError: For the first row that applies.
    """
    _raise_first(_beside(config, _BESIDE_SPLIT_PASSES, "split backward passes", key))


def _raise_first(rows: _Rows) -> None:
    for refused, key, value, reason, remedy in rows:
        if refused:
            raise ConfigError(key, value, reason, remedy)


def _beside(config: Mapping[str, Any], table: _Beside, feature: str, key: str) -> _Rows:
    """Yield a row for each key that may not have any value beside a feature, which a key asks for.

    Args:
        config: The whole configuration, with all values of our section.
        table: What the feature goes with.
        feature: In words.
        key: Of the feature.
    """
    for name, (allowed, reason) in table.items():
        found: Any = config
        for word in name.split("."):
            found = found.get(word) if isinstance(found, Mapping) else None
        yield found not in allowed, name, found, f"with {feature} {reason}", f"{_REMOVE}, or {key}"


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
    theirs = section_of(config, "expert_parallel").get("autoep_size", 1)
    divides = is_enabled(config, "expert_parallel") and theirs != 1
    divided = max(size, ours.expert_parallel.size) > 1 or divides
    # In a pipeline, bf16 has an optimizer of its own, which counts split weights of all ranks.
    for name in ("fp16",) if stages > 1 else ("fp16", "bf16"):
        yield (
            divided and zero == 0 and is_enabled(config, name),
            f"{name}.enabled",
            True,
            "without ZeRO DeepSpeed's 16-bit optimizers clip by the weights of one rank alone",
            'Set "stage" to 1 or 2 in zero_optimization',
        )
    dtype = section_of(config, "torch_autocast").get("dtype")
    yield (
        (stages > 1 or (divided and zero == 0))
        and not ours.pipeline.is_asynchronous  # which goes with no autocast at all
        and _scales_by_autocast(config),
        "torch_autocast.dtype",
        dtype,
        "torch's loss scaler sees the gradients of one rank's weights alone",
        'Use "bfloat16", which needs none',
    )
    yield from _before_the_sum(config)
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
    if stages > 1:
        yield from _beside(config, _BESIDE_STAGES, "stages", f"{SECTION}.pipeline.stages")
    if ours.pipeline.own_cuts is not None:
        yield from _beside(config, _BESIDE_OWN_CUTS, "cuts of each replica", PARTITION_KEY)
    if ours.balance.shares is not None:
        yield from _beside(config, _BESIDE_SHARES, "unequal shares", _SHARES)


def _before_the_sum(config: Mapping[str, Any]) -> _Rows:
    """Refuse what divides gradients before they are summed, where DeepSpeed cannot."""
    zero = zero_section(config)
    stage, sums = zero.get("stage", 0), str(config.get("gradient_allreduce_op")).lower() == "sum"
    scatters = stage in (2, ZERO_WEIGHTS) and zero.get("reduce_scatter", True) and not sums
    for name, idle in (("gradient_predivide_factor", _ONE), ("prescale_gradients", _OFF)):
        value = config.get(name)
        yield (
            scatters and value not in idle,
            name,
            value,
            f"DeepSpeed does not do that before the reduce-scatters of ZeRO {stage}",
            "Leave it out, or use ZeRO 0 or 1",
        )


def _experts(config: Mapping[str, Any], ours: WavemareConfig, world_size: int) -> _Rows:
    size, key = ours.expert_parallel.size, f"{SECTION}.expert_parallel.size"
    if size == 1:
        return
    stage = zero_section(config).get("stage", 0)
    stages, ranks = ours.pipeline.stages, world_size // ours.pipeline.stages
    tensor = ours.tensor_parallel.size
    fitting = [n for n in range(tensor, ranks + 1, tensor) if ranks % n == 0]
    yield (
        size % tensor,
        key,
        size,
        f"it is not a multiple of the {tensor} ranks that share each layer, whose experts it "
        "divides as well",
        f"Use one of {', '.join(map(str, fitting))}, or change wavemare.tensor_parallel.size",
    )
    counted = "data-parallel ranks" if tensor == 1 else "ranks of a stage"
    yield (
        ranks % size,
        key,
        size,
        f"the number of {counted} ({ranks}) is not a multiple of it{launch_hint(world_size)}",
        f"Start a multiple of {size * stages} processes, or change the size",
    )
    yield (
        stage == ZERO_WEIGHTS,
        "zero_optimization.stage",
        ZERO_WEIGHTS,
        "ZeRO 3 would cut the weights of experts further, over ranks that hold other experts",
        f"Use 0, 1 or 2, or leave out {key}: ZeRO 3 alone shards experts, too",
    )
    yield from _beside(config, _BESIDE_EXPERTS, "divided experts", key)


def _schedule(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    pipeline, key = ours.pipeline, f"{SECTION}.pipeline"
    given = pipeline.model_dump(exclude_unset=True)
    users = {name: [n for n, row in SCHEDULES.items() if name in row.options] for name in _OPTIONS}
    users["slack"] = [name for name in users["slack"] if SCHEDULES[name].flushes]
    users["pipemare"] = [n for n, row in SCHEDULES.items() if not row.flushes]
    for name, schedules in users.items():
        yield (
            given.get(name) is not None and pipeline.schedule not in schedules,
            f"{key}.{name}",
            given.get(name),
            f"it has no effect on the schedule {pipeline.schedule!r}",
            f"Set {key}.schedule to {' or '.join(schedules)}, or remove the key",
        )
    yield (
        math.isnan(pipeline.memory_share),
        f"{key}.memory_limit",
        pipeline.memory_limit,
        "it is no share of 1F1B's activations",
        'Give one such as "0.63x"',
    )
    feature, key = f"the schedule {pipeline.schedule!r}", f"{key}.schedule"
    if pipeline.is_asynchronous:
        yield from _beside(config, _BESIDE_PIPEMARE, feature, key)
    elif pipeline.schedule in SCHEDULES and SCHEDULES[pipeline.schedule].splits:
        yield from _beside(config, _BESIDE_SPLIT_PASSES, feature, key)


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
    yield from _beside(config, _BESIDE_SPARSE, "the sparse collective", f"{key}.mode")
    if sparse.compressor is not None:
        yield from _beside(config, _BESIDE_COMPRESSOR, "a compressor", f"{key}.compressor")


def _waves(config: Mapping[str, Any], ours: WavemareConfig, _: int) -> _Rows:
    if ours.wavelet.mode != "off":
        yield from _beside(config, _BESIDE_WAVES, "waves", f"{SECTION}.wavelet.mode")


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
    yield from _beside(config, _BESIDE_REPLICAS, "local steps", key)
    yield from _elastic(local, f"{key}.elastic")
    optimizer = section_of(config, "optimizer").get("type")
    half = is_enabled(config, "bf16") and not zero_section(config).get("stage", 0)
    half = half and ours.pipeline.stages == 1  # else DeepSpeed keeps fp32 masters
    copies = ours.tensor_parallel.size > 1 and local.bits < 32  # noqa: PLR2004
    rounded = "ranks that split layers would each round their copies of the others"
    yield copies, f"{key}.bits", local.bits, rounded, f"{_REMOVE}, or {SECTION}.tensor_parallel"
    rounding = "without ZeRO 1 or 2 the changes of bf16 weights are mostly rounding"
    for refused, name, found, reason in (
        (half, "bf16.enabled", True, rounding),
        (str(optimizer).lower() in _ONE_BIT, "optimizer.type", optimizer, "it exchanges by itself"),
    ):
        yield refused, name, found, f"with local steps {reason}", f"{_REMOVE}, or {key}"


def _elastic(local: LocalStepsConfig, key: str) -> _Rows:
    """Refuse what replicas that come and go cannot have, and keys without effect."""
    elastic, count, least = local.elastic, local.elastic.replicas, local.elastic.min_replicas
    if not count:
        given = elastic.model_dump(exclude_unset=True)
        no_effect = "it has no effect without the number of replicas"
        yield bool(given), key, given, no_effect, f"Give {key}.replicas, or remove it"
        return
    few = "with less than two replicas there is none to exchange with"
    fewer = f"there are {count} replicas at most"
    whole = "each job is one replica"
    alone = "replicas would wait for each other in each step"
    host = "replicas that come and go exchange from the host's memory"
    kept = "a replica that goes takes with it what its messages have left out"
    for refused, name, value, reason, remedy in (
        (count < 2, "elastic.replicas", count, few, "Give at least 2"),  # noqa: PLR2004
        (least > count, "elastic.min_replicas", least, fewer, "Give less"),
        ("replica" in local.model_fields_set, "replica", local.replica, whole, _REMOVE),
        (local.warmup_steps, "warmup_steps", local.warmup_steps, alone, _REMOVE),
        (local.copies == "device", "copies", local.copies, host, _REMOVE),
        (local.bits < 32, "bits", local.bits, kept, _REMOVE),  # noqa: PLR2004
    ):
        yield refused, f"{key.removesuffix('.elastic')}.{name}", value, reason, remedy


_FP16 = ("fp16", "float16", "torch.float16", "half")
"""DeepSpeed's names of the type to which autocast scales losses."""


def _scales_by_autocast(config: Mapping[str, Any]) -> bool:
    """Whether autocast goes to fp16, for which torch scales losses."""
    autocast = section_of(config, "torch_autocast")
    return is_enabled(config, "torch_autocast") and autocast.get("dtype") in _FP16


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
        (is_enabled(config, "fp16") or _scales_by_autocast(config)) and given,
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
    section = ours.model_dump()
    section["pipeline"]["stages"] = stages
    values = {**config, SECTION: section}
    _raise_first(_beside(values, _BESIDE_SEQUENCES, "an mpu whose ranks share sequences", "mpu"))


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
        reason = "each rank needs one or more samples"
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
