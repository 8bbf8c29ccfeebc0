# SPDX-License-Identifier: Apache-2.0
"""The JSON configuration of a recipe, with the changes of its options."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wavemare.engine.config.resolve import SECTION, load_config, zero_section
from wavemare.engine.config.shape import fill_auto
from wavemare.engine.observe.choices import tell_choice
from wavemare.errors import ConfigError
from wavemare.files import read_json
from wavemare.training import megatron
from wavemare.training.arguments import TrainArguments
from wavemare.training.megatron import TABLE

_OF_RECIPES = {"warmup_steps": "auto"}, {"optimizer_policy": "auto"}
_OPTIMIZERS = {"adam": ("Adam", "AdamW"), "sgd": ("SGD",)}
"""DeepSpeed's names of Megatron's optimizers; the last one is taken where the JSON has another."""


def _same(value: Any) -> Any:
    return value


_CONVERTED: Mapping[str, Callable[[Any], Any]] = {
    "distributed_timeout_minutes": lambda minutes: 60.0 * minutes,
    "initial_loss_scale": lambda scale: round(math.log2(max(scale, 1.0))),
}
"""What the JSON has in place of an option's own value."""
_SCHEDULES = {"cosine": "WarmupCosineLR", "linear": "WarmupDecayLR", "constant": "WarmupLR"}


def resolve_config(arguments: TrainArguments) -> dict[str, Any]:
    """Read the JSON configuration, apply the options and replace each ``"auto"`` of the schedules.

    Raises:
        ConfigError: The file cannot be read, or an option is incompatible with it.
    """
    config: dict[str, Any] = load_config(arguments.deepspeed_config)
    if arguments.set:
        config = load_config(change_config(config, arguments.set))
    for name, value in megatron.given(arguments, megatron.JSON).items():
        if path := TABLE[name].path:
            _put(config, path, _CONVERTED.get(name, _same)(value))
    for monitor, folder in (
        ("tensorboard", arguments.tensorboard_dir),
        ("wandb", arguments.wandb_project),
    ):
        if folder is not None:
            config[monitor]["enabled"] = True
    if arguments.micro_batch_size or arguments.global_batch_size:
        config.pop("gradient_accumulation_steps", None)  # follows from the two
    if arguments.global_batch_size is None and arguments.micro_batch_size is not None:
        config.pop("train_batch_size", None)  # as in Megatron, one micro-batch of each replica
    if arguments.pipeline_model_parallel_size == 1:
        del config[SECTION]["pipeline"]
    _interleave(arguments, config)
    _place_ends(arguments, config)
    _divide(arguments, config)
    _choose_optimizer(arguments, config)
    _make_schedule(arguments, config)
    fill_schedules(arguments, config)
    watchdog = config.setdefault(SECTION, {}).setdefault("watchdog", {})
    if isinstance(watchdog, dict):  # another type is refused by name later
        watchdog.setdefault("folder", str(Path(arguments.output).resolve() / "watchdog"))
    return config


