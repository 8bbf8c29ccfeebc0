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
from wavemare.pipeline.config import PipelineConfig, PipeMareConfig
from wavemare.pipeline.optim.matrix_optimizer import check_betas
from wavemare.pipeline.staleness.staleness import (
    largest_staleness,
    max_staleness,
    measured,
    policy_offer,
    policy_optimizer,
    resolve_mode,
    staleness_warning,
)
from wavemare.section import Section

_BETAS = (0.9, 0.95)  # SOAP's own defaults
_ADAM_BETAS = (0.9, 0.999)  # Adam's, in DeepSpeed and torch
_LONG = 0.95
_PIPEMARE = f"{SECTION}.pipeline.pipemare"
POLICY = f"{_PIPEMARE}.optimizer_policy"
CORRECTION = f"{_PIPEMARE}.discrepancy_correction.mode"
# Settings of Adam that SOAP and Muon do not have.
_IMPLEMENTATION = (
    *("torch_adam", "adam_w_mode", "fused", "foreach", "bias_correction", "amsgrad"),
    *("set_grad_none", "fp32_optimizer_states", "capturable"),
)


@dataclass(frozen=True)
class Choice:
    """What an ``auto`` has become.

    Args:
        key: Of the configuration.
        chosen: What is taken.
        reason: As the end of a sentence.
    """

    key: str
    chosen: str
    reason: str


@dataclass(frozen=True)
class Advice:
    """What a user is told about the optimizer of an asynchronous pipeline.

    Args:
        warnings: How stale gradients are, and what the policy would do about it.
        choices: What each ``auto`` that was asked for has become, the policy's last.
    """

    warnings: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """All of it, one message each."""
        chosen = (choice_line(one.key, one.chosen, one.reason) for one in self.choices)
        return (*self.warnings, *chosen)

    def tell(self) -> None:
        """Log it on rank 0."""
        for line in self.warnings:
            tell_warning(line)
        for one in self.choices:
            tell_choice(one.key, one.chosen, one.reason)


@dataclass(frozen=True)
class Written:
    """What a checkpoint was written with.

    Args:
        optimizer: ``SOAP``, ``Muon``, or ``Adam`` for Adam and AdamW.
        feeds_back: Whether it corrects updates by `UpdateFeedback`; None of a synchronous run.
        correction: Mode of the discrepancy correction, ``auto`` for ``exact`` and ``ema``; None of
            a synchronous run.
    """

    optimizer: str
    feeds_back: bool | None = None
    correction: str | None = None


