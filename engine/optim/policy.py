# SPDX-License-Identifier: Apache-2.0
"""``"optimizer_policy": "auto"``: chooses the optimizer of an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from wavemare.engine.config.resolve import SECTION, WavemareConfig
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.optim.matrix_optimizer import check_betas
from wavemare.pipeline.staleness.staleness import largest_staleness, staleness_warning

_BETAS = (0.9, 0.95)  # SOAP's own defaults
_LONG = 0.95
_KEY = f"{SECTION}.pipeline.pipemare.optimizer_policy"
# Settings of Adam that SOAP does not have.
_IMPLEMENTATION = (
    *("torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction", "amsgrad"),
    *("set_grad_none", "fp32_optimizer_states", "capturable"),
)


def advise(
    config: Mapping[str, Any], *, stages: int, micro_batches: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the configuration of a pipeline with the policy's optimizer, and messages.

    Staleness harms steps along the axes of the weights, such as AdamW's, far more than steps along
    the axes of the curvature (arXiv 2602.03515). With stale gradients the policy therefore replaces
    Adam and AdamW by `SOAP` with the same settings, and corrects updates by `UpdateFeedback`. Up to
    one step of staleness, forward passes use predicted weights (`WeightPrediction`). Beyond, beta1
    is at least 0.95. The policy keeps other optimizers and the user's settings.

    Args:
        config: The whole configuration; it is not changed.
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.

    Returns:
        The configuration, and messages for the user: the staleness, if micro-batches do not bound
        it to one step, and the policy's choice. Empty for a synchronous pipeline.

    Raises:
        ConfigError: The optimizer is not named in the configuration.
    """
    config = dict(config)
    pipeline = WavemareConfig.of(config).pipeline
    if not pipeline.is_asynchronous:
        return config, ()
    warning = staleness_warning(stages, micro_batches, pipeline.pipemare.slack)
    told = () if warning is None else (warning,)
    if pipeline.pipemare.optimizer_policy != "auto":
        return config, told
    config, said = _choose_optimizer(config, pipeline, stages, micro_batches)
    return config, (*told, said)


def _choose_optimizer(
    config: dict[str, Any], pipeline: PipelineConfig, stages: int, micro_batches: int
) -> tuple[dict[str, Any], str]:
    settings = pipeline.pipemare
    chosen = config.get("optimizer")
    if not isinstance(chosen, Mapping) or "type" not in chosen:
        raise ConfigError(
            _KEY,
            "auto",
            "there is no optimizer in the configuration to begin from",
            'Name one, such as "optimizer": {"type": "AdamW", ...}, or set the policy to "keep"',
        )
    name = str(chosen["type"])
    worst, mean = largest_staleness(stages, micro_batches, settings.slack)
    lag = f"gradients are up to {worst} steps old on the first of {stages} stages ({mean:.2f} mean)"
    if not worst:
        return config, f"pipemare: {name} stays, as no gradient is stale"
    if name.lower() not in ("adam", "adamw"):
        return config, f"pipemare: {name} stays, the configuration's own choice; {lag}"
    given = chosen.get("params") or {}
    params = {key: value for key, value in given.items() if key not in _IMPLEMENTATION}
    check_betas("optimizer.params.betas", params.get("betas", _BETAS))
    momentum = list(params.get("betas", _BETAS))
    lengthens = worst > 1 and momentum[0] < _LONG
    if lengthens:
        params["betas"] = [_LONG, *momentum[1:]]
    decay = params.setdefault("weight_decay", _default_decay(name, given))
    config["optimizer"] = {"type": "SOAP", "params": params}
    said = f"pipemare: SOAP replaces {name} and keeps its settings: {lag}, which harms AdamW"
    if "betas" not in given:
        said += f"; betas are {momentum[0]} and {momentum[1]}, as none are given"
    if lengthens:
        said += f"; beta1 is {_LONG} instead of {momentum[0]}"
    if decay and "weight_decay" not in given:
        said += f"; weight_decay is {decay}, torch's default for {name}"
    if given.get("amsgrad"):
        said += "; amsgrad is left out"
    if decay and not given.get("adam_w_mode", True):
        said += "; weight decay is decoupled, in spite of adam_w_mode"
    own = settings.model_fields_set
    if "error_feedback" not in own:
        config[SECTION] = _with(config[SECTION], {"error_feedback": True})
        said += "; error_feedback is on"
    if worst == 1 and "discrepancy_correction" not in own:
        config[SECTION] = _with(config[SECTION], {"discrepancy_correction": {"mode": "predict"}})
        said += "; forward passes take predicted weights"
    return config, said


def _default_decay(name: str, given: Mapping[str, Any]) -> float:
    """Return the weight decay of the replaced optimizer where the configuration gives none.

    DeepSpeed's own Adam has none. With ``torch_adam`` DeepSpeed takes torch's AdamW, also for the
    name Adam, unless ``adam_w_mode`` is false.
    """
    if not given.get("torch_adam"):
        return 0.0
    decoupled = name.lower() == "adamw" or given.get("adam_w_mode", True)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    return float(signature(kind).parameters["weight_decay"].default)


def check_replaceable(ours: WavemareConfig, optimizer: Any) -> None:
    """Check that the optimizer, if the policy replaces it, comes from the configuration.

    Args:
        ours: The section.
        optimizer: As given to ``initialize``.

    Raises:
        ConfigError: The caller made it.
    """
    if optimizer is not None and ours.pipeline.pipemare.optimizer_policy == "auto":
        raise ConfigError(
            _KEY,
            "auto",
            f"{type(optimizer).__name__} was given to initialize; the policy replaces only an "
            "optimizer of the configuration",
            'Name the optimizer in the configuration, or set the policy to "keep"',
        )


def _with(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = section["pipeline"]
    pipemare = {**pipeline.get("pipemare", {}), **settings}
    return {**section, "pipeline": {**pipeline, "pipemare": pipemare}}
