# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration of a recipe, with the command line's changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import SECTION, load_config
from wavemare.errors import ConfigError
from wavemare.training.arguments import TrainArguments

__all__ = ["drop_partition", "fill_schedules", "resolve_config"]

_KEYS: dict[str, tuple[str, ...]] = {
    "micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "global_batch_size": ("train_batch_size",),
    "lr": ("optimizer", "params", "lr"),
    "weight_decay": ("optimizer", "params", "weight_decay"),
    "clip_grad": ("gradient_clipping",),
    "tensor_model_parallel_size": (SECTION, "tensor_parallel", "size"),
    "pipeline_model_parallel_size": (SECTION, "pipeline", "stages"),
    "tensorboard_dir": ("tensorboard", "output_path"),
    "wandb_project": ("wandb", "project"),
}
"""Keys of the JSON by Megatron's options."""
_SCHEDULES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}


def resolve_config(arguments: TrainArguments) -> dict[str, Any]:
    """Read the JSON configuration, apply the options and replace each ``"auto"`` of the schedules.

    Raises:
        ConfigError: The file cannot be read, or an option is incompatible with it.
    """
    config: dict[str, Any] = load_config(arguments.deepspeed_config)
    for name, path in _KEYS.items():
        value = getattr(arguments, name)
        if value is not None:
            _put(config, path, value)
    for monitor, folder in (
        ("tensorboard", arguments.tensorboard_dir),
        ("wandb", arguments.wandb_project),
    ):
        if folder is not None:
            config[monitor]["enabled"] = True
    if arguments.micro_batch_size or arguments.global_batch_size:
        config.pop("gradient_accumulation_steps", None)  # follows from the two
    if arguments.pipeline_model_parallel_size is not None:
        drop_partition(config)
    for name in ("fp16", "bf16"):
        if getattr(arguments, name):
            config[name] = {**config.get(name, {}), "enabled": True}
    _make_schedule(arguments, config)
    fill_schedules(arguments, config)
    watchdog = config.setdefault(SECTION, {}).setdefault("watchdog", {})
    if isinstance(watchdog, dict):  # another type is refused by name later
        watchdog.setdefault("folder", str(Path(arguments.output).resolve() / "watchdog"))
    return config


def drop_partition(config: dict[str, Any]) -> None:
    """Remove explicit cuts of the layers, in place: they are for another number of stages."""
    pipeline = config[SECTION]["pipeline"]
    if not isinstance(pipeline.get("partition", ""), str):
        del pipeline["partition"]


def _make_schedule(arguments: TrainArguments, config: dict[str, Any]) -> None:
    style, lowest = arguments.lr_decay_style, arguments.min_lr
    if style is None and lowest is None and arguments.lr_warmup_fraction is None:
        return
    style = style or "cosine"
    if style not in _SCHEDULES:
        reason = "there is no such style here"
        remedy = f"Choose one of {', '.join(_SCHEDULES)}"
        raise ConfigError("--lr-decay-style", style, reason, remedy)
    rate = config.get("optimizer", {}).get("params", {}).get("lr")
    if not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError("--lr", rate, "the schedule needs the highest rate", "Give --lr")
    params: dict[str, Any] = {"warmup_num_steps": "auto"}
    if style == "cosine":
        if (lowest or 0.0) > rate:
            reason = f"it is above the highest rate, {rate}"
            raise ConfigError("--min-lr", lowest, reason, "Give less than --lr")
        params["cos_min_ratio"] = (lowest or 0.0) / rate
    else:
        if lowest:
            reason = f"DeepSpeed's {_SCHEDULES[style]} has no lowest rate"
            raise ConfigError("--min-lr", lowest, reason, "Use the style cosine")
        params["warmup_max_lr"] = rate
    if style != "constant":
        params["total_num_steps"] = "auto"
    config["scheduler"] = {"type": _SCHEDULES[style], "params": params}


def fill_schedules(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Replace each ``"auto"`` that depends on the number of steps, in place."""
    steps, share = arguments.max_steps, arguments.lr_warmup_fraction
    warmup = max(steps // 10 if share is None else round(steps * share), 1)
    scheduler = config.get("scheduler", {}).get("params", {})
    for key, value in (("total_num_steps", steps), ("warmup_num_steps", warmup)):
        if scheduler.get(key) == "auto":
            scheduler[key] = value
    # Stale gradients do the most harm while the learning rate is at its highest.
    section: Any = config
    for key in (SECTION, "pipeline", "pipemare"):
        section = section.get(key) if isinstance(section, dict) else None
    if isinstance(section, dict) and section.get("warmup_steps") == "auto":
        section["warmup_steps"] = steps // 5


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        config = config.setdefault(parent, {})
    config[key] = value
