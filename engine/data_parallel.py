# SPDX-License-Identifier: Apache-2.0
"""The data-parallel engine: DeepSpeed's, with the pipeline engine's way of training a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.dataloader import RepeatingLoader

from wavemare.engine.base import EngineMixin
from wavemare.engine.config.resolve import SECTION
from wavemare.engine.experts import ExpertsMixin
from wavemare.engine.labels import count_labels
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.pipe.micro_batch import naming_ids, to_device
from wavemare.engine.waves.wavelet import attach_wavelet
from wavemare.errors import ConfigError, DataError, ModelError

_OF_PIPELINES = {"compute_loss": True, "reduce_output": "avg", "bcast_loss": True}


class Engine(ExpertsMixin, EngineMixin, deepspeed.DeepSpeedEngine):
    """``deepspeed.DeepSpeedEngine`` that also has ``train_batch`` and ``eval_batch``.

    ``forward``, ``backward`` and ``step`` are DeepSpeed's own. A loop written with
    ``train_batch`` runs unchanged on the pipeline engines. Parameters are `EngineMixin`'s.

    Attributes:
        loss_fn: From what calls the model, and a micro-batch on the device, to the loss in
            ``train_batch`` and ``eval_batch``; None for what the model returns.
    """

    loss_fn: Callable[[Callable[..., Any], Any], torch.Tensor] | None = None
    steps_in_backward = False
    """Whether accelerate steps in its ``backward``, and only there."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wavelet = attach_wavelet(self, self.settings.wavelet, self._loss_in_waves)

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train one optimizer step.

        Args:
            data_iter: If omitted, the ``training_data`` given to ``initialize``, again and again.
                Gives ``gradient_accumulation_steps`` micro-batches of this rank: a mapping
                (passed by name), a tuple (passed by position) or a tensor. The model returns the
                loss, an output or a mapping with ``loss``, or a tuple with the loss first.

        Returns:
            The mean loss over all micro-batches and data ranks, on every rank; scalar. With local
            steps that of this replica: the others' is ``replica_loss`` among `step_metrics`.
        """
        data_iter = data_iter if data_iter is not None else self._training_batches()
        self.leave_out(data_iter, self.join_replicas())
        self.train()
        with self.training_step():
            return self._train_step(PROGRESS.reading(data_iter))

    def _train_step(self, data_iter: Iterator[Any]) -> torch.Tensor:
        count = self.gradient_accumulation_steps()
        # Taken at once: data that ends within a step must not leave half of one behind.
        batches = [next(data_iter) for _ in range(count)]
        self.has_begun = True
        if self._wavelet is not None:
            PROGRESS.at("waves of micro-batches")
            return self._mean_loss(self._wavelet.train(batches))
        losses = []
        for left, batch in zip(reversed(range(count)), batches, strict=True):
            loss = self.before_backward(self._loss(batch, self))
            with PROGRESS.doing("backward"):
                super().backward(self.with_fp16_scale(loss))
            losses.append(loss.detach())
            self.end_micro_batch(last=not left)
        return self._mean_loss(losses)

    def end_micro_batch(self, *, last: bool) -> None:
        """Step, unless each ``step`` is a whole one and this micro-batch is not the last."""
        if last or self.managed_gradient_accumulation():
            self.step()
            self.tput_timer.start()  # DeepSpeed's loader has started it once for all

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's forward pass."""
        PROGRESS.begin_step(self.global_steps + 1)
        if self.module.training:
            self._before_forward(args, kwargs)
        with PROGRESS.doing("forward"), naming_ids(self.module):
            return super().forward(*args, **_without_cache(self.module, kwargs))

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's backward pass; ``wavemare.balance`` weights the loss by its share."""
        scaled = self.with_fp16_scale(self.before_backward(loss))
        with PROGRESS.doing("backward"):
            result = super().backward(scaled, *args, **kwargs)
        return result if self.fp16_scale == 1.0 else result / self.fp16_scale

    def _backward_prologue(self) -> None:
        has_loss = self._running_engine_backward or self._manual_backward_expected
        if not has_loss and self.steps_in_backward:
            reason = "the engine would not step: optimizer.step() leaves that to the backward pass"
            raise ConfigError("loss", "loss.backward()", reason, "Call accelerator.backward(loss)")
        if not has_loss and (self.settings.balance.is_active or self._replicas is not None):
            reason = "wavemare.balance and wavemare.local_steps need the loss"
            remedy = "Call engine.backward(loss) or engine.scale(loss).backward()"
            raise ConfigError("loss", "loss.backward()", reason, remedy)
        try:
            super()._backward_prologue()
        except RuntimeError as error:
            if has_loss or SECTION not in self.config:
                raise
            reason = "DeepSpeed with ZeRO 0 takes no gradients of what the engine returns by itself"
            remedy = "Call engine.backward(loss); for torch.autograd.grad call engine.module"
            raise ConfigError("loss", "loss.backward()", reason, remedy) from error

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Run DeepSpeed's optimizer step, if this micro-batch is the last of one."""
        with PROGRESS.doing("step"):
            super().step(*args, **kwargs)

    def before_backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss for its backward pass as `EngineMixin.before_backward`.

        Raises:
            ConfigError: ZeRO 1 or 2 holds the gradients of a whole step, which this pass would
                replace.
            ModelError: The optimizer of ZeRO 1 or 2 has none of the weights that are trained now.
        """
        groups = getattr(self.optimizer, "bit16_groups", ())
        if groups and not any(weight.requires_grad for group in groups for weight in group):
            reason = "the optimizer has none of the weights that are trained now"
            remedy = "Train some that it has; or give initialize a model that has the others, too"
            raise ModelError("requires_grad", "other weights", reason, remedy)
        if self._holds_a_whole_step():
            reason = "a step's gradients are reduced and wait for step(), and this would drop them"
            remedy = (
                "Before all passes of a step but the last call"
                " engine.set_gradient_accumulation_boundary(False), and before the last one (True)."
                " For several passes in one go use engine.coalesce_grad_reduction(), to drop the"
                " gradients engine.zero_grad()"
            )
            raise ConfigError(
                "zero_optimization.stage", self.zero_optimization_stage(), reason, remedy
            )
        return super().before_backward(loss)

    def _holds_a_whole_step(self) -> bool:
        """Whether ZeRO 1 or 2 holds a step that a pass would replace, and not add to.

        Passes add up without ZeRO, with ZeRO 3, and in a buffer of the partition's own, which
        DeepSpeed has where the gradients of ZeRO 2 are summed in another type.
        """
        return any(
            gradients is not None and getattr(gradients, "flat_partition", None) is None
            for gradients in self._held_gradients().values()
        )

    def _held_gradients(self) -> dict[int, Any]:
        """Return the reduced gradients of ZeRO 1 and 2, by group; None for those in use."""
        if self.zero_optimization_stage() not in (1, 2):
            return {}
        return getattr(self.optimizer, "averaged_gradients", {})

    def zero_grad(self) -> None:
        """Drop gradients as DeepSpeed's method of that name, and those of ZeRO 1 and 2."""
        super().zero_grad()
        for group in (held := self._held_gradients()):
            held[group] = None

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss for a ``backward()`` of its own, scaled and weighted."""
        return super().scale(self.with_fp16_scale(self.before_backward(loss)))

    def _before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for feature in self.features:
            feature.before_forward(args, kwargs)

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        *,
        return_logits: bool = False,
        num_micro_batches: int | None = None,
        **pipelines: Any,
    ) -> Any:
        """Evaluate micro-batches without changing the model.

        With local steps each replica evaluates its own weights: call `synchronize` first to measure
        the common ones.

        Args:
            data_iter: Gives the micro-batches, as for ``train_batch``.
            return_logits: Also return the logits of the last micro-batch on this rank.
            num_micro_batches: How many to take; ``gradient_accumulation_steps`` if omitted. It
                must be the same on all ranks.
            pipelines: Other parameters of DeepSpeed's pipelines, with their defaults.

        Returns:
            The mean loss over micro-batches and data ranks, or that and the logits.
        """
        for name, value in pipelines.items():
            if (name, value) not in _OF_PIPELINES.items():
                reason = "an engine without pipeline stages returns the mean loss on all ranks"
                raise ConfigError(f"eval_batch({name})", value, reason, "Leave it out")
        training = self.module.training
        self.eval()
        losses = []
        output: Any = None
        data_iter = PROGRESS.reading(data_iter)
        try:
            with torch.no_grad(), PROGRESS.doing("evaluation"):
                for _ in range(num_micro_batches or self.gradient_accumulation_steps()):
                    output = self._evaluated(next(data_iter))
                    checkpointing.reset()  # no backward pass will free the buffers
                    losses.append(_loss_of(output))
                mean = self.over_replicas(self._mean_loss(losses))
        finally:  # data may end too early
            self.train(training)
        return (mean, _logits_of(output)) if return_logits else mean

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step; all ranks must call it between two steps.

        Raises:
            ConfigError: It is no multiple of the replicas, or a step has begun.
        """
        before = self.gradient_accumulation_steps()
        counts = self.managed_gradient_accumulation() and not self._is_told_boundaries
        if counts and (done := self.micro_steps % before):
            reason = f"{done} of {before} micro-batches of a step have been trained"
            raise ConfigError("train_batch_size", train_batch_size, reason, "Call it after a step")
        super().set_train_batch_size(train_batch_size)
        # DeepSpeed ends a step where this is a multiple of the new number.
        self.micro_steps += -self.micro_steps % self.gradient_accumulation_steps()

    @property
    def _is_told_boundaries(self) -> bool:
        """Whether the caller says which micro-batch is the last of a step."""
        return self._is_gradient_accumulation_boundary is not None

    def _training_batches(self) -> Iterator[Any]:
        self.warn_of_own_data()
        if self._own_batches is None:
            if self.training_dataloader is None:
                reason = "there is no iterator, and initialize had no training_data"
                raise DataError("data_iter", None, reason, "Give one of the two")
            if isinstance(self.training_dataloader, Sized) and not len(self.training_dataloader):
                reason = "the training_data of initialize do not fill one micro-batch"
                raise DataError("training_data", 0, reason, "Give more data, or smaller sizes")
            self._own_batches = iter(RepeatingLoader(self.training_dataloader))
        return self._own_batches

    def _evaluated(self, batch: Any) -> Any:
        """Return what the model returns for a micro-batch, or the loss alone by `loss_fn`."""
        if self.loss_fn is not None:
            return self._loss(batch, self)
        args, kwargs = self._arguments(batch)
        return self(*args, **kwargs)

    def _arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = _as_arguments(to_device(batch, self.device))
        if self.mpu is not None and self.sequence_parallel_size > 1:
            kwargs = self._part_of_sequence(kwargs)
        return args, kwargs

    def _part_of_sequence(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch whose losses, averaged over ranks, are the mean over trained tokens."""
        labels = batch.get("shift_labels")
        if labels is None:
            reason = "ranks share a sequence, and the next token may be another rank's"
            remedy = "Wrap the loader in DeepSpeed's UlyssesSPDataLoaderAdapter"
            raise DataError("shift_labels", None, reason, remedy)
        labels = labels.contiguous()  # on a CPU the adapter gives slices, which losses view flat
        trained = count_labels(labels, shifts=False)
        dist.all_reduce(trained, group=self.seq_parallel_group)
        items = trained / self.sequence_parallel_size
        return {"labels": labels, "num_items_in_batch": items, **batch, "shift_labels": labels}

    def _loss_in_waves(self, batch: Any, call: Callable[..., Any]) -> torch.Tensor:
        def called(*args: Any, **kwargs: Any) -> Any:
            self._before_forward(args, kwargs)
            return call(*args, **_without_cache(self.module, kwargs))

        return self._loss(batch, called)

    def _loss(self, batch: Any, call: Callable[..., Any]) -> torch.Tensor:
        """Return a micro-batch's loss; what calls the model sees its arguments."""
        if self.loss_fn is not None:
            return self.loss_fn(call, to_device(batch, self.device))
        args, kwargs = self._arguments(batch)
        return _loss_of(call(*args, **kwargs))

    def _mean_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        mean = torch.stack(losses).float().sum() / len(losses)
        dist.all_reduce(mean, group=self.seq_data_parallel_group)
        return mean / self.seq_dp_world_size


def _without_cache(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a forward pass of training, or with labels, which makes no cache.

    Beside a cache transformers takes positions that begin anew for those of one text: packed rows
    would see each other.
    """
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    if caches and "position_ids" in kwargs and (model.training or "labels" in kwargs):
        return {"use_cache": False, **kwargs}
    return kwargs


def _loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    loss = _part(output, "loss", 0)
    if loss is None:
        raise DataError("labels", None, "the model returned no loss", "Give batches with labels")
    return loss


def _logits_of(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        reason = "the model returned the loss alone"
        raise DataError("return_logits", True, reason, "Let it return (loss, logits)")
    return _part(output, "logits", 1)


def _part(output: Any, name: str, place: int) -> Any:
    """Return a part of what a model returns: an output, a mapping or a tuple."""
    if hasattr(output, name):
        return getattr(output, name)
    return output.get(name) if isinstance(output, Mapping) else output[place]


def _as_arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}
