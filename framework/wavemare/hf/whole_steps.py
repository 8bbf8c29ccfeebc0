# SPDX-License-Identifier: Apache-2.0
"""The Trainer with engines that train whole optimizer steps: pipelines and waves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate.utils import DeepSpeedSchedulerWrapper
from torch import Tensor
from torch import distributed as dist
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer import Trainer as StockTrainer

from wavemare.api import initialize
from wavemare.errors import ConfigError
from wavemare.hf.steps import (
    SeededLoader,
    StepFeed,
    StepLoss,
    fill_rows,
    weighted_labels,
    whole_logits,
)

_REMEDY = "Leave that out, or train data-parallel without waves"


class WholeSteps(StockTrainer):
    """``transformers.Trainer`` that gives an engine all micro-batches of a step at once.

    The loop stays transformers'. The last micro-step of an optimizer step trains all of them and
    returns their mean loss; earlier micro-steps return 0.
    """

    accelerator: Any
    deepspeed: Any
    _feed: StepFeed | None = None
    _epoch = 0
    _max_steps = 1

    @property
    def trains_whole_steps(self) -> bool:
        """Whether the engine trains only by ``train_batch``."""
        return bool(self.is_deepspeed_enabled and self.accelerator.whole_step_key is not None)

    @property
    def is_pipeline(self) -> bool:
        """Whether the engine is a pipeline."""
        return bool(self.is_deepspeed_enabled and self.accelerator.stages > 1)

    # --- building -------------------------------------------------------------------------------

    def _build(self, **arguments: Any) -> tuple[Any, Any, Any, Any]:
        """Build the engine, which steps the Trainer's scheduler itself."""
        if "lr_scheduler" not in arguments and "scheduler" not in arguments["config"]:
            arguments["lr_scheduler"] = self._scheduler_of
        return initialize(**arguments)

    def _scheduler_of(self, optimizer: Any) -> Any:
        other = copy.copy(self)
        other.lr_scheduler = None
        return StockTrainer.create_scheduler(other, self._max_steps, optimizer)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Return transformers' scheduler, or the one that the engine steps."""
        if not self.trains_whole_steps or optimizer is not None or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        self.lr_scheduler = DeepSpeedSchedulerWrapper(engine.lr_scheduler, self.optimizer)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def _prepare_for_training(self, max_steps: int, *args: Any, **kwargs: Any) -> Any:
        if not self.trains_whole_steps:
            return super()._prepare_for_training(max_steps, *args, **kwargs)
        self._check_whole_steps()
        self.model_accepts_loss_kwargs = False  # evaluation, too, takes the plain mean
        self._max_steps, self._feed = max_steps, None
        self.accelerator.build = self._build
        _, loader = super()._prepare_for_training(max_steps, *args, **kwargs)
        engine = self.deepspeed
        if self._weighs_labels:
            loss = engine.module.loss_fn
            engine.module._modules.pop("loss_fn", None)
            engine.module.loss_fn = StepLoss(
                loss,
                smoother=self.label_smoother,
                shifts=self._shifts,
                function=self.compute_loss_func,
            )
        return _LoopModel(engine), loader

    def _check_whole_steps(self) -> None:
        """Refuse options that act between the micro-batches of a step."""
        key = f"wavemare.{self.accelerator.whole_step_key}"
        args, given = self.args, self.accelerator.section
        reason = ""
        for name in ("compute_loss", "training_step"):
            if getattr(type(self), name) is not getattr(WholeSteps, name):
                reason = f"{type(self).__name__}.{name} would not be called"
        if (self.label_smoother or self.compute_loss_func) and not self._weighs_labels:
            reason = "label smoothing and compute_loss_func need the engine's loss function"
        if args.auto_find_batch_size:
            reason = "auto_find_batch_size cannot interrupt processes that wait for each other"
        if args.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
            reason = "the engine steps the scheduler, without a metric"
        if reason:
            raise ConfigError(key, given, f"the engine trains whole steps: {reason}", _REMEDY)

    @property
    def _weighs_labels(self) -> bool:
        """Whether a step's loss is the mean over its labels, and not over its micro-batches."""
        return self.is_pipeline and not self.accelerator.own_loss

    @property
    def _shifts(self) -> bool:
        """Whether the model shifts its labels."""
        return type(self.model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()

    # --- training -------------------------------------------------------------------------------

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        self._epoch = kwargs["epoch"]
        return super()._run_epoch(*args, **kwargs)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of the next step, the same on all that share a model."""
        if not self.is_deepspeed_enabled or not self._reads_alike:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._feed is None or self._feed.source is not epoch_iterator:
            self._feed = StepFeed(
                epoch_iterator,
                micro_batches=self.args.gradient_accumulation_steps,
                make=self._make_step if self.trains_whole_steps else list,
                seed=self.args.seed if self.args.data_seed is None else self.args.data_seed,
                epoch=self._epoch,
                data_rank=self.accelerator.data_rank,
            )
        samples = self._feed.next_step()
        counted = None if self.trains_whole_steps else self._get_num_items_in_batch(samples, device)
        return samples, counted

    @property
    def _reads_alike(self) -> bool:
        return self.trains_whole_steps or bool(self.accelerator.model_ranks > 1)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Train a step at its last micro-batch and return its mean loss; return 0 before."""
        if not self.trains_whole_steps:
            return super().training_step(model, inputs, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        mean: Tensor = self.deepspeed.train_batch(self._feed)
        return mean.detach().to(self.args.device)

    def _make_step(self, read: list[Any]) -> list[Any]:
        """Make the engine's micro-batches of a step, all of the same size."""
        count = self.args.gradient_accumulation_steps
        full = [fill_rows(batch, self._train_batch_size) for batch in read]
        repeated = [full[n % len(full)] for n in range(count)]
        if not self.is_pipeline:
            return repeated
        engine = self.deepspeed
        if not (self._weighs_labels and engine.is_last_stage()):
            return [engine.module.split_batch(batch) for batch in repeated]
        together = self.args.average_tokens_across_devices and self.accelerator.data_ranks > 1
        labels = weighted_labels(
            full,
            count,
            shifts=self._shifts,
            group=engine.data_parallel_group if together else None,
        )
        inputs = [engine.module.split_batch(batch)[0] for batch in repeated]
        return list(zip(inputs, labels, strict=True))

    # --- evaluation -----------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as transformers does, with the same batches on all stages."""
        if not self.is_deepspeed_enabled or self.accelerator.model_ranks == 1:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        loader: Any = SeededLoader(dataloader, self.args.seed + self.accelerator.data_rank)
        preprocess = self.preprocess_logits_for_metrics
        if self.is_pipeline:
            self.preprocess_logits_for_metrics = None  # the last stage calls it
            self._preprocess = preprocess
        try:
            return super().evaluation_loop(loader, *args, **kwargs)
        finally:
            self.preprocess_logits_for_metrics = preprocess

    _preprocess: Callable[..., Any] | None = None

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Evaluate a batch; the last stage sends its processed logits to the others."""
        if not self.is_pipeline:
            return self._predict(model, inputs, prediction_loss_only, ignore_keys)
        inputs = self._prepare_inputs(inputs)
        engine, labels = self.deepspeed, inputs.get("labels")
        micro_batch = engine.module.split_batch(inputs, labels_required=False)
        if labels is not None and self._weighs_labels:
            micro_batch = micro_batch[0], weighted_labels([inputs], 1, shifts=self._shifts)[0]
        if labels is None:
            engine.total_loss = None  # DeepSpeed would add outputs to the sum of losses
        output, logits = engine.eval_batch(
            iter([micro_batch]),
            return_logits=True,
            compute_loss=labels is not None,
            reduce_output="avg" if labels is not None else None,
            num_micro_batches=1,
        )
        loss = output.detach().reshape(()) if labels is not None else None
        if labels is None:
            engine.total_loss = None
        if prediction_loss_only:
            return loss, None, None
        if engine.is_last_stage():
            logits = whole_logits(engine.module.loss_fn, logits)
            if self._preprocess is not None:
                logits = self._preprocess(logits, labels)
        return loss, self._from_last_stage(logits), labels

    def _predict(self, model: Any, inputs: Any, loss_only: bool, ignore_keys: Any) -> Any:
        """Evaluate a batch; a split model needs one pass for the loss and one for the logits."""
        loss, logits, labels = super().prediction_step(model, inputs, loss_only, ignore_keys)
        if loss is not None and not loss_only and isinstance(logits, tuple) and not logits:
            unlabelled = {k: v for k, v in inputs.items() if k not in self.label_names}
            _, logits, _ = super().prediction_step(model, unlabelled, loss_only, ignore_keys)
        return loss, logits, labels

    def _from_last_stage(self, values: Any) -> Any:
        """Broadcast a tensor, or a tuple of tensors, from the last stage to all stages."""
        grid = self.deepspeed.grid
        group = grid.get_pipe_parallel_group()
        source = self.deepspeed.loss_rank
        own = values if self.deepspeed.is_last_stage() else None
        tensors = [own] if isinstance(own, Tensor) else list(own or ())
        form: list[Any] = [(isinstance(own, Tensor), [(t.shape, t.dtype) for t in tensors])]
        dist.broadcast_object_list(form, src=source, group=group)
        single, shapes = form[0]
        if own is None:
            device = self.args.device
            tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        tensors = [tensor.detach().contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, src=source, group=group)
        return tensors[0] if single else tuple(tensors)


class _LoopModel:
    """An engine in the Trainer's loop, which must not clear the gradients of pending passes."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients when it steps."""
