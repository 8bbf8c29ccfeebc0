# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration: DeepSpeed's, with one more section, checked before anything is built."""

from __future__ import annotations

import base64
import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pydantic import Field

from wavemare.comm.config import SparseCollectiveConfig
from wavemare.engine.config.refusals import launch_hint, refuse, without_removed
from wavemare.engine.config.sections import (
    BalanceConfig,
    CheckpointConfig,
    ExpertParallelConfig,
    GuardConfig,
    LocalStepsConfig,
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
    refuse_misspelt_section,
    zero_section,
)
from wavemare.errors import ConfigError
from wavemare.files import parse_json, refuse_duplicates, say_what_is_wrong
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
    "refuse_misspelt_section",
    "zero_section",
]

_COMMENTS = ("#", "/")


def load_config(
    config: str | os.PathLike[str] | Mapping[str, Any], key: str = "--deepspeed_config"
) -> dict[str, Any]:
    """Return the configuration as a dictionary of its own.

    Args:
        config: A mapping, the path of a JSON file (comments allowed) or its text in base64, as
            DeepSpeed takes them.
        key: What a message calls the file.

    Raises:
        ConfigError: The file is missing, is not JSON (with line and column), repeats a key, or has
            something else where a section belongs.
    """
    values = copy.deepcopy(dict(config)) if isinstance(config, Mapping) else _read(config, key)
    _respell(values)
    check_shape(values)
    return values


def _respell(values: dict[str, Any]) -> None:
    """Write what DeepSpeed takes in two spellings in that which our checks read."""
    zero, optimizer = (values.get(name) for name in ("zero_optimization", "optimizer"))
    if isinstance(zero, dict) and zero.get("stage") in ("0", "1", "2", "3"):
        zero["stage"] = int(zero["stage"])
    if isinstance(optimizer, dict) and optimizer.get("params", {}) is None:
        del optimizer["params"]
    for name in BATCH_KEYS:
        if isinstance(values.get(name), float) and values[name].is_integer():
            values[name] = int(values[name])


def _read(config: object, key: str) -> dict[str, Any]:
    def refuse(reason: str, remedy: str) -> ConfigError:
        return ConfigError(key, config if isinstance(config, str) else str(config), reason, remedy)

    if not isinstance(config, str | os.PathLike) or not os.fspath(config):
        raise refuse("it is neither the name of a file nor a mapping", "Name a JSON file")
    try:
        text = _text(str(config))
        values = say_what_is_wrong(lambda: _parse(text))
    except OSError as error:
        reason = f"the file cannot be read ({error.strerror})"
        raise refuse(reason, "Name an existing JSON file") from None
    except UnicodeDecodeError:
        raise refuse("this is not text", "Name a JSON file") from None
    except ConfigError:
        raise
    except ValueError as error:
        raise refuse(str(error), "Fix that place") from None
    if not text.strip():
        raise refuse("the file is empty", "Write {...}")
    if not isinstance(values, dict):
        reason = f"this is JSON, but {type(values).__name__} rather than an object"
        raise refuse(reason, "Write {...}")
    return values


def _text(config: str) -> str:
    if not os.path.exists(config):
        try:
            return base64.urlsafe_b64decode(config).decode("utf-8")
        except ValueError:  # neither base64 nor text: it was meant as a path
            pass
    return Path(config).read_text(encoding="utf-8-sig")


def _parse(text: str) -> Any:
    """Parse as DeepSpeed does, so that the same files load."""
    import hjson

    try:
        return hjson.loads(
            text, object_pairs_hook=lambda pairs: refuse_duplicates(pairs, _refuse_duplicate)
        )
    except hjson.HjsonDecodeError as error:
        _parse_strictly(text)
        place = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON at {place}: {error.msg}") from None


def _parse_strictly(text: str) -> None:
    """Raise plain JSON's error where that tells more of a text that is none.

    To hjson words without quotes, such as ``True,`` and ``NaN,``, are texts up to the line's end,
    so that it finds the error far behind them; but it knows comments.
    """
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if text[error.pos : error.pos + 1] in _COMMENTS:
            return
    parse_json(text)


def _refuse_duplicate(key: str, value: Any) -> NoReturn:
    raise ConfigError(key, value, "the key appears twice", "Remove one of the two")


class TensorParallelConfig(Section):
    """Ranks that share every layer of a model, split as Megatron-LM does, by its class's plan."""

    size: int = Field(default=1, ge=1)
    """The number of consecutive ranks that share a model; 1 for none."""


class WavemareConfig(Section):
    """The ``"wavemare"`` section. Stock DeepSpeed ignores it, so one file serves both."""

    pipeline: PipelineConfig = PipelineConfig()
    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    expert_parallel: ExpertParallelConfig = ExpertParallelConfig()
    parallel: ParallelConfig = ParallelConfig()
    balance: BalanceConfig = BalanceConfig()
    wavelet: WaveletConfig = WaveletConfig()
    sparse_collective: SparseCollectiveConfig = SparseCollectiveConfig()
    local_steps: LocalStepsConfig = LocalStepsConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    guard: GuardConfig = GuardConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> WavemareConfig:
        """Read the section of a DeepSpeed configuration; an absent one has all defaults.

        Raises:
            ConfigError: The section is not a mapping, or a key or value in it is invalid or was
                removed.
        """
        section = config.get(SECTION, {})
        if not isinstance(section, Mapping):
            raise ConfigError(SECTION, section, "the section is not a mapping", "Write {...}")
        return cls.parse(without_removed(section), SECTION)

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
    if pipeline.is_asynchronous:
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
