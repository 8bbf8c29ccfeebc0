# SPDX-License-Identifier: Apache-2.0
"""TRL's SFTTrainer and DPOTrainer in pipelines: what their losses need of the last stage.

They ask the model for the log-probabilities of labels, in place of logits, by the argument
``fused_lm_head``. DPO also asks for those of the model without its adapter. TRL is not imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from wavemare.engine.labels import IGNORED
from wavemare.errors import ConfigError
from wavemare.models.adapters import is_adapted

_STAGES = "wavemare.pipeline.stages"
_IN_STAGES = "SFTTrainer", "DPOTrainer"
_OTHERWISE = "Leave the stages out: use wavemare.tensor_parallel or ZeRO"


def class_of(trainer: Any) -> str | None:
    """Return the name of the trainer of TRL that a Trainer is; None if it is none."""
    kinds = (k.__name__ for k in type(trainer).__mro__ if k.__module__.startswith("trl."))
    return next((name for name in kinds if not name.startswith("_")), None)


def is_known(trainer: Any) -> bool:
    """Whether a Trainer is one of TRL's that train in pipelines."""
    return class_of(trainer) in _IN_STAGES


def check(trainer: Any, *, stages: int, asynchronous: bool) -> None:
    """Refuse what a trainer of TRL cannot do in a pipeline; a Trainer that is none passes.

    Args:
        trainer: Under construction: it has its model and arguments.
        stages: Of the pipeline.
        asynchronous: Whether its stages step by themselves.

    Raises:
        ConfigError: Naming what cannot work.
    """
    name = class_of(trainer)
    if name is None or stages == 1:
        return
    args, model = trainer.args, trainer.model
    adapted, is_dpo = is_adapted(model), name == "DPOTrainer"
    routers = getattr(getattr(model, "config", None), "output_router_logits", None) is not None
    weighted = getattr(args, "router_aux_loss_coef", None) != 0.0
    computed = is_dpo and adapted and not args.precompute_ref_log_probs
    for refused, key, value, reason, remedy in (
        (
            name not in _IN_STAGES,
            _STAGES,
            stages,
            f"{name} makes other passes of the model than one for each micro-batch",
            _OTHERWISE,
        ),
        (
            getattr(args, "activation_offloading", False),
            "activation_offloading",
            True,
            "TRL moves activations of one forward pass, and a stage has several",
            "Leave it out, or set gradient_checkpointing",
        ),
        (
            routers and weighted,
            "router_aux_loss_coef",
            getattr(args, "router_aux_loss_coef", None),
            "the outputs of routers are not on the last stage, where the loss is computed",
            "Set it to 0.0, or use wavemare.hf.Trainer, whose auxiliary loss goes through stages",
        ),
        (
            is_dpo and adapted and len(model.peft_config) > 1,
            "model",
            "PeftModel",
            "TRL keeps a copy of the adapter as the reference, and stages train one adapter alone",
            "Give the base model, and the adapter's configuration as peft_config",
        ),
        (
            computed and asynchronous,
            "wavemare.pipeline.schedule",
            "pipemare",
            "the reference's passes need a pipeline that is empty before each step",
            'Set precompute_ref_log_probs, or the schedule "1f1b"',
        ),
        (
            is_dpo and getattr(args, "sync_ref_model", False),
            "sync_ref_model",
            True,
            "each rank has the trained weights of its own stage alone",
            "Leave it out",
        ),
    ):
        if refused:
            raise ConfigError(key, value, reason, remedy)


def check_reference(trainer: Any) -> None:
    """Refuse a reference model of another size than the model that TRL's DPOTrainer trains.

    Raises:
        ConfigError: It is one.
    """
    from wavemare.training.preferences import unlike_size

    reference = getattr(trainer, "ref_model", None)
    if reference is None or class_of(trainer) != "DPOTrainer":
        return
    reference = getattr(reference, "module", reference)  # in an engine
    found = unlike_size(reference.config, trainer.model.config)
    if found is not None:
        reason = f"its {found[0]} is {found[1]}, and that of the model {found[2]}"
        remedy = "Give a copy of the model, or leave it out"
        raise ConfigError("ref_model", type(reference).__name__, reason, remedy)


def needs_reference(trainer: Any) -> bool:
    """Whether a trainer's loss asks for the log-probabilities of its model without the adapter."""
    return (
        class_of(trainer) == "DPOTrainer"
        and is_adapted(trainer.model)
        and trainer.ref_model is None
        and not trainer.args.precompute_ref_log_probs
    )


def reference_of(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
    """Return what stands for a loss, and the log-probabilities of chosen and rejected rows.

    Args:
        trainer: TRL's DPOTrainer.
        model: Stands for the model, whose passes were made without the adapter.
        inputs: A batch.
    """
    return torch.zeros((), device=model.device), trainer.compute_ref_log_probs(model, inputs)


def with_reference(inputs: dict[str, Any], found: Any) -> dict[str, Any]:
    """Return a batch with what `reference_of` has found for it; see `reading_reference`."""
    chosen, rejected = found
    return {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


@contextmanager
def reading_reference(trainer: Any) -> Iterator[None]:
    """Let TRL's loss inside read what `with_reference` has put into the batch."""
    reads = needs_reference(trainer)
    if reads:
        trainer.precompute_ref_logps = True
    try:
        yield
    finally:
        if reads:
            trainer.precompute_ref_logps = False


def fused_output(logits: Tensor, labels: Tensor, items: Any, *, shifted: bool) -> Any:
    """Return what TRL's forward pass with ``fused_lm_head`` gives, of logits that are there.

    Args:
        logits: (batch, sequence, vocabulary).
        labels: (batch, sequence).
        items: What divides the loss; the number of labels if None.
        shifted: Whether labels are in the places of the logits that predict them.

    Returns:
        An object with, for each predicted label (batch, labels), its ``log_probs``, the ``entropy``
        and ``log_sum_sq_probs`` of the distribution, ``mean_logits``, ``is_top1``, all zero where
        ``label_mask`` is false, and the mean ``loss``.
    """
    if not shifted:
        logits, labels = logits[:, :-1], labels[:, 1:]
    mask = labels != IGNORED
    wide = logits.float()
    log_probs = wide.log_softmax(-1)
    own = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    with torch.no_grad():
        squares = (2 * log_probs).logsumexp(-1)
        means, best = wide.mean(-1), wide.argmax(-1) == labels
    own, entropy, squares, means = (x.masked_fill(~mask, 0) for x in (own, entropy, squares, means))
    return SimpleNamespace(
        loss=-own.sum() / (mask.sum().clamp(min=1) if items is None else items),
        log_probs=own,
        entropy=entropy,
        log_sum_sq_probs=squares,
        mean_logits=means,
        is_top1=best & mask,
        label_mask=mask,
        aux_loss=None,
    )
