# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration: DeepSpeed's, with one more section, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.engine.config.file import load_config
from wavemare.engine.config.refusals import (
    check_balance,
    check_checkpoint,
    check_guard,
    check_sparse_collective,
    check_wavelet,
)
from wavemare.engine.config.sections import (
    BalanceConfig,
    CheckpointConfig,
    GuardConfig,
    ParallelConfig,
    WatchdogConfig,
)
from wavemare.engine.config.shape import (
    BATCH_KEYS,
    SECTION,
    ZERO_WEIGHTS,
    check_precision,
    check_shape,
    check_zero_stage,
    is_enabled,
    misplaced_keys,
    section_of,
)
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.partition import check_partition
from wavemare.pipeline.staleness.advice import bounding_micro_batches
from wavemare.pipeline.wave.config import WaveletConfig
from wavemare.section import Section

__all__ = [
    "SECTION",
    "WavemareConfig",
    "check_batch_sizes",
    "check_config",
    "load_config",
    "misplaced_keys",
    "zero_section",
]


class TensorParallelConfig(Section):
    """Ranks that share every layer of a model: GPT-2 or BERT, split as Megatron-LM does."""

    size: int = Field(default=1, ge=1)
    """How many consecutive ranks share a model; 1 for none."""


class WavemareConfig(Section):
    """The ``"wavemare"`` section. Stock DeepSpeed ignores it, so one file serves both."""

    pipeline: PipelineConfig = PipelineConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    parallel: ParallelConfig = ParallelConfig()
    balance: BalanceConfig = BalanceConfig()
    wavelet: WaveletConfig = WaveletConfig()
    sparse_collective: SparseCollectiveConfig = SparseCollectiveConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> WavemareConfig:
        """Read the section of a DeepSpeed configuration; an absent one has all defaults.

        Raises:
            ConfigError: The section is not a mapping, or a key or value in it is invalid.
        """
        section = config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(SECTION, section, "the section is not a mapping", "Write {...}")
        return cls.parse(section, SECTION)

    @property
    def model_ranks(self) -> int:
        """How many processes hold one model between them."""
        return self.pipeline.stages * self.tensor_parallel.size


def check_config(config: Mapping[str, Any], *, world_size: int) -> WavemareConfig:
    """Check what can be known of a configuration before a model exists.

    Args:
        config: DeepSpeed configuration with or without our section.
        world_size: Number of processes.

    Returns:
        The parsed section.

    Raises:
        ConfigError: Naming the key, its value, the reason and the remedy.
    """
    check_shape(config)
    check_zero_stage(zero_section(config).get("stage", 0))
    check_precision(config)
    ours = WavemareConfig.of(config)
    stages = ours.pipeline.stages
    if world_size % stages:
        raise ConfigError(
            "wavemare.pipeline.stages",
            stages,
            f"the number of processes ({world_size}) is not a multiple of it"
            f"{_launch_hint(world_size)}",
            f"Start a multiple of {stages} processes, or change the number of stages",
        )
    if isinstance(ours.pipeline.partition, str):
        check_partition(ours.pipeline.partition)
    _check_schedule(config, ours.pipeline)
    if ours.tensor_parallel.size > 1:
        _check_tensor_parallel(config, ours, world_size)
    check_sparse_collective(config, zero_section(config), ours.sparse_collective, ours.guard)
    check_wavelet(config, ours.wavelet, ours.pipeline, zero_section(config))
    check_checkpoint(config, ours.checkpoint)
    zero = zero_section(config).get("stage", 0)
    check_balance(ours.balance, ours.wavelet)
    check_guard(config, ours.guard)
    decides = ours.wavelet.mode in ("async", "replica")
    if decides and not config.get("managed_gradient_accumulation", True):
        reason = "the asynchronous waves say when DeepSpeed reduces"
        raise ConfigError("managed_gradient_accumulation", False, reason, "Leave it out")
    if (stages > 1 or ours.pipeline.schedule == "pipemare") and zero in (2, 3):
        raise ConfigError(
            "zero_optimization.stage",
            zero,
            "gradients or weights that ZeRO partitions cannot stay for a pipeline's micro-batches",
            "Use 0 or 1 with pipeline stages, or wavemare.pipeline.stages 1",
        )
    return ours


def _check_tensor_parallel(
    config: Mapping[str, Any], ours: WavemareConfig, world_size: int
) -> None:
    """Check what the rest of the configuration lets a split model do."""
    key, size = f"{SECTION}.tensor_parallel.size", ours.tensor_parallel.size
    stages, ranks = ours.pipeline.stages, ours.model_ranks
    if world_size % ranks:
        product = f" times the {stages} pipeline stages" if stages > 1 else ""
        reason = f"the number of processes ({world_size}) is not a multiple of it{product}"
        remedy = f"Start a multiple of {ranks} processes, or change the size"
        raise ConfigError(key, size, f"{reason}{_launch_hint(world_size)}", remedy)
    for name in ("pipe_partitioned", "grad_partitioned"):
        if stages > 1 and section_of(config, "pipeline").get(name):
            reason = "the stages of a split model send each other whole tensors"
            raise ConfigError(f"pipeline.{name}", True, reason, "Leave it out")
    zero = zero_section(config).get("stage", 0)
    if zero == ZERO_WEIGHTS:
        reason = "ZeRO 3 would cut the parts of split weights further"
        raise ConfigError("zero_optimization.stage", zero, reason, "Use 0, 1 or 2")
    # A pipeline trains bf16 with an optimizer of its own, which counts split weights of all ranks.
    for name in ("fp16",) if stages > 1 else ("fp16", "bf16"):
        if zero == 0 and is_enabled(config, name):
            raise ConfigError(
                f"{name}.enabled",
                True,
                "without ZeRO DeepSpeed's 16-bit optimizers count split weights of one rank alone "
                "when they clip",
                'Set "stage" to 1 or 2 in zero_optimization',
            )
    if section_of(config, "tensor_parallel").get("autotp_size", 1) != 1:
        reason = "DeepSpeed would split the model a second time"
        given = section_of(config, "tensor_parallel")["autotp_size"]
        raise ConfigError("tensor_parallel.autotp_size", given, reason, "Use one of the two")


