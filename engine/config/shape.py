# SPDX-License-Identifier: Apache-2.0
"""The shape of DeepSpeed's part of a configuration: what is a section, a number, a truth value.

DeepSpeed trusts it, and fails with a traceback or does something else: ``"enabled": "false"`` is
true to some of its readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from wavemare.errors import ConfigError, check_number
from wavemare.section import Section

SECTION = "wavemare"
BATCH_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
ZERO_WEIGHTS = 3
"""The stage of ZeRO that partitions the weights."""
_SECTIONS = (
    "activation_checkpointing",
    "aio",
    "bf16",
    "checkpoint",
    "comet",
    "comms_logger",
    "csv_monitor",
    "data_efficiency",
    "flops_profiler",
    "fp16",
    "optimizer",
    "pipeline",
    "scheduler",
    "tensor_parallel",
    "tensorboard",
    "torch_autocast",
    "wandb",
)
_NAMED = ("optimizer", "scheduler")
_HALVES = ("fp16", "bf16")
# Read or changed by options and plans before the whole section is checked.
_OURS = ("balance", "parallel", "pipeline", "sparse_collective", "tensor_parallel")
_ZERO_STAGES = (0, 1, 2, 3)
# Of `optimizer.params`; "auto" is what the Trainer fills in.
_NUMBERS = ("lr", "weight_decay", "eps", "momentum")


def section_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; what is none is an empty one."""
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}


def zero_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the ``zero_optimization`` section; DeepSpeed also takes a truth value for stage 1."""
    section = config.get("zero_optimization", {})
    return section if isinstance(section, Mapping) else {"stage": int(bool(section))}


def is_enabled(config: Mapping[str, Any], name: str) -> bool:
    """Whether a section says ``"enabled": true``, or 1, as DeepSpeed's readers take it."""
    return bool(section_of(config, name).get("enabled"))


def offloads(zero: Mapping[str, Any]) -> bool:
    """Whether ``zero_optimization`` moves the optimizer away; ``none`` is no device."""
    section = section_of(zero, "offload_optimizer")
    return bool(zero.get("cpu_offload")) or (bool(section) and section.get("device") != "none")


