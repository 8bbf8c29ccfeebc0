# SPDX-License-Identifier: Apache-2.0
"""``transformers.Trainer`` whose DeepSpeed engines are ours."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch import distributed as dist
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer import Trainer as StockTrainer
from transformers.trainer_pt_utils import find_batch_size

from wavemare.accelerate import (
    Accelerator,
    check_joined,
    joined_on_cpus,
    model_ranks_of,
    rows_that_count,
)
from wavemare.api import initialize
from wavemare.engine.checkpoint.random_state import begin_late, share_draws
from wavemare.engine.config.resolve import SECTION
from wavemare.engine.labels import counts_items
from wavemare.engine.launch.group import gather, leave_out_shared_memory
from wavemare.errors import ConfigError
from wavemare.failure import watch_failures
from wavemare.hf import trl
from wavemare.hf.config import TrainerConfig
from wavemare.hf.loop import EngineScheduler, LoopModel
from wavemare.hf.losses import StageLoss, TrainerLoss, refuse_hidden_outputs
from wavemare.hf.overrides import check_whole_steps, refuse_hidden_modes, refuse_overruled
from wavemare.hf.stages import filled, first_rows, from_last_stage, labels_of, of_last_stage
from wavemare.hf.steps import MicroBatch, StepFeed, Unused, fill_rows, without_labels
from wavemare.models import save_pretrained
from wavemare.models.adapters import is_adapted
from wavemare.models.whole import weight_sizes
from wavemare.parallel.layout.annotations import PLAN, is_annotated
from wavemare.parallel.tensor.output import loss_alone

leave_out_shared_memory()  # TrainingArguments may initialize torch.distributed

_ZERO_WEIGHTS = 3


class Trainer(StockTrainer):
    """``transformers.Trainer`` that builds its engine by `wavemare.initialize`.

    The constructor, arguments, callbacks and files are transformers'. ``TrainingArguments(
    deepspeed="ds.json")`` may hold a ``"wavemare"`` section; without ``deepspeed`` nothing differs
    from transformers.

    The loop stays transformers'. Pipelines and waves get all micro-batches of a step at once: the
    last micro-step of an optimizer step trains all of them and returns their mean loss; earlier
    micro-steps return 0.

    Raises:
        ConfigError: A key or value that cannot work, or one that differs from the arguments.
    """

    accelerator: Any
    deepspeed: Any
    _feed: StepFeed | None = None
    _preprocess: Callable[..., Any] | None = None
    _epoch = 0
    _max_steps = 1
    _loss: TrainerLoss
    _whole: tuple[Any, dict[str, int], int] = None, {}, 0
    """The model; before an engine divided it, sizes by name, and together without embeddings."""
    _rate: float | None = None
    """The learning rate of the last step, once it is known."""

    @property
    def trains_whole_steps(self) -> bool:
        """Whether the engine trains only by ``train_batch``."""
        return bool(self.is_deepspeed_enabled and self.accelerator.whole_step_key is not None)

    @property
    def _has_section(self) -> bool:
        """Whether the DeepSpeed file has ours; without it, figures are those of stock DeepSpeed."""
        return bool(self.is_deepspeed_enabled and self.accelerator.section is not None)

    @property
    def is_pipeline(self) -> bool:
        """Whether the engine is a pipeline."""
        return bool(self.is_deepspeed_enabled and self.accelerator.stages > 1)

    # --- building -------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Read the DeepSpeed file as ours, then create the accelerator as transformers does.

        Raises:
            ConfigError: A key or value cannot work, or not with a Trainer.
        """
        if self.args.deepspeed:
            watch_failures()
            check_joined(self.args.world_size)
        config = self._read_config() if self.args.deepspeed else None
        with joined_on_cpus({}) if self.args.deepspeed else nullcontext():
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
        if trl.class_of(self) is not None and config.ours.model_ranks > 1:
            # It builds stock engines of references, which would count each rank as a data rank.
            config.config.pop("train_batch_size", None)
        args.hf_deepspeed_config = config
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=config)
        return config

    def _check_support(self, config: TrainerConfig) -> None:
        ours = config.ours
        if ours.parallel.given or is_annotated(self.model) or hasattr(self.model, PLAN):
            reason = "the Trainer distributes data before annotations become a layout"
            remedy = f"Give {SECTION}.pipeline and {SECTION}.tensor_parallel"
            raise ConfigError(f"{SECTION}.parallel", "...", reason, remedy)
        trl.check(self, stages=ours.pipeline.stages, asynchronous=ours.pipeline.is_asynchronous)
        if ours.balance.shares is not None:
            reason = "the Trainer gives all data ranks equal numbers of samples"
            remedy = "Leave it out, or use wavemare.initialize with training_data"
            raise ConfigError(f"{SECTION}.balance.shares", ours.balance.shares, reason, remedy)
        device: Any = get_accelerator()
        enabled = self.args.fp16 or (config.config.get("fp16") or {}).get("enabled") is True
        if enabled and not device.is_fp16_supported():
            reason = f"this device ({device.device_name()}) does not train in fp16"
            raise ConfigError("fp16.enabled", True, reason, "Use bf16 (--bf16), or neither")

    def _build(self, **arguments: Any) -> tuple[Any, Any, Any, Any]:
        """Build the engine, which steps the Trainer's scheduler itself."""
        config = getattr(self.args, "hf_deepspeed_config", None)
        if isinstance(config, TrainerConfig):  # some "auto" values needed the number of steps
            arguments["config"] |= config.with_section
        if "lr_scheduler" not in arguments and "scheduler" not in arguments["config"]:
            arguments["lr_scheduler"] = self._scheduler_of
        return initialize(**arguments)

    def _scheduler_of(self, optimizer: Any) -> Any:
        """Return a new scheduler, of the script's own ``create_scheduler`` or transformers'."""
        other = copy.copy(self)
        vars(other).pop("create_scheduler", None)
        other.lr_scheduler, other.optimizer = None, optimizer
        made = other.create_scheduler(num_training_steps=self._max_steps, optimizer=optimizer)
        return other.lr_scheduler if made is None else made

    def _show_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return a new scheduler for an optimizer, or show the one that the engine steps."""
        if optimizer is not None:
            return self._scheduler_of(optimizer)
        if self.lr_scheduler is not None:
            return self.lr_scheduler
        if not self.trains_whole_steps:
            return type(self).create_scheduler(self, num_training_steps)
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        self.lr_scheduler = EngineScheduler(engine, self.optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        trl.check_reference(self)
        if self.is_deepspeed_enabled:
            refuse_overruled(self)
            self._release_engine()
            if self._whole[0] is not self.model:
                self._whole = self.model, *weight_sizes(self.model)
            if self.accelerator.weighs_losses:
                # Otherwise transformers and the engine would both divide by the number of tokens.
                self.model_accepts_loss_kwargs = False
        if self.trains_whole_steps:
            by_trl = self.is_pipeline and trl.is_known(self)  # its step calls ours alone
            own_step = type(self).training_step is not Trainer.training_step
            check_whole_steps(self, steps_itself=own_step and not by_trl)
            self._feed = None
            self.accelerator.build = self._build
        self._max_steps = max_steps
        if self._has_section:  # a script's own would make a second one beside the engine's
            vars(self)["create_scheduler"] = self._show_scheduler
        try:
            model, loader = super()._prepare_for_training(max_steps, *args, **kwargs)
        finally:
            vars(self).pop("create_scheduler", None)
        if self._has_section:
            refuse_hidden_modes(self)
        if not self.trains_whole_steps:
            return model, loader
        loss = self._loss = TrainerLoss(self, self.model)
        engine = self.deepspeed
        if self.is_pipeline:
            own = StageLoss(loss, engine)
            engine.module._modules.pop("loss_fn", None)
            engine.module.loss_fn = own
        else:
            engine.loss_fn = loss
        return LoopModel(engine), loader

    def _release_engine(self) -> None:
        """Destroy the engine of an earlier call.

        Raises:
            ConfigError: It is one of ZeRO 3, which has the weights.
        """
        engine = self.deepspeed
        if engine is None:
            return
        if engine.zero_optimization_stage() == _ZERO_WEIGHTS:
            reason = "the engine of an earlier train, evaluate or predict has the weights"
            remedy = "Save the model, and train it with a new Trainer"
            raise ConfigError("zero_optimization.stage", _ZERO_WEIGHTS, reason, remedy)
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        engine.destroy()
        model: Any = self.model
        self.deepspeed, self.model_wrapped = None, model

    # --- training -------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self._epoch = kwargs["epoch"]
        loader = kwargs["train_dataloader"]
        is_prepared = getattr(loader, "_is_accelerate_prepared", False)
        if self._reads_alike and isinstance(loader, DataLoader) and not is_prepared:
            share_draws(loader, self.accelerator.data_rank)  # as with prepared loaders
            begin_late(loader)
        return super()._run_epoch(*args, **kwargs)

    @property
    def _reads_alike(self) -> bool:
        """Whether a `StepFeed` reads, so that all ranks draw the same order."""
        return self.trains_whole_steps or model_ranks_of(self.accelerator) > 1

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of the next step, the same on all that share a model."""
        if not self._reads_alike:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._feed is None or self._feed.source is not epoch_iterator:
            self._feed = StepFeed(
                epoch_iterator,
                micro_batches=self.args.gradient_accumulation_steps,
                read=self._without_fillers,
                make=self._make_step if self.trains_whole_steps else list,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                epoch=self._epoch,
            )
        samples = self._feed.next_step()
        counted = None if self.trains_whole_steps else self._get_num_items_in_batch(samples, device)
        return samples, counted

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train a step at its last micro-batch and return its mean loss; return 0 before."""
        self._rate = self._rate_of_next_step()
        if not self.trains_whole_steps:
            return super().training_step(model, inputs, num_items_in_batch)
        self._set_mode(training=True)
        optimizer: Any = self.optimizer  # evaluation may have put its averages into the weights
        getattr(optimizer, "train", lambda: None)()
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        self._loss.recent.clear()
        loss = self.deepspeed.train_batch(self._feed).detach().to(self.args.device)
        if self.args.logging_nan_inf_filter and not loss.isfinite():
            return self._filtered(loss)
        return loss

    def _set_mode(self, *, training: bool) -> None:
        """Let the whole model, of which a stage trains layers, say whether it is trained now."""
        if self.is_pipeline:
            model: Any = self.model
            model.training = training

    def _filtered(self, loss: Tensor) -> Tensor:
        """Return what transformers adds to its sum of losses for a step that is not finite.

        In place of each loss of a micro-batch that is no number it adds the mean of the steps
        before. All ranks call this.
        """
        accelerator, losses = self.accelerator, self._loss.recent
        own = torch.stack(losses).float() if losses else loss.reshape(1)
        parts = accelerator.gather(own).reshape(-1, len(own)).T.flatten()  # in the order of data
        steps = 1 + self.state.global_step - self._globalstep_last_logged
        total = before = self._tr_loss
        for part in parts / self.args.gradient_accumulation_steps / accelerator.data_ranks:
            total = total + (part if part.isfinite() else total / steps)
        added: Tensor = total - before
        return from_last_stage(self.deepspeed, added) if self.is_pipeline else added

    def _rate_of_next_step(self) -> float | None:
        """Return the next step's learning rate; without our section None, so that logs are stock's.

        An engine that steps the scheduler has done so when transformers asks for the rate.
        """
        return super()._get_learning_rate() if self._has_section else None

    def _get_learning_rate(self) -> float:
        """Return the learning rate of the last step."""
        return super()._get_learning_rate() if self._rate is None else self._rate

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return transformers' loss of a batch; in pipelines the last stage calls this.

        transformers multiplies it by the number of data ranks, as it divides by the items of all.
        That is too much for what is no sum over items: the mean of models that ignore them, the
        auxiliary loss of routers. So an evaluation with our section divides by a data rank's share
        of the items instead, and training in stages multiplies no such mean.
        """
        items = num_items_in_batch
        multiplied = items is not None and self.args.average_tokens_across_devices
        ranks = self.accelerator.data_ranks if multiplied and self._has_section else 1
        if ranks > 1 and not torch.is_grad_enabled():
            items = items / ranks
        elif not self.is_pipeline or self._divides_by_items:
            ranks = 1
        loss, outputs = super().compute_loss(model, inputs, True, items)
        if ranks > 1:
            loss = loss / ranks
        return (loss, outputs) if return_outputs else loss

    def compute_loss_context_manager(self) -> Any:
        """Return transformers' context of a loss, in which TRL finds its reference."""
        contexts = super().compute_loss_context_manager()
        if self.is_pipeline:
            contexts.enter_context(trl.reading_reference(self))
        return contexts

    def _make_step(self, read: list[Any]) -> list[Any]:
        """Make the engine's micro-batches of a step from the batches that were read for it."""
        count = self.args.gradient_accumulation_steps
        items = self._get_num_items_in_batch(read, self.args.device)
        # The engine divides by its number of micro-batches, where transformers divides by that of
        # the batches, or by the items alone.
        scaled = getattr(self, "loss_is_scaled_for_ga", None)
        if scaled is None:
            counts = self.model_accepts_loss_kwargs and items is not None
            scaled = counts or self.compute_loss_func is not None
        weight = float(count) if scaled else count / len(read)
        weights = [weight] * len(read) + [0.0] * (count - len(read))
        if self.is_pipeline and trl.needs_reference(self):
            read = [self._with_reference(batch) for batch in read]
        step = [
            MicroBatch(read[number % len(read)], items, one) for number, one in enumerate(weights)
        ]
        return [self._for_stages(one) for one in step] if self.is_pipeline else step

    def _without_fillers(self, batch: Any) -> Any:
        """Let repetitions that fill up the last batches of an epoch not count, if labels do."""
        if model_ranks_of(self.accelerator) == 1 or not self._counts_items:
            return batch
        return without_labels(batch, self._rows_that_count(batch))

    def _masked(self, batch: Any) -> Any:
        """Give a batch a mask, where rows that fill it up must not count in an auxiliary loss."""
        module, ids = self.deepspeed.module, batch.get("input_ids")
        has_sums = module.sends_router_sums and "attention_mask" in module.inputs
        if has_sums and not {"attention_mask", "position_ids"} & batch.keys():
            return {**batch, "attention_mask": torch.ones_like(ids)}
        return batch

    def _for_stages(self, batch: MicroBatch, *, trains: bool = True) -> tuple[Any, Any]:
        """Return what the first stage of a pipeline gets, and the last one."""
        engine, travels = self.deepspeed, batch.inputs
        if self.has_own_loss:  # which may want more than the model does
            known = inspect.signature(type(_inner(self.model)).forward).parameters
            travels = {name: value for name, value in travels.items() if name in known}
        if trains and not engine.dynamic_shape:
            travels = fill_rows(self._masked(travels), self._train_batch_size)
        required = trains and not self.has_own_loss
        inputs, _ = engine.module.split_batch(travels, labels_required=required)
        return inputs, batch if engine.is_last_stage() else Unused(batch.inputs)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        items = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(items, torch.Tensor):
            # transformers counts per process; our accelerator gathers per data rank.
            items = items * model_ranks_of(self.accelerator)
        return items

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log figures as transformers does; of TRL's losses with those of the last stage."""
        if self.is_pipeline and self.deepspeed is not None and trl.is_known(self):
            logs.update(from_last_stage(self.deepspeed, logs))
        super().log(logs, start_time)

    def get_tp_size(self) -> int:
        """Return how many processes get the same batches."""
        return int(super().get_tp_size() * model_ranks_of(self.accelerator))

    def get_num_trainable_parameters(self) -> int:
        """Return how many parameters of the whole model are trained."""
        own: Any = self.model
        sizes = self._whole[1] if self._whole[0] is own else {}
        trained = ((n, p) for n, p in own.named_parameters() if p.requires_grad)
        return sum(sizes.get(name, parameter.numel()) for name, parameter in trained)

    def floating_point_ops(self, inputs: dict[str, Any]) -> Any:
        """Return transformers' estimate, of which each process that shares a model has a part."""
        own: Any = self.model
        name = getattr(own, "main_input_name", "input_ids")
        if self._whole[0] is not own or not hasattr(own, "num_parameters") or name not in inputs:
            return super().floating_point_ops(inputs)
        return 6 * inputs[name].numel() * self._whole[2] / model_ranks_of(self.accelerator)

    # --- evaluation -----------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does, with the same batches on all stages.

        Before training, an engine is built first.
        """
        if self.is_deepspeed_enabled and self.deepspeed is None:
            self._prepare_for_evaluation()
        if model_ranks_of(self.accelerator) == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        preprocess = self.preprocess_logits_for_metrics
        if self.is_pipeline:
            self.preprocess_logits_for_metrics = None  # the last stage calls it
            self._preprocess = preprocess
            self._set_mode(training=False)
            if trl.is_known(self):  # whose own step asks for the whole model
                vars(self)["prediction_step"] = partial(Trainer.prediction_step, self)
        try:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess
            vars(self).pop("prediction_step", None)

    def _prepare_for_evaluation(self) -> None:
        """Build an engine to evaluate with; under ZeRO 3 transformers does it."""
        config = self.accelerator.state.deepspeed_plugin.hf_ds_config
        if config.is_zero3():
            return
        before = copy.deepcopy(config.config)
        self._prepare_for_training(1, None, None)
        config.config.clear()  # a later training run has its own number of steps
        config.config.update(before)

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate a batch; the last stage sends its processed logits to the others."""
        if model_ranks_of(self.accelerator) == 1:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        rows, full = self._rows_that_count(inputs), inputs
        if 0 < rows:
            inputs = first_rows(inputs, rows)
        elif self._counts_items:
            inputs = without_labels(inputs, 0)
        predict = self._predict_in_stages if self.is_pipeline else super().prediction_step
        with loss_alone() if prediction_loss_only else nullcontext():
            loss, logits, labels = predict(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and self._counts_items:
            # Each data rank has the part of its own labels in the mean over all of them.
            loss = self.accelerator.reduce(loss if rows else torch.zeros_like(loss), "mean")
        count = find_batch_size(full) or 0
        own = rows or count
        return loss, filled(logits, own, count), filled(labels, own, count)

    def _predict_in_stages(
        self, model: Any, inputs: dict[str, Any], loss_only: bool, ignore_keys: Any
    ) -> Any:
        """Evaluate a batch in a pipeline; the last stage sends the results to the others."""
        refuse_hidden_outputs(_inner(self.model), ignore_keys, loss_only=loss_only)
        inputs = self._prepare_inputs(inputs)
        labels = labels_of(inputs, self.label_names)
        if trl.class_of(self) == "DPOTrainer":  # its batches have none, but its loop looks for some
            labels = inputs["input_ids"]
        predict: Any = super().prediction_step
        if trl.is_known(self):
            predict = partial(type(self).prediction_step, self)
            if trl.needs_reference(self):
                inputs = self._with_reference(inputs)

        def on_the_last_stage(stage_model: Any, given: dict[str, Any]) -> Any:
            loss, logits, labels = predict(stage_model, given, loss_only, ignore_keys)
            if logits is not None and self._preprocess is not None:
                logits = self._preprocess(logits, labels)
            return loss, logits

        loss, logits = self._from_stages(inputs, on_the_last_stage)
        return loss, logits, None if loss_only else labels

    def _with_reference(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return a batch with the log-probabilities of the model without its adapter, for DPO."""
        inputs = self._prepare_inputs(inputs)
        with self.deepspeed.module.disable_adapter():
            _, found = self._from_stages(inputs, partial(trl.reference_of, self))
        return trl.with_reference(inputs, found)

    def _from_stages(self, inputs: dict[str, Any], predict: Callable[..., Any]) -> Any:
        """Let a batch go forward through all stages; return what is made of it on the last one.

        Args:
            inputs: The batch, prepared.
            predict: Of what stands for the model on the last stage, and the batch.
        """
        own = self.deepspeed.module.loss_fn
        own.predict = predict
        try:
            batch = self._for_stages(MicroBatch(inputs, None, 1.0), trains=False)
            self.deepspeed.eval_batch(iter([batch]), bcast_loss=False, num_micro_batches=1)
            return of_last_stage(self.deepspeed, own.predicted)
        finally:
            own.predict = own.predicted = None

    @property
    def _counts_items(self) -> bool:
        """Whether a rank's loss is the part of its own labels in the mean over all data ranks'."""
        return self._divides_by_items and not self.has_own_loss

    @property
    def _divides_by_items(self) -> bool:
        """Whether transformers' loss of a batch is divided by the items of all data ranks."""
        own = self.label_smoother is not None or self.compute_loss_func is not None
        inner = _inner(self.model)
        return bool(own or (self.model_accepts_loss_kwargs and counts_items(inner)))

    @property
    def has_own_loss(self) -> bool:
        """Whether the script has a ``compute_loss`` of its own."""
        return type(self).compute_loss is not Trainer.compute_loss

    def _rows_that_count(self, inputs: Any) -> int:
        """Return how many rows of a batch are no repetitions that fill up the last ones."""
        if trl.class_of(self) == "DPOTrainer":  # whose pairs are two rows each
            return int(find_batch_size(inputs) or 0)
        return rows_that_count(
            self.accelerator.gradient_state.active_dataloader,
            int(find_batch_size(inputs) or 0),
            data_rank=self.accelerator.data_rank,
            data_ranks=self.accelerator.data_ranks,
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a folder for ``from_pretrained``; all processes must call this."""
        ours = isinstance(self.model, PreTrainedModel) or is_adapted(self.model)
        if not self.is_deepspeed_enabled or not ours:
            super().save_model(output_dir, _internal_call)
            return
        folder = str(output_dir if output_dir is not None else self.args.output_dir)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        save_pretrained(self.deepspeed or self.model, folder, tokenizer=tokenizer)
        if self.args.should_save:
            torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Make the repository as transformers does; where rank 0 cannot, all ranks raise."""
        failure: Exception | None = None
        try:
            super().init_hf_repo(token, private)
        except Exception as error:  # the others would wait for rank 0 when the model is gathered
            failure = error
        told = str(failure) if failure is not None else None
        if self.is_deepspeed_enabled and dist.is_initialized():
            told, self.hub_model_id = gather((told, getattr(self, "hub_model_id", None)))[0]
        if failure is not None:
            raise failure
        if told is not None:
            reason = f"rank 0 cannot make the repository ({told})"
            remedy = "Save with save_model, and upload the folder"
            raise ConfigError("hub_model_id", self.args.hub_model_id, reason, remedy)


def _inner(model: Any) -> Any:
    """Return the model inside adapters."""
    return model.get_base_model() if is_adapted(model) else model