def advise(
    config: Mapping[str, Any], *, stages: int, micro_batches: int, optimizer: Any = None
) -> tuple[dict[str, Any], Advice]:
    """Return the configuration of a pipeline with what each ``auto`` becomes, and what to tell.

    Staleness harms steps along the axes of the weights, such as AdamW's, far more than orthogonal
    ones or steps along the axes of the curvature (arXiv 2606.30634, 2602.03515). With stale
    gradients the policy therefore replaces Adam and AdamW, and corrects updates by
    `UpdateFeedback`: up to a staleness of two steps by `Muon`, which steps matrices at AdamW's rate
    and decay; beyond by `SOAP`, of which beta1 is then at least 0.95. The policy keeps other
    optimizers and the user's settings. ``discrepancy_correction`` becomes what is best for the
    optimizer, see `MEASURED`.

    Args:
        config: The whole configuration; it is not changed.
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
        optimizer: The caller's own, in place of the configuration's.

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
    worst, mean = largest_staleness(*sizes)
    warning = staleness_warning(*sizes)
    warnings: tuple[str, ...] = () if warning is None else (warning,)
    choices: list[Choice] = []
    if pipeline.pipemare.optimizer_policy == "auto":
        config, choice = _choose_optimizer(config, pipeline, *sizes)
        choices.append(choice)
    name = _name_of(config, optimizer)
    config, correction = _choose_correction(config, pipeline, name, sizes)
    if correction is not None:
        choices.insert(0, correction)
    if not choices or choices[-1].key != POLICY:
        offer = policy_offer(worst, mean) if optimizer is None and _is_adam(name) else None
        if offer is not None:
            warnings += (f"pipemare: optimizer_policy keep: {name} stays. {offer}",)
    return config, Advice(warnings, tuple(choices))


def is_policys(config: Mapping[str, Any]) -> bool:
    """Return whether the policy ``auto`` decides on the optimizer of a configuration."""
    pipeline = WavemareConfig.of(config).pipeline
    asked = pipeline.is_asynchronous and pipeline.pipemare.optimizer_policy == "auto"
    return asked and _is_adam(_name_of(config))


def _is_adam(name: str) -> bool:
    return name.lower() in ("adam", "adamw")


def _name_of(config: Mapping[str, Any], optimizer: Any = None) -> str:
    if optimizer is not None:
        return type(optimizer).__name__
    return str((config.get("optimizer") or {}).get("type"))


def _choose_correction(
    config: dict[str, Any], pipeline: PipelineConfig, name: str, sizes: tuple[int, int, int]
) -> tuple[dict[str, Any], Choice | None]:
    """Return the configuration with the correction of an optimizer, and the choice to be told."""
    given = pipeline.pipemare.discrepancy_correction
    if given.mode != "auto":
        return config, None
    mode = measured(name, largest_staleness(*sizes)[0]).correction
    if mode != given.mode:
        chosen = {"discrepancy_correction": {**_set(given), "mode": mode}}
        config[SECTION] = _with(config[SECTION], chosen)
    if "mode" not in given.model_fields_set:
        return config, None
    stages, *others = sizes
    stale = [max_staleness(stage, stages, *others) for stage in range(stages)]
    modes = ", ".join(resolve_mode(mode, steps) for steps in stale)
    reason = (
        f"gradients of the stages are up to {', '.join(map(str, stale))} steps old, and the "
        f"optimizer is {name}"
    )
    return config, Choice(CORRECTION, modes, reason)


def _choose_optimizer(
    config: dict[str, Any],
    pipeline: PipelineConfig,
    stages: int,
    micro_batches: int,
    slack: int,
) -> tuple[dict[str, Any], Choice]:
    """Return the configuration, what is chosen and why."""
    chosen = config.get("optimizer")
    if not isinstance(chosen, Mapping) or "type" not in chosen:
        raise ConfigError(
            POLICY,
            "auto",
            "there is no optimizer in the configuration to begin from",
            'Name one, such as "optimizer": {"type": "AdamW", ...}, or set the policy to "keep"',
        )
    name = str(chosen["type"])
    worst, mean = largest_staleness(stages, micro_batches, slack)
    if not worst:
        return config, Choice(POLICY, name, "no gradient is stale")
    lag = (
        f"gradients are up to {worst} steps old on the first of {stages} stages ({mean:.2f} on "
        "average)"
    )
    if not _is_adam(name):
        return config, Choice(POLICY, name, f"it is the configuration's own choice; {lag}")
    if offloads(zero_section(config)):
        raise ConfigError(
            POLICY,
            "auto",
            "the policy's optimizers step on the device of the weights, and offload_optimizer "
            "needs DeepSpeed's CPUAdam",
            'Leave out zero_optimization.offload_optimizer, or set the policy to "keep"',
        )
    kind = policy_optimizer(worst)
    config["optimizer"], told = _replaced(kind, chosen)
    if kind == "Muon":
        said = [
            f"{lag}, from which {name} suffers",
            f"Muon updates hidden matrices at {name}'s lr and weight_decay (match_rms_adamw), and "
            "AdamW updates the rest with its own settings",
        ]
    else:
        said = [f"it keeps {name}'s settings: {lag}, from which {name} suffers"]
    said += told
    given = pipeline.pipemare
    if "error_feedback" not in given.model_fields_set:
        config[SECTION] = _with(config[SECTION], {"error_feedback": True})
        said.append("error_feedback is on")
    mode = measured(kind, worst).correction
    if "mode" not in given.discrepancy_correction.model_fields_set and mode != "auto":
        said.append(f"discrepancy_correction is {mode}")
    return config, Choice(POLICY, f"{kind} in place of {name}", "; ".join(said))


def _replaced(kind: str, chosen: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the section of SOAP or Muon in place of Adam's, and what is to be said of it."""
    given, name = chosen.get("params") or {}, str(chosen["type"])
    params = {key: value for key, value in given.items() if key not in _IMPLEMENTATION}
    check_betas("optimizer.params.betas", params.get("betas", _BETAS))
    params.setdefault("weight_decay", _default_decay(name, given))
    said: list[str] = []
    if kind == "Muon":
        # The rest is stepped as before, so that its betas are Adam's own.
        params = {"betas": list(_ADAM_BETAS), **params, "adjust_lr_fn": "match_rms_adamw"}
    else:
        said += _lengthen_average(params)
    said += _what_is_lost(name, given, params["weight_decay"])
    return {"type": kind, "params": params}, said


