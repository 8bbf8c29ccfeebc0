# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration: DeepSpeed's, with one more section, checked before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.engine.config.file import load_config
from wavemare.engine.config.refusals import launch_hint, refuse
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
    check_precision,
    check_shape,
    check_zero_stage,
    misplaced_keys,
    zero_section,
)
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig, WaveletConfig
from wavemare.pipeline.plan.partition import check_partition
from wavemare.pipeline.staleness.staleness import bounding_micro_batches
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
    if isinstance(ours.pipeline.partition, str):
        check_partition(ours.pipeline.partition)
    refuse(config, ours, world_size)
    return ours


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
    ours = WavemareConfig.of(config)
    pipeline, fewest = ours.pipeline, 1
    if pipeline.schedule == "pipemare":
        fewest = bounding_micro_batches(stages or pipeline.stages, pipeline.pipemare.slack)
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
            f"{launch_hint(data_world_size * ours.model_ranks)}",
            _batch_remedy(micro, accumulation, data_world_size),
        )
    return dict(zip(BATCH_KEYS, (train, micro, accumulation), strict=True))


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
