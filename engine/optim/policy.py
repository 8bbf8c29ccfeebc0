# SPDX-License-Identifier: Apache-2.0
"""``"optimizer_policy": "auto"``: chooses the optimizer of an asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

from wavemare.engine.config.resolve import SECTION, WavemareConfig, zero_section
from wavemare.engine.config.shape import offloads
from wavemare.engine.observe.choices import choice_line, tell_choice, tell_warning
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.optim.matrix_optimizer import check_betas
from wavemare.pipeline.staleness.staleness import (
    MUON_STALENESS,
    largest_staleness,
    policy_offer,
    staleness_warning,
)

_BETAS = (0.9, 0.95)  # SOAP's own defaults
_ADAM_BETAS = (0.9, 0.999)  # Adam's, in DeepSpeed and torch
_LONG = 0.95
POLICY = f"{SECTION}.pipeline.pipemare.optimizer_policy"
# Settings of Adam that SOAP and Muon do not have.
_IMPLEMENTATION = (
    *("torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction", "amsgrad"),
    *("set_grad_none", "fp32_optimizer_states", "capturable"),
)


@dataclass(frozen=True)
class Advice:
    """What a user is told about the optimizer of an asynchronous pipeline.

    Args:
        warnings: How stale gradients are, and what the policy would do about it.
        choice: What the policy ``auto`` has become, and why; None where it was not asked.
    """

    warnings: tuple[str, ...] = ()
    choice: tuple[str, str] | None = None

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it, one message each."""
        chosen = () if self.choice is None else (choice_line(POLICY, *self.choice),)
        return (*self.warnings, *chosen)

    def tell(self) -> None:
        """Log it on rank 0."""
        for line in self.warnings:
            tell_warning(line)
        if self.choice is not None:
            tell_choice(POLICY, *self.choice)


def advise(
    config: Mapping[str, Any], *, stages: int, micro_batches: int
) -> tuple[dict[str, Any], Advice]:
    """Return the configuration of a pipeline with the policy's optimizer, and what to tell.

    Staleness harms steps along the axes of the weights, such as AdamW's, far more than orthogonal
    ones or steps along the axes of the curvature (arXiv 2606.30634, 2602.03515). With stale
    gradients the policy therefore replaces Adam and AdamW, and corrects updates by
    `UpdateFeedback`: up to a staleness of two steps by `Muon`, which steps matrices at AdamW's rate
    and decay, and needs no correction of weights; beyond by `SOAP`, of which beta1 is then at least
    0.95. The policy keeps other optimizers and the user's settings.

    Args:
        config: The whole configuration; it is not changed.
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.

    Returns:
        The configuration, and the advice: nothing for a synchronous pipeline.

    Raises:
        ConfigError: The optimizer is not named in the configuration, or it is offloaded.
    """
    config = dict(config)
    pipeline = WavemareConfig.of(config).pipeline
    if not pipeline.is_asynchronous:
        return config, Advice()
    sizes = stages, micro_batches, pipeline.pipemare.slack
    warning = staleness_warning(*sizes)
    warnings: tuple[str, ...] = () if warning is None else (warning,)
    if pipeline.pipemare.optimizer_policy == "auto":
        config, chosen, reason = _choose_optimizer(config, pipeline, *sizes[:2])
        return config, Advice(warnings, (chosen, reason))
    name = str((config.get("optimizer") or {}).get("type"))
    offer = policy_offer(*largest_staleness(*sizes)) if _is_adam(name) else None
    if offer is not None:
        warnings += (f"pipemare: optimizer_policy keep: {name} stays. {offer}",)
    return config, Advice(warnings)


def _is_adam(name: str) -> bool:
    return name.lower() in ("adam", "adamw")