def as_written(
    config: Mapping[str, Any], written: Written, *, stages: int, micro_batches: int
) -> dict[str, Any]:
    """Return a configuration with the policy ``auto`` that goes on as a checkpoint was written.

    The user's settings of the section ``pipemare`` stay. A synchronous run had neither feedback nor
    a correction, so that the policy chooses both for its optimizer.

    Args:
        config: As before `advise`.
        written: Of the checkpoint, whose numbers replace those of the optimizer at the load.
        stages: Length of the pipeline.
        micro_batches: Micro-batches per optimizer step.
    """
    config = dict(config)
    if written.optimizer != "Adam":
        config["optimizer"], _ = _replaced(written.optimizer, config["optimizer"])
    given = WavemareConfig.of(config).pipeline.pipemare
    sizes = stages, micro_batches, given.slack
    if "error_feedback" not in given.model_fields_set:
        feeds_back = written.feeds_back
        if feeds_back is None:
            feeds_back = written.optimizer != "Adam" and largest_staleness(*sizes)[0] > 0
        config[SECTION] = _with(config[SECTION], {"error_feedback": feeds_back})
    correction = given.discrepancy_correction
    if written.correction is None:
        pipeline = WavemareConfig.of(config).pipeline
        config, _ = _choose_correction(config, pipeline, _name_of(config), sizes)
    elif correction.mode == "auto":
        mode = {"discrepancy_correction": {**_set(correction), "mode": written.correction}}
        config[SECTION] = _with(config[SECTION], mode)
    return config


def remedies(settings: PipeMareConfig) -> dict[str, Any]:
    """Return what a configuration does against stale gradients, for a resume that keeps it."""
    correction = settings.discrepancy_correction.mode
    return {"error_feedback": settings.error_feedback, "correction_mode": correction}


def tell_replaced(settings: WavemareConfig, written: Written) -> None:
    """Say with what a run goes on as its checkpoint was written."""
    own = settings.pipeline.pipemare
    chosen = (
        f"error_feedback is {_on(own.error_feedback)}, "
        f"discrepancy_correction is {own.discrepancy_correction.mode}"
    )
    reason = "it is the checkpoint's optimizer, which a resume keeps"
    if written.correction is None:
        reason += ", of a synchronous run"
    tell_choice(POLICY, written.optimizer, f"{reason}; {chosen}")


def tell_changed(settings: PipeMareConfig, saved: Mapping[str, Any]) -> None:
    """Say what a run does otherwise than the one that saved its checkpoint.

    Args:
        settings: Of the run.
        saved: As `remedies` gave it; older versions and synchronous runs have saved none.
    """
    own = remedies(settings)
    changed = [
        f"{key} was {_on(saved[name])}, and is {_on(own[name])}"
        for name, key in _REMEDIES.items()
        if name in saved and saved[name] != own[name]
    ]
    if changed:
        tell_warning(f"pipemare: since the checkpoint, {'; '.join(changed)}")


_REMEDIES = {"error_feedback": "error_feedback", "correction_mode": "discrepancy_correction"}


def _on(value: bool | str) -> str:
    return value if isinstance(value, str) else ("off", "on")[value]


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


def _set(section: Section) -> dict[str, Any]:
    """Return the settings that a section of the configuration gives."""
    return section.model_dump(exclude_unset=True)


def _with(section: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    pipeline = section["pipeline"]
    pipemare = {**pipeline.get("pipemare", {}), **settings}
    return {**section, "pipeline": {**pipeline, "pipemare": pipemare}}