def fill_auto(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Replace each ``"auto"`` at a dotted path by its value, in place; return their paths."""
    filled = []
    for path, value in values.items():
        *parents, key = path.split(".")
        node = config
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(key) == "auto":
            node[key] = value
            filled.append(path)
    return filled


def refuse_idle(section: Section, key: str, mode: str) -> None:
    """Refuse keys of a section of ours whose ``mode`` is ``off``.

    Raises:
        ConfigError: Naming the first of them.
    """
    given = sorted(section.model_fields_set - {"mode"})
    if given:
        raise ConfigError(
            f"{key}.{given[0]}",
            getattr(section, given[0]),
            f"it has no effect: {key}.mode is 'off'",
            f'Set {key}.mode to "{mode}", or remove the key',
        )


def check_shape(config: Mapping[str, Any]) -> None:
    """Check that sections are sections, and that the numbers which all engines need are numbers.

    Args:
        config: DeepSpeed configuration; ``"auto"`` is a value that is filled in later.

    Raises:
        ConfigError: Naming the key that is something else.
    """
    for key in config:
        if not isinstance(key, str):
            raise ConfigError(f"{key!r}", config[key], "the key is no text", "Put it in quotes")
    for name in _SECTIONS:
        if name in config:
            _check_mapping(name, config[name])
            enabled = config[name].get("enabled", False)
            # DeepSpeed takes 0 and 1, too; of texts some of its readers take any for true.
            if enabled not in (0, 1, "auto"):
                remedy = "Write true or false, without quotes"
                raise ConfigError(
                    f"{name}.enabled", enabled, "it is neither true nor false", remedy
                )
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, bool):
        _check_mapping("zero_optimization", zero)
    for name in _NAMED:
        _check_named(name, config.get(name, {}))
    _check_number("gradient_clipping", config.get("gradient_clipping"))
    if SECTION in config:
        _check_mapping(SECTION, config[SECTION])
        for name in _OURS:
            _check_mapping(f"{SECTION}.{name}", config[SECTION].get(name, {}))


def _check_mapping(key: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            key, value, "the section is not a mapping", "Write {...}, or leave it out"
        )


def _check_named(name: str, section: Mapping[str, Any]) -> None:
    kind, params = section.get("type"), section.get("params", {})
    if kind is not None and not isinstance(kind, str):
        raise ConfigError(f"{name}.type", kind, "it is no name", "Give a string in quotes")
    _check_mapping(f"{name}.params", params)
    for key in _NUMBERS:
        _check_number(f"{name}.params.{key}", params.get(key))


def _check_number(key: str, value: Any) -> None:
    if value is not None and value != "auto":
        check_number(ConfigError, key, value)


def check_complete(config: Mapping[str, Any]) -> None:
    """Check that no ``"auto"`` is left of those that transformers' Trainer fills in.

    Raises:
        ConfigError: Naming the key.
    """
    values = {"gradient_clipping": config.get("gradient_clipping")}
    values |= {f"{name}.enabled": section_of(config, name).get("enabled") for name in _HALVES}
    for name in _NAMED:
        params = section_of(section_of(config, name), "params")
        values |= {f"{name}.params.{key}": value for key, value in params.items()}
    for key, value in values.items():
        if value == "auto":
            reason = "only transformers' Trainer and the recipes fill it in"
            raise ConfigError(key, value, reason, "Give a value, or leave it out")


def check_zero_stage(stage: object) -> None:
    """Check the stage of ZeRO.

    Raises:
        ConfigError: There is no such stage, or it is a text, which the checks would pass over.
    """
    if stage not in _ZERO_STAGES:
        quoted = isinstance(stage, str)
        reason = "it is a string, not a number" if quoted else "there is no such stage"
        remedy = "Write 0, 1, 2 or 3, without quotes" if quoted else "Give 0, 1, 2 or 3"
        raise ConfigError("zero_optimization.stage", stage, reason, remedy)


def check_precision(config: Mapping[str, Any]) -> None:
    """Check that a model is to compute in one 16-bit type at most.

    Raises:
        ConfigError: Both are enabled.
    """
    if all(section_of(config, name).get("enabled") in (True, 1) for name in _HALVES):
        reason = "bf16 is enabled, too, and weights have one type"
        raise ConfigError("fp16.enabled", True, reason, "Enable one of the two")


def misplaced_keys(config: Mapping[str, Any]) -> list[str]:
    """Warnings for keys that DeepSpeed accepts and never reads.

    Returns:
        One sentence for each top-level key that looks like a misspelt one, for settings beside
        ``params`` of optimizer and scheduler, and for ``pipeline.stages`` and
        ``pipeline.partition``, which only our section gives effect.
    """
    known = _deepspeed_keys() | {SECTION}
    warnings = []
    for key in config:
        nearest = get_close_matches(key, known, n=1, cutoff=0.8)
        if key not in known and nearest:
            warnings.append(
                f"{key}: DeepSpeed does not know this key and ignores it. "
                f"Did you mean {nearest[0]!r}?"
            )
    never = "DeepSpeed never reads this key. Use"
    for name in _NAMED:
        unread = [k for k in config.get(name, {}) if k not in ("type", "params", "legacy_fusion")]
        warnings += [f"{name}.{key}: {never} {name}.params.{key}" for key in unread]
    ours = [key for key in ("stages", "partition") if key in config.get("pipeline", {})]
    return [*warnings, *(f"pipeline.{key}: {never} {SECTION}.pipeline.{key}" for key in ours)]


def refuse_misspelt_section(config: Mapping[str, Any]) -> None:
    """Refuse a key that looks like our section's: all that it asks for would be left out.

    Raises:
        ConfigError: There is such a key.
    """
    for key in config:
        if key != SECTION and get_close_matches(str(key).casefold(), [SECTION], cutoff=0.75):
            reason = "nobody reads this key"
            raise ConfigError(str(key), config[key], reason, f"Write {SECTION!r}")


def _deepspeed_keys() -> set[str]:
    from deepspeed.runtime import constants

    names = {value for value in vars(constants).values() if isinstance(value, str)}
    others = {"compile", "data_parallel_size", "sequence_parallel_size", "zero_optimization"}
    known = {name for name in names if name.isidentifier() and name.islower()}
    return known | others | set(_SECTIONS)