def change_config(config: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with changes of the form ``KEY.KEY=VALUE``, made one after the other.

    A value is JSON, or else a word. ``null`` removes the key.

    Raises:
        ConfigError: A change has another form, or names a key inside of a value.
    """
    changed = copy.deepcopy(dict(config))
    for change in changes:
        path, equals, text = change.partition("=")
        *parents, key = path.split(".")
        if not equals or not all((*parents, key)):
            reason = "it is not of the form KEY.KEY=VALUE"
            raise ConfigError("--set", change, reason, "Write for example optimizer.params.lr=1e-3")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        place = changed
        for parent in parents:
            if value is None and parent not in place:
                break  # there is nothing to remove
            place = place.setdefault(parent, {})
            if not isinstance(place, dict):
                reason = f"{parent!r} is not a section"
                raise ConfigError("--set", change, reason, "Name a key of a section")
        if value is None:
            place.pop(key, None)
        else:
            place[key] = value
    return changed


def _interleave(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Choose interleaved stages, in place, where Megatron's options ask for several on a rank."""
    keys = "--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage"
    chunks = arguments.num_virtual_stages_per_pipeline_rank
    layers = arguments.num_layers_per_virtual_pipeline_stage
    if chunks is None and layers is None:
        return
    key, given = (keys[0], chunks) if layers is None else (keys[1], layers)
    pipeline = config.get(SECTION, {}).get("pipeline", {})
    stages, total = pipeline.get("stages", 1), getattr(arguments, "num_layers", None)
    if stages == 1:
        raise ConfigError(
            key, given, "there is no pipeline", "Give --pipeline-model-parallel-size of 2 or more"
        )
    if layers is not None:
        if chunks is not None:
            raise ConfigError(key, given, f"{keys[0]} says the same", "Give one of the two")
        chunks, rest = divmod(total or 0, stages * layers)
        if not chunks or rest:
            reason = f"{stages} ranks with that many layers per stage cannot share {total} layers"
            remedy = f"Give --num-layers a multiple of {stages * layers}, or give {keys[0]}"
            raise ConfigError(key, given, reason, remedy)
    if chunks != 1:  # Megatron's 1F1B
        pipeline |= {"schedule": "interleaved", "chunks": chunks}


def _place_ends(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Cut the stages, in place, where the first or the last one is to have a number of layers."""
    keys = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
    ends = [getattr(arguments, key) for key in keys]
    if ends == [None, None]:
        return
    place = 0 if ends[0] is not None else 1
    key, given = f"--{TABLE[keys[place]].name}", ends[place]
    total = arguments.num_layers or 0
    stages = config.get(SECTION, {}).get("pipeline", {}).get("stages", 1)
    others = stages - sum(end is not None for end in ends)
    each, rest = divmod(total - sum(end or 0 for end in ends), max(others, 1))
    if stages == 1 or rest or each < bool(others) or (others == 0 and each):
        reason = f"{stages} stages cannot share {total} layers so"
        remedy = "Give --num-layers and --pipeline-model-parallel-size that fit, or leave it out"
        raise ConfigError(key, given, reason, remedy)
    counts = [ends[0] or each, *[each] * (stages - 2), ends[1] or each]
    # The embeddings come first: one layer, or two where positions are learned.
    before = 1 if _rotates(arguments) else 2
    cuts = [0, *(before + sum(counts[:stage]) for stage in range(1, stages))]
    config[SECTION]["pipeline"]["partition"] = cuts


def _rotates(arguments: Any) -> bool:
    """Whether the model has rotary positions, and so no layer of positions."""
    kind = arguments.position_embedding_type
    if kind is not None or arguments.use_rotary_position_embeddings:
        return bool(kind != "learned_absolute")
    folder = getattr(arguments, "model", None)
    file = Path(folder) / "config.json" if folder else Path(arguments.model_config)
    values = read_json(file, ConfigError, "--model_config", "Name the JSON file of a configuration")
    return isinstance(values, dict) and values.get("model_type") not in ("gpt2", "bert")


def _divide(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Divide experts over ranks, and the optimizer's state by ZeRO, in place."""
    experts = arguments.expert_model_parallel_size
    if experts is not None:
        # Here the ranks that split the other layers are some of those that divide the experts.
        tensor = arguments.tensor_model_parallel_size or 1
        size = math.lcm(experts, tensor) if experts > 1 else 1
        _put(config, (SECTION, "expert_parallel", "size"), size)
    stage, zero = megatron.zero_stage(arguments), zero_section(config)
    if stage is not None:
        if arguments.use_distributed_optimizer:
            stage = max(stage, int(zero.get("stage", 0)))
        config["zero_optimization"] = {**zero, "stage": stage}


def _choose_optimizer(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Put DeepSpeed's name of an optimizer into the configuration, in place."""
    name = arguments.optimizer
    if name is None:
        return
    if name not in _OPTIMIZERS:
        reason = "there is no such optimizer here"
        remedy = f"Choose one of {', '.join(_OPTIMIZERS)}, or another one in the JSON"
        raise ConfigError("--optimizer", name, reason, remedy)
    section = config.setdefault("optimizer", {})
    if section.get("type") in _OPTIMIZERS[name]:
        return
    section["type"] = _OPTIMIZERS[name][-1]
    own = {"lr", "weight_decay", "momentum"} if name == "sgd" else {"lr", "weight_decay"}
    own |= {"betas", "eps"} if name == "adam" else set()
    params = section.get("params", {})
    section["params"] = {key: value for key, value in params.items() if key in own}
    if name == "sgd":
        config["zero_allow_untested_optimizer"] = True


def _make_schedule(arguments: TrainArguments, config: dict[str, Any]) -> None:
    style, lowest = arguments.lr_decay_style, arguments.min_lr
    warmup = arguments.lr_warmup_fraction, arguments.lr_warmup_iters
    if style is None and lowest is None and warmup == (None, None):
        return
    if None not in warmup:
        raise ConfigError("--lr-warmup-iters", warmup[1], "a fraction says the same", "Give one")
    style = style or "cosine"
    if style not in _SCHEDULES:
        reason = "there is no such style here"
        remedy = f"Choose one of {', '.join(_SCHEDULES)}"
        raise ConfigError("--lr-decay-style", style, reason, remedy)
    rate = config.get("optimizer", {}).get("params", {}).get("lr")
    if not isinstance(rate, int | float) or rate <= 0:
        raise ConfigError("--lr", rate, "the schedule needs the highest rate", "Give --lr")
    params: dict[str, Any] = {"warmup_num_steps": "auto", "warmup_type": "linear"}  # as Megatron's
    if style == "cosine":
        if (lowest or 0.0) > rate:
            reason = f"it is above the highest rate, {rate}"
            raise ConfigError("--min-lr", lowest, reason, "Give less than --lr")
        params["cos_min_ratio"] = (lowest or 0.0) / rate
        params["warmup_min_ratio"] = float(0 in warmup)
    else:
        if lowest:
            reason = f"DeepSpeed's {_SCHEDULES[style]} has no lowest rate"
            raise ConfigError("--min-lr", lowest, reason, "Use the style cosine")
        params |= {"warmup_max_lr": rate, "warmup_min_lr": rate * (0 in warmup)}
    if style != "constant":
        params["total_num_steps"] = "auto"
    config["scheduler"] = {"type": _SCHEDULES[style], "params": params}


def fill_schedules(arguments: TrainArguments, config: dict[str, Any]) -> None:
    """Replace each ``"auto"`` that depends on the number of steps, in place."""
    steps, share = arguments.max_steps, arguments.lr_warmup_fraction
    warmup = max(steps // 10 if share is None else round(steps * share), 1)
    why = "a tenth of the steps" if share is None else "--lr-warmup-fraction of the steps"
    if arguments.lr_warmup_iters is not None:
        warmup, why = max(arguments.lr_warmup_iters, 1), "--lr-warmup-iters"
    total, decay = "all steps", arguments.lr_decay_iters
    if decay is not None:
        if decay < steps:
            reason = f"DeepSpeed's schedules end with the training, after {steps} steps"
            raise ConfigError("--lr-decay-iters", decay, reason, f"Give {steps} or more")
        total = "--lr-decay-iters"
    pipeline = config.get(SECTION, {}).get("pipeline", {})
    if pipeline.get("schedule") != "pipemare" and pipeline.get("pipemare") in _OF_RECIPES:
        del pipeline["pipemare"]  # a recipe's own: --set has chosen another schedule
    values = {
        "scheduler.params.total_num_steps": (decay or steps, total),
        "scheduler.params.warmup_num_steps": (warmup, why),
        f"{SECTION}.pipeline.pipemare.warmup_steps": (
            steps // 5,
            "a fifth of the steps is synchronous: stale gradients harm most at a high rate",
        ),
    }
    for path in fill_auto(config, {path: value for path, (value, _) in values.items()}):
        tell_choice(path, *values[path])


def _put(config: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    *parents, key = path
    for parent in parents:
        place = config.setdefault(parent, {})
        if parent == "betas":  # the last parent; the values are those of a list
            place = [*place] if place else [0.9, 0.999]
            place[int(key)] = value
            config[parent] = place
            return
        config = place
    config[key] = value
