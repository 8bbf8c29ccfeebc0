# SPDX-License-Identifier: Apache-2.0
"""Optimizers of the JSON configuration that wavemare adds to DeepSpeed's."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS, get_gradient_clipping
from torch import Tensor, nn

from wavemare.engine.config.shape import ZERO_WEIGHTS, offloads, zero_section
from wavemare.engine.launch.group import compiled_ops_enabled
from wavemare.engine.optim.adapter import adapt
from wavemare.errors import ConfigError, did_you_mean
from wavemare.pipeline.optim.matrix_optimizer import SIDES, MatrixOptimizer
from wavemare.pipeline.optim.soap_muon import SOAP, Muon, refresh_of

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

logger = logging.getLogger("wavemare")

_KEY = "optimizer.params"
_RATES = ("muon_lr", "adam_lr")
_WARMUP_RATES = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.001}
"""Of DeepSpeed's schedulers that warm up, with their defaults."""
_ADDED = {"soap": SOAP, "nadam": torch.optim.NAdam}


def take_optimizer(
    config: dict[str, Any], model: Any, given: Any, *, replicas: bool = False
) -> tuple[dict[str, Any], Callable[[Any], Any] | Any]:
    """Take an optimizer that DeepSpeed does not have out of a configuration.

    ``SOAP`` and torch's ``NAdam`` are for all engines, ``Muon`` for pipelines and replicas with
    local steps; other engines use DeepSpeed's. Names are accepted in any case.

    Args:
        config: The whole configuration.
        model: The model or pipeline.
        given: The optimizer or function given to ``initialize``, which has priority.
        replicas: Whether the model is trained with local steps.

    Returns:
        The configuration, and the optimizer or function for ``deepspeed.initialize``.

    Raises:
        ConfigError: There is no such optimizer, a parameter does not exist, or its value is out of
            range.
    """
    section = config.get("optimizer")
    if given is not None or not isinstance(section, Mapping):
        return config, given
    kind = str(section.get("type", "")).lower()
    is_pipeline = isinstance(model, deepspeed.PipelineModule)
    settings = dict(section.get("params") or {})
    make: Callable[[Any], Any]
    if kind in _ADDED:
        make = partial(_ADDED[kind], **settings)
        check_parameters(_ADDED[kind], settings)
    elif kind == "muon" and (is_pipeline or replicas):
        make = make_muon(model, settings)
    else:
        _check_name(section.get("type"))
        return config, given
    return {key: value for key, value in config.items() if key != "optimizer"}, make


def _check_name(kind: Any) -> None:
    """Refuse an optimizer that neither DeepSpeed nor torch has; those are named in torch's case."""
    if kind is None or str(kind).lower() in DEEPSPEED_OPTIMIZERS or hasattr(torch.optim, str(kind)):
        return
    torchs = (name for name, value in vars(torch.optim).items() if isinstance(value, type))
    remedy = did_you_mean(str(kind), ["SOAP", *DEEPSPEED_OPTIMIZERS, *torchs])
    raise ConfigError("optimizer.type", kind, "there is no optimizer of that name", remedy)


