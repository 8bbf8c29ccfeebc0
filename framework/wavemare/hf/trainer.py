# SPDX-License-Identifier: Apache-2.0
"""``transformers.Trainer`` whose DeepSpeed engines are ours."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from deepspeed.accelerator import get_accelerator
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME

from wavemare.accelerate import Accelerator, check_joined
from wavemare.engine.config.resolve import SECTION
from wavemare.errors import ConfigError
from wavemare.failure import watch_failures
from wavemare.hf.config import TrainerConfig
from wavemare.hf.whole_steps import WholeSteps
from wavemare.models import save_pretrained
from wavemare.models.adapters import is_adapted
from wavemare.parallel.layout.annotations import PLAN, is_annotated

_ZERO_WEIGHTS = 3


class Trainer(WholeSteps):
    """``transformers.Trainer`` that builds its engine by `wavemare.initialize`.

    The constructor, arguments, callbacks and files are transformers'. ``TrainingArguments(
    deepspeed="ds.json")`` may hold a ``"wavemare"`` section; without ``deepspeed`` nothing differs
    from transformers.

    Raises:
        ConfigError: A key or value that cannot work, or one that differs from the arguments.
    """

    accelerator: Any
    deepspeed: Any

    def create_accelerator_and_postprocess(self) -> None:
        """Read the DeepSpeed file as ours, then create the accelerator as transformers does.

        Raises:
            ConfigError: A key or value cannot work, or not with a Trainer.
        """
        if self.args.deepspeed:
            watch_failures()
            check_joined(self.args.world_size)
        config = self._read_config() if self.args.deepspeed else None
        super().create_accelerator_and_postprocess()
        if not self.is_deepspeed_enabled:
            return
        # transformers has already shared this object, so its class changes in place.
        self.accelerator.__class__ = Accelerator
        self.accelerator.whole_steps = True
        # As it becomes when a model is prepared; accelerate would warn of the Trainer's own 1.
        self.accelerator.gradient_accumulation_steps = self.args.gradient_accumulation_steps
        values = self.accelerator.state.deepspeed_plugin.deepspeed_config
        if config is None and SECTION in values:
            reason = "accelerate's own configuration named the file, after data were distributed"
            remedy = "Give the file to TrainingArguments(deepspeed=...) and launch with torchrun"
            raise ConfigError(SECTION, values[SECTION], reason, remedy)
        self.accelerator.take_section(config.section if config is not None else None)

    def _read_config(self) -> TrainerConfig:
        args: Any = self.args
        config = TrainerConfig(args.deepspeed, world_size=args.world_size)
        self._check_support(config)
        config.trainer_config_process(args)
        args.hf_deepspeed_config = config
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=config)
        return config

    def _check_support(self, config: TrainerConfig) -> None:
        ours = config.ours
        if ours.parallel.given or is_annotated(self.model) or hasattr(self.model, PLAN):
            reason = "the Trainer distributes data before annotations become a layout"
            remedy = f"Give {SECTION}.pipeline and {SECTION}.tensor_parallel"
            raise ConfigError(f"{SECTION}.parallel", "...", reason, remedy)
        if ours.balance.shares is not None:
            reason = "the Trainer gives all data ranks equal numbers of samples"
            remedy = "Leave it out, or use wavemare.initialize with training_data"
            raise ConfigError(f"{SECTION}.balance.shares", ours.balance.shares, reason, remedy)
        device: Any = get_accelerator()
        enabled = self.args.fp16 or (config.config.get("fp16") or {}).get("enabled") is True
        if enabled and not device.is_fp16_supported():
            reason = f"this device ({device.device_name()}) does not train in fp16"
            raise ConfigError("fp16.enabled", True, reason, "Use bf16 (--bf16), or neither")

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_deepspeed_enabled:
            return super()._prepare_for_training(*args, **kwargs)
        self._check_optimizers()
        self._release_engine()
        if self.accelerator.weighs_losses:
            # Otherwise transformers and the engine would both divide by the number of tokens.
            self.model_accepts_loss_kwargs = False
        return super()._prepare_for_training(*args, **kwargs)

    def _check_optimizers(self) -> None:
        """Refuse optimizer objects, which transformers drops if DeepSpeed is used."""
        for name, value in (("optimizer", self.optimizer), ("scheduler", self.lr_scheduler)):
            if value is not None and self.deepspeed is None:
                reason = f"transformers drops a given {name} if it builds a DeepSpeed engine"
                remedy = f"Name the {name} in the JSON, or override create_{name}"
                raise ConfigError("optimizers", type(value).__name__, reason, remedy)

    def _release_engine(self) -> None:
        """Destroy the engine of an earlier call, but not with ZeRO 3, which owns the weights."""
        engine = self.deepspeed
        if engine is None or engine.zero_optimization_stage() == _ZERO_WEIGHTS:
            return
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()
        model: Any = self.model
        self.deepspeed, self.model_wrapped = None, model

    def _build(self, **arguments: Any) -> tuple[Any, Any, Any, Any]:
        config = getattr(self.args, "hf_deepspeed_config", None)
        if isinstance(config, TrainerConfig):  # some "auto" values needed the number of steps
            arguments["config"] |= config.with_section
        return super()._build(**arguments)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        items = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(items, torch.Tensor) and self.is_deepspeed_enabled:
            # transformers counts per process; our accelerator gathers per data rank.
            items = items * self.accelerator.model_ranks
        return items

    def get_tp_size(self) -> int:
        """Return how many processes get the same batches."""
        own = self.accelerator.model_ranks if self.is_deepspeed_enabled else 1
        return int(super().get_tp_size() * own)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does; before training, build an engine first."""
        if self.is_deepspeed_enabled and self.deepspeed is None:
            self._prepare_for_evaluation()
        return super().evaluation_loop(dataloader, *args, **kwargs)

    def _prepare_for_evaluation(self) -> None:
        """Build an engine to evaluate with; under ZeRO 3 transformers does it."""
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config
        if config.is_zero3():
            return
        before = copy.deepcopy(config.config)
        self._prepare_for_training(1, None, None)
        config.config.clear()  # a later training run has its own number of steps
        config.config.update(before)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a folder for ``from_pretrained``; all processes must call this."""
        ours = isinstance(self.model, PreTrainedModel) or is_adapted(self.model)
        if self.deepspeed is None or not ours:
            super().save_model(output_dir, _internal_call)
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        save_pretrained(self.deepspeed, folder, tokenizer=tokenizer)
        if self.args.should_save:
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
