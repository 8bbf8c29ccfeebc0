# SPDX-License-Identifier: Apache-2.0
"""What a script gives to its Trainer, or overrides, and an engine would overrule without a word."""

from __future__ import annotations

from typing import Any

from wavemare.errors import ConfigError

_LIBRARIES = "transformers", "wavemare", "trl"
_PER_MICRO_BATCH = "_prepare_inputs", "_prepare_input", "get_batch_samples"
"""Methods that transformers' step of a micro-batch calls, beside ``training_step``."""
_REMEDY = "Leave that out, or train data-parallel without waves"


def is_overridden(trainer: Any, name: str) -> bool:
    """Whether a script's own class defines a method of the Trainer."""
    owner = next(kind for kind in type(trainer).__mro__ if name in vars(kind))
    return owner.__module__.partition(".")[0] not in _LIBRARIES


def refuse_overruled(trainer: Any) -> None:
    """Refuse optimizers and schedulers of a script that transformers drops, or the file overrules.

    Raises:
        ConfigError: Naming them.
    """
    for name, value in (("optimizer", trainer.optimizer), ("scheduler", trainer.lr_scheduler)):
        if value is not None and trainer.deepspeed is None:
            reason = f"transformers drops a given {name} if it builds a DeepSpeed engine"
            remedy = f"Name the {name} in the JSON, or override create_{name}"
            raise ConfigError("optimizers", type(value).__name__, reason, remedy)
    file = trainer.accelerator.state.deepspeed_plugin.hf_ds_config.config
    given = [
        (name, f"create_{name}", type(trainer).__name__)
        for name in ("optimizer", "scheduler")
        if is_overridden(trainer, f"create_{name}")
    ]
    chosen = trainer.optimizer_cls_and_kwargs
    if chosen is not None:
        given.append(("optimizer", "optimizer_cls_and_kwargs", chosen[0].__name__))
    for name, key, value in given:
        if file.get(name) is not None:
            reason = f"the JSON names the {name}, which would overrule it"
            raise ConfigError(key, value, reason, f'Leave "{name}" out of the JSON')


def refuse_hidden_modes(trainer: Any) -> None:
    """Refuse an optimizer that puts averages into the weights to evaluate, if it has flat copies.

    Raises:
        ConfigError: The weights would not change, or a step would begin from the averages.
    """
    engine = trainer.deepspeed
    basic, wrapper = getattr(engine, "basic_optimizer", None), getattr(engine, "optimizer", None)
    has_modes = callable(getattr(basic, "eval", None)) and callable(getattr(basic, "train", None))
    if has_modes and wrapper is not basic:
        reason = f"{type(wrapper).__name__} hides its weights for evaluation from the model"
        remedy = 'Use "zero_optimization": {"stage": 0} in fp32'
        raise ConfigError("optim", type(basic).__name__, reason, remedy)


def check_whole_steps(trainer: Any, *, steps_itself: bool) -> None:
    """Refuse options that act between the micro-batches of a step.

    Args:
        trainer: Whose engine trains whole steps.
        steps_itself: Whether its ``training_step`` is one that is not called.

    Raises:
        ConfigError: Naming the key that makes the engine train so.
    """
    args, accelerator, reason = trainer.args, trainer.accelerator, ""
    names = ["training_step"] if steps_itself else []
    names += [name for name in _PER_MICRO_BATCH if is_overridden(trainer, name)]
    if names:
        reason = f"{type(trainer).__name__}.{names[0]} would not be called"
    own = trainer.label_smoother or trainer.compute_loss_func or trainer.has_own_loss
    if own and accelerator.weighs_losses:
        reason = "label smoothing and losses of one's own do not go with wavemare.balance"
    if args.auto_find_batch_size:
        reason = "auto_find_batch_size cannot interrupt processes that wait for each other"
    if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
        reason = "the engine steps the scheduler, without a metric"
    if reason:
        key, given = f"wavemare.{accelerator.whole_step_key}", accelerator.section
        raise ConfigError(key, given, f"the engine trains whole steps: {reason}", _REMEDY)
