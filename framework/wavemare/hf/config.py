# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed file of ``TrainingArguments``, with ``"auto"`` values in our section too."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from wavemare.engine.config.resolve import SECTION, WavemareConfig, check_config, load_config
from wavemare.engine.config.shape import fill_auto
from wavemare.engine.observe.choices import tell_choice
from wavemare.errors import ConfigError
from wavemare.lazy import Proxy

_ANNEAL_PART = 4
"""``anneal_steps`` is this part of the run's steps."""

_STAGES, _SHAPES = "pipeline.stages", "pipeline.dynamic_shape"
_WARMUP = "pipeline.pipemare.warmup_steps"
_ANNEAL = "pipeline.pipemare.lr_rescheduling.anneal_steps"
_REASONS = {
    _STAGES: "all processes, divided by tensor_parallel.size",
    _SHAPES: "batches of the Trainer may differ in shape",
    _WARMUP: "the steps in which the learning rate of the arguments warms up",
    _ANNEAL: "a quarter of the run's steps",
}
"""Why an ``"auto"`` of our section has its value."""

_SCHEDULERS = {"cosine": "WarmupCosineLR", "constant_with_warmup": "WarmupLR"}
"""DeepSpeed's schedulers by transformers' names; "linear" is the default."""

_AUTO = "auto"
_ADAMS = "adam", "adamw"
_BETAS, _EPSILON = (0.9, 0.999), 1e-8
_WARMS_UP = "warmup_min_lr", "warmup_max_lr", "warmup_num_steps"
_OF_SCHEDULERS = {
    "WarmupLR": _WARMS_UP,
    "WarmupDecayLR": (*_WARMS_UP, "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}
"""Parameters of DeepSpeed's schedulers that training arguments give."""

_BATCH_KEYS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}


class TrainerConfig(HfTrainerDeepSpeedConfig):
    """transformers' configuration, with our section and batches counted by data ranks.

    Args:
        config: What ``TrainingArguments.deepspeed`` holds: a path, a mapping, or base64.
        world_size: Number of processes.

    Attributes:
        section: The ``"wavemare"`` section with its ``"auto"`` values filled in; None without one.

    Raises:
        ConfigError: A key or value that cannot work.
    """

    def __init__(self, config: str | Mapping[str, Any], *, world_size: int) -> None:
        values = load_config(config, "deepspeed")
        self._given = values.pop(SECTION, None)
        self._world_size = world_size
        super().__init__(values)
        self._fill_section(warmup_steps=0, max_steps=1)
        check_config({**values, **self.with_section}, world_size=world_size)

    @property
    def ours(self) -> WavemareConfig:
        """Our section, parsed."""
        return WavemareConfig.of(self.with_section)

    @property
    def with_section(self) -> dict[str, Any]:
        """Our section by its key; empty without one."""
        return {} if self.section is None else {SECTION: self.section}

    def trainer_config_process(
        self, args: TrainingArguments, auto_find_batch_size: bool = False
    ) -> None:
        """Fill in the values that follow from the arguments.

        Raises:
            ConfigError: The file and the arguments differ.
        """
        for key, argument in _BATCH_KEYS.items():
            self.config.setdefault(key, getattr(args, argument))
        if self._given is not None:
            self._take_arguments(args)
        self._note_choices(args)
        counted: Any = _Counted(args, self._world_size // self.ours.model_ranks)
        super().trainer_config_process(counted, auto_find_batch_size)
        self._refuse_differences()

    def trainer_config_finalize(
        self, args: TrainingArguments, model: Any, num_training_steps: int
    ) -> None:
        """Fill in the values that follow from the model and the number of steps.

        Raises:
            ConfigError: The file and the arguments differ.
        """
        try:
            super().trainer_config_finalize(args, model, num_training_steps)
        except ValueError:
            self._refuse_differences()
            raise
        filled = self._fill_section(
            warmup_steps=int(args.get_warmup_steps(num_training_steps)),
            max_steps=num_training_steps,
        )
        for path, value in filled.items():
            tell_choice(f"{SECTION}.{path}", value, _REASONS[path])

    def _take_arguments(self, args: TrainingArguments) -> None:
        """Let arguments that the file does not mention be as they are without DeepSpeed.

        Otherwise DeepSpeed would train with defaults of its own.
        """
        self.config.setdefault("gradient_clipping", _AUTO)
        optimizer, scheduler = (self.config.get(name) for name in ("optimizer", "scheduler"))
        if isinstance(optimizer, dict) and "type" in optimizer:
            is_adam = str(optimizer["type"]).lower() in _ADAMS
            decays = is_adam or args.weight_decay != 0
            own = {"lr": True, "weight_decay": decays}
            if is_adam:  # whose defaults are those of the arguments
                own["betas"] = (args.adam_beta1, args.adam_beta2) != _BETAS
                own["eps"] = args.adam_epsilon != _EPSILON
            _fill(optimizer, [key for key, is_given in own.items() if is_given])
        if isinstance(scheduler, dict):
            _fill(scheduler, _OF_SCHEDULERS.get(str(scheduler.get("type")), ()))

    def _note_choices(self, args: TrainingArguments) -> None:
        """Note an optimizer or scheduler in the arguments that the JSON file would overrule."""
        found = (self.config.get("optimizer") or {}).get("type")
        chosen = str(getattr(args.optim, "value", args.optim))
        family = chosen.partition("_")[0]
        if found is not None and family != "adamw" and family not in str(found).lower():
            self.mismatches.append(f"- ds optimizer.type={found} vs hf optim={chosen}")
        found = (self.config.get("scheduler") or {}).get("type")
        chosen = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
        if found is not None and chosen != "linear" and found != _SCHEDULERS.get(chosen):
            self.mismatches.append(f"- ds scheduler.type={found} vs hf lr_scheduler_type={chosen}")

    def _refuse_differences(self) -> None:
        """Refuse what transformers has noted: "- ds KEY=VALUE vs hf ARGUMENT=VALUE"."""
        found = [line.removeprefix("- ds ").split(" vs hf ") for line in self.mismatches]
        if found:
            told = "; ".join(f"{key}, the argument {argument}" for key, argument in found)
            reason = f"the JSON file and the training arguments differ: {told}"
            remedy = 'Make them equal, or write "auto" in the JSON (a type: leave its section out)'
            keys = [key.partition("=")[0] for key, _ in found]
            raise ConfigError("deepspeed", keys, reason, remedy)

    def _fill_section(self, *, warmup_steps: int, max_steps: int) -> dict[str, Any]:
        """Replace the ``"auto"`` values of our section; return the new ones by their paths."""
        self.section = copy.deepcopy(self._given)
        if not isinstance(self.section, dict):
            return {}
        tensor = self.section.get("tensor_parallel")
        size = tensor.get("size", 1) if isinstance(tensor, Mapping) else 1
        if type(size) is not int or size < 1:
            size = 1  # the check of the configuration refuses it by name
        values = {
            _STAGES: max(self._world_size // size, 1),
            _SHAPES: True,
            _WARMUP: warmup_steps,
            _ANNEAL: max(max_steps // _ANNEAL_PART, 1),
        }
        return {path: values[path] for path in fill_auto(self.section, values)}


def _fill(section: dict[str, Any], keys: Iterable[str]) -> None:
    """Let parameters that a section does not mention be those of the arguments."""
    params = section.get("params")
    if params is None or isinstance(params, dict):
        section["params"] = {**dict.fromkeys(keys, _AUTO), **(params or {})}


class _Counted(Proxy):
    """Training arguments whose world size is the number of data ranks."""

    def __init__(self, args: TrainingArguments, data_ranks: int) -> None:
        super().__init__(args)
        self.world_size = data_ranks