def _choose_optimizer(
    config: dict[str, Any], pipeline: PipelineConfig, stages: int, micro_batches: int
) -> tuple[dict[str, Any], str, str]:
    """Return the configuration, what is chosen and why."""
    settings = pipeline.pipemare
    chosen = config.get("optimizer")
    if not isinstance(chosen, Mapping) or "type" not in chosen:
        raise ConfigError(
            POLICY,
            "auto",
            "there is no optimizer in the configuration to begin from",
            'Name one, such as "optimizer": {"type": "AdamW", ...}, or set the policy to "keep"',
        )
    name = str(chosen["type"])
    worst, mean = largest_staleness(stages, micro_batches, settings.slack)
    if not worst:
        return config, name, "no gradient is stale"
    lag = f"gradients are up to {worst} steps old on the first of {stages} stages ({mean:.2f} mean)"
    if not _is_adam(name):
        return config, name, f"it is the configuration's own choice; {lag}"
    if offloads(zero_section(config)):
        raise ConfigError(
            POLICY,
            "auto",
            "the policy's optimizers step on the device of the weights, and offload_optimizer "
            "needs DeepSpeed's CPUAdam",
            'Leave out zero_optimization.offload_optimizer, or set the policy to "keep"',
        )
    given = chosen.get("params") or {}
    params = {key: value for key, value in given.items() if key not in _IMPLEMENTATION}
    check_betas("optimizer.params.betas", params.get("betas", _BETAS))
    params.setdefault("weight_decay", _default_decay(name, given))
    if worst <= MUON_STALENESS:
        kind = "Muon"
        # The rest is stepped as before, so that its betas are Adam's own.
        params = {"betas": list(_ADAM_BETAS), **params, "adjust_lr_fn": "match_rms_adamw"}
        said = [
            f"{lag}, which harms {name}",
            f"it steps hidden matrices at {name}'s lr and weight_decay (match_rms_adamw), and "
            "AdamW the rest with its settings",
        ]
    else:
        kind, said = "SOAP", [f"it keeps {name}'s settings: {lag}, which harms {name}"]
        said += _lengthen_average(params)
    said += _what_is_lost(name, given, params["weight_decay"])
    config["optimizer"] = {"type": kind, "params": params}
    own = settings.model_fields_set
    if "error_feedback" not in own:
        config[SECTION] = _with(config[SECTION], {"error_feedback": True})
        said.append("error_feedback is on")
    if kind == "Muon" and "discrepancy_correction" not in own:
        config[SECTION] = _with(config[SECTION], {"discrepancy_correction": {"mode": "off"}})
        said.append("discrepancy_correction is off")
    return config, f"{kind} in place of {name}", "; ".join(said)


def _lengthen_average(params: dict[str, Any]) -> Iterator[str]:
    """Give SOAP betas for staleness, and say so."""
    given = params.get("betas")
    momentum = list(given or _BETAS)
    if given is None:
        yield f"betas are {momentum[0]} and {momentum[1]}, as none are given"
    if momentum[0] < _LONG:
        params["betas"] = [_LONG, *momentum[1:]]
        yield f"beta1 is {_LONG} instead of {momentum[0]}"


def _what_is_lost(name: str, given: Mapping[str, Any], decay: float) -> Iterator[str]:
    """Yield which settings of Adam the policy's optimizers do not have, or do not need."""
    if decay and "weight_decay" not in given:
        yield f"weight_decay is {decay}, torch's default for {name}"
    if given.get("amsgrad"):
        yield "amsgrad is left out"
    if given.get("bias_correction") is False:
        yield "averages are corrected for their start, in spite of bias_correction"
    if decay and not given.get("adam_w_mode", True):
        yield "weight decay is decoupled, in spite of adam_w_mode"


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
            POLICY,
            "auto",
            f"{type(optimizer).__name__} was given to initialize; the policy replaces only an "
            "optimizer of the configuration",
            'Name the optimizer in the configuration, or set the policy to "keep"',
        )


def _with(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = section["pipeline"]
    pipemare = {**pipeline.get("pipemare", {}), **settings}
    return {**section, "pipeline": {**pipeline, "pipemare": pipemare}}