def _check_schedule(config: Mapping[str, Any], pipeline: PipelineConfig) -> None:
    """Check that nothing in the configuration defeats the schedule."""
    key = f"{SECTION}.pipeline.schedule"
    if pipeline.schedule != "pipemare":
        if "pipemare" in pipeline.model_fields_set:
            reason = f"it has no effect on the schedule {pipeline.schedule!r}"
            remedy = f'Set {key} to "pipemare", or remove the key'
            given = pipeline.pipemare.model_dump(exclude_unset=True)
            raise ConfigError(f"{SECTION}.pipeline.pipemare", given, reason, remedy)
        return
    if pipeline.untie is False:
        raise ConfigError(
            f"{SECTION}.pipeline.untie",
            False,
            "asynchronous stages would have to meet at each step to share a weight",
            "Leave it out, or use schedule 1f1b",
        )
    if pipeline.pair_passes and pipeline.pipemare.discrepancy_correction.mode == "predict":
        raise ConfigError(
            f"{SECTION}.pipeline.pipemare.discrepancy_correction.mode",
            "predict",
            "a forward pass with predicted weights cannot run together with a backward pass with "
            "the newest",
            "Use another mode, or leave out pair_passes",
        )
    if is_enabled(config, "fp16"):
        raise ConfigError(
            "fp16.enabled",
            True,
            "a dynamic loss scale is one number for all stages at the same step, and asynchronous "
            "stages are at different ones",
            'Use "bf16": {"enabled": true} or fp32, or schedule 1f1b',
        )
    for name in ("torch_autocast", "amp"):
        if is_enabled(config, name):
            raise ConfigError(
                f"{name}.enabled",
                True,
                "autocast keeps casts of the weights for the backward pass, which would go "
                "unnoticed by the weight correction and fill the memory with old versions",
                'Use "bf16": {"enabled": true} or fp32, or schedule 1f1b',
            )


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``zero_optimization`` section; DeepSpeed also takes a truth value for stage 1."""
    section = config.get("zero_optimization", {})
    return section if isinstance(section, Mapping) else {"stage": int(bool(section))}


def check_batch_sizes(
    config: Mapping[str, Any], *, data_world_size: int, stages: int | None = None
) -> dict[str, int]:
    """Complete and check ``train = micro * accumulation * data ranks``.

    Where the number of micro-batches per step is left open, an asynchronous pipeline gets as many
    as bound its staleness to one step (stages - 1), as far as the batch can be cut into so many.

    Args:
        config: DeepSpeed configuration; ``"auto"`` counts as not given.
        data_world_size: Number of data-parallel ranks (processes / stages).
        stages: Length of the pipeline, if it is not the section's.

    Returns:
        All three sizes by their keys, in samples, samples and steps.

    Raises:
        ConfigError: The sizes given do not multiply, or none is given.
    """
    train, micro, accumulation = (_size(config, key) for key in BATCH_KEYS)
    if train is None and micro is None:
        raise ConfigError(
            BATCH_KEYS[0],
            None,
            "no batch size is given",
            f"Give {BATCH_KEYS[0]} or {BATCH_KEYS[1]}",
        )
    fewest = _fewest_micro_batches(config, stages)
    if micro is None:
        assert train is not None
        accumulation = accumulation or _parts(train // data_world_size, fewest)
        micro = train // (accumulation * data_world_size)
    elif accumulation is None:
        accumulation = fewest if train is None else train // (micro * data_world_size)
    product = micro * accumulation * data_world_size
    if train is None:
        train = product
    if train != product or not product:
        raise ConfigError(
            BATCH_KEYS[0],
            train,
            f"it is not {BATCH_KEYS[1]} x {BATCH_KEYS[2]} x data-parallel ranks = "
            f"{micro} x {accumulation} x {data_world_size} = {product}"
            f"{_launch_hint(data_world_size * WavemareConfig.of(config).model_ranks)}",
            _batch_remedy(micro, accumulation, data_world_size),
        )
    return dict(zip(BATCH_KEYS, (train, micro, accumulation), strict=True))


def _fewest_micro_batches(config: Mapping[str, Any], stages: int | None) -> int:
    """Return how many micro-batches a step has at least, where the configuration leaves it open."""
    pipeline = WavemareConfig.of(config).pipeline
    if pipeline.schedule != "pipemare":
        return 1
    return bounding_micro_batches(stages or pipeline.stages, pipeline.pipemare.slack)


def _parts(samples: int, fewest: int) -> int:
    """Return into how many equal parts to cut samples: the fewest that are enough, or each one."""
    return next((n for n in range(fewest, samples) if samples % n == 0), max(samples, 1))


def _size(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(key, value, "it is not a positive whole number", "Give one, 1 or more")
    return value


def _batch_remedy(micro: int, accumulation: int, data_world_size: int) -> str:
    product = micro * accumulation * data_world_size
    if product:
        return f"Give {product}, or leave one of the three out"
    return f"Give at least {max(micro, 1) * max(accumulation, 1) * data_world_size}"


def _launch_hint(world_size: int) -> str:
    if world_size > 1:
        return ""
    return "; this is one process, and deepspeed, torchrun or mpirun start more"