def without_compiled_optimizer(config: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """On a CPU, let torch step as DeepSpeed's FusedAdam would, without compiling that first."""
    chosen = config.get("optimizer") or {}
    parameters = chosen.get("params", {})
    if (
        optimizer is not None
        or get_accelerator().device_name() != "cpu"
        or compiled_ops_enabled()
        or offloads(zero_section(config))
        or str(chosen.get("type", "")).lower() not in ("adam", "adamw")
        or "torch_adam" in parameters
        # torch's has no such choices
        or parameters.get("bias_correction") is False
        or parameters.get("set_grad_none") is False
    ):
        return config
    config = copy.deepcopy(config)
    parameters = config["optimizer"].setdefault("params", {})
    for name in ("bias_correction", "set_grad_none"):
        parameters.pop(name, None)
    parameters.setdefault("weight_decay", 0.0)  # FusedAdam's default; torch's AdamW has another
    parameters["torch_adam"] = True
    if dist.get_rank() == 0:
        logger.info("optimizer: torch's Adam (WAVEMARE_COMPILED_OPS=1 compiles DeepSpeed's)")
    return config


def make_muon(model: nn.Module, params: Mapping[str, Any]) -> Callable[[Any], Muon]:
    """Return a function that makes Muon from parameters.

    Args:
        model: The pipeline or a stage of it, or a whole model.
        params: Of the configuration; ``muon_lr`` and ``adam_lr`` override ``lr``.

    Raises:
        ConfigError: A parameter does not exist, or its value is out of range.
    """
    rates = {key: params[key] for key in _RATES if key in params}
    settings = {key: value for key, value in params.items() if key not in _RATES}
    check_parameters(Muon, settings, others=_RATES)
    for key, rate in rates.items():
        check_parameters(Muon, {"lr": rate}, key=f"{_KEY}.{key}")
    return lambda parameters: Muon(list(muon_groups(model, parameters, rates)), **settings)


def ratio_keeping_scheduler(config: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Return a function that makes a scheduler for Muon's two rates; None if DeepSpeed's will do.

    ``WarmupLR`` and ``WarmupDecayLR`` would give all groups one rate. Theirs is that of the larger
    one, and the other one keeps its ratio to it. Of the schedulers that have no rate for each group
    a warning tells.

    Args:
        config: The whole configuration.
    """
    optimizer, scheduler = (config.get(name) or {} for name in ("optimizer", "scheduler"))
    params = optimizer.get("params") or {}
    rates: set[Any] = {params.get(name, params.get("lr")) for name in _RATES} - {None}
    kind, settings = scheduler.get("type"), dict(scheduler.get("params") or {})
    if str(optimizer.get("type")).lower() != "muon" or len(rates) < len(_RATES) or not max(rates):
        return None
    if kind in (lr_schedules.ONE_CYCLE, lr_schedules.LR_RANGE_TEST):
        logger.warning("%s gives muon_lr and adam_lr the same rate; WarmupCosineLR does not", kind)
    if kind not in (lr_schedules.WARMUP_LR, lr_schedules.WARMUP_DECAY_LR):
        return None
    limits = {name: settings.get(name, default) for name, default in _WARMUP_RATES.items()}
    if any(isinstance(limit, list | tuple) for limit in limits.values()):
        return None  # one for each group

    def make(optimizer: Any) -> Any:
        shares = [group["lr"] / max(rates) for group in optimizer.param_groups]
        own = {name: [limit * share for share in shares] for name, limit in limits.items()}
        return getattr(lr_schedules, kind)(optimizer, **{**settings, **own})

    return make


def check_parameters(
    kind: Any, settings: Mapping[str, Any], *, others: tuple[str, ...] = (), key: str = ""
) -> None:
    """Refuse invalid parameters of an optimizer before the model exists.

    Args:
        kind: Class of the optimizer.
        settings: The configuration's ``params``.
        others: Further names.
        key: Of ``settings``, if not ``optimizer.params``.

    Raises:
        ConfigError: A parameter does not exist, or its value is out of range.
    """
    names = [*list(inspect.signature(kind).parameters)[1:], *others]
    for name, value in settings.items():
        if name not in names:
            reason = f"{kind.__name__} has no such parameter"
            raise ConfigError(f"{_KEY}.{name}", value, reason, did_you_mean(name, names))
    try:
        kind([torch.zeros(1)], **settings)
    except ConfigError as error:
        path = key or f"{_KEY}.{error.key}"
        raise ConfigError(path, error.value, error.reason, error.remedy) from None
    except (TypeError, ValueError, RuntimeError) as error:  # of torch's own optimizers
        reason = f"torch refuses it ({error})"
        raise ConfigError(_KEY, dict(settings), reason, "Give values that fit") from None


def is_added(optimizer: Any) -> bool:
    """Return whether an optimizer is one that wavemare adds to DeepSpeed's.

    ZeRO 1 and 2 step it correctly. Universal checkpoints do not keep its states.
    """
    return isinstance(optimizer, (MatrixOptimizer, torch.optim.NAdam))


def check_matrix_optimizer(engine: EngineMixin, optimizer: Any) -> None:
    """Refuse the settings that an optimizer of matrices does not support.

    Raises:
        ConfigError: ZeRO 3, offloading or fp16 is on.
    """
    if not isinstance(optimizer, MatrixOptimizer):
        return
    name = type(optimizer).__name__

    def refuse(key: str, value: Any, reason: str, remedy: str) -> ConfigError:
        return ConfigError(key, value, f"{name} {reason}", remedy)

    stage = engine.zero_optimization_stage()
    if stage == ZERO_WEIGHTS:
        reason = "steps whole matrices, and under ZeRO 3 no rank holds one"
        raise refuse("zero_optimization.stage", stage, reason, "Use 0, 1 or 2, or AdamW")
    if engine.zero_use_cpu_optimizer():
        device = engine.zero_offload_optimizer().device
        reason = "steps on the device of the weights, and offloading needs DeepSpeed's CPUAdam"
        remedy = "Leave out offload_optimizer, or use AdamW"
        raise refuse("zero_optimization.offload_optimizer.device", device, reason, remedy)
    if engine.fp16_enabled():
        reason = "is made for fp32 and bf16, whose gradients need no loss scale"
        raise refuse("fp16.enabled", True, reason, 'Use "bf16": {"enabled": true}, or AdamW')


def describe_partitions(engine: EngineMixin) -> None:
    """Tell an optimizer of matrices which tensors its flat partitions hold."""
    basic = getattr(engine, "basic_optimizer", None)  # an engine that only evaluates has none
    if isinstance(basic, MatrixOptimizer):
        for flat, partition in adapt(engine).partitions():
            basic.set_partition(flat, partition)


def refresh_by_stage(optimizer: Any, stage: int, num_stages: int) -> None:
    """Let SOAP refresh the bases of an asynchronous pipeline's stage as `refresh_of` says."""
    if isinstance(optimizer, SOAP):
        for group in optimizer.param_groups:
            if group["stage_aware"]:
                group["refresh"] = refresh_of(stage, num_stages, group["refresh"])


def muon_groups(
    model: nn.Module, parameters: Iterable[Any], rates: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    """Yield each parameter group's hidden matrices and, in a group of their own, the rest.

    Args:
        model: The pipeline or this rank's stage of it, or a whole model.
        parameters: Parameters or parameter groups.
        rates: ``muon_lr`` of the matrices and ``adam_lr`` of the rest, where they are other ones.
    """
    items = list(parameters)
    groups = [item for item in items if isinstance(item, Mapping)]
    loose = [item for item in items if not isinstance(item, Mapping)]
    outer = {id(parameter) for parameter in _outer(model)}
    for group in [*groups, *([{"params": loose}] if loose else [])]:
        given = group["params"]
        tensors = [given] if isinstance(given, Tensor) else list(given)
        for use_muon, rate in ((True, "muon_lr"), (False, "adam_lr")):
            part = [p for p in tensors if _is_hidden(p, outer) is use_muon]
            if part:
                own = {"lr": rates[rate]} if rate in rates else {}
                yield {**own, **group, "params": part, "use_muon": use_muon}


def _is_hidden(parameter: Tensor, outer: set[int]) -> bool:
    marked = getattr(parameter, "use_muon", None)  # DeepSpeed's mark, if the user has set it
    if marked is None:
        return parameter.ndim == SIDES and id(parameter) not in outer
    return bool(marked)


def _outer(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights of embeddings and of the output head, by kind, name and place."""
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        for key, parameter in module.named_parameters(recurse=False):
            names = f"{name}.{key}".lower()
            if "embed" in kind or "embed" in names or "lm_head" in names:
                yield parameter
    if isinstance(model, deepspeed.PipelineModule) and _has_head(model):
        local = getattr(model, "local_layers", lambda: model.forward_funcs)
        last = local()[-1]
        while isinstance(last, nn.Sequential) and len(last):  # a part that holds blocks, too
            last = last[-1]
        if isinstance(last, nn.Module):  # a function of tied weights: an embedding's
            yield from last.parameters()


def _has_head(model: Any) -> bool:
    homes = getattr(model, "homes", range(model.num_stages))
    return bool(homes[-1] == model.stage_id)


def clipping_limit(config: Mapping[str, Any]) -> float:
    """Return the norm that gradients are clipped to; 0 for none. DeepSpeed's default is 1."""
    limit = get_gradient_clipping(config)
    return 0.0 if limit in (None, "auto") else float(limit)
