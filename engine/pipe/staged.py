# SPDX-License-Identifier: Apache-2.0
"""What all pipeline engines add to DeepSpeed's, and the one whose schedule stays DeepSpeed's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.config import get_optimizer_name, get_optimizer_params
from torch import Tensor

from wavemare.engine.base import EngineMixin
from wavemare.engine.config.resolve import WavemareConfig
from wavemare.engine.experts import expert_group
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.optim.optimizers import take_optimizer, without_compiled_optimizer
from wavemare.engine.optim.policy import Written, as_written, remedies, tell_replaced
from wavemare.engine.pipe.micro_batch import Batch, to_device
from wavemare.engine.same_batches import NONE, UNKNOWN, Marks, is_due
from wavemare.engine.seams import fail_group
from wavemare.errors import CommError, ConfigError, DataError


class StagedEngine(EngineMixin, deepspeed.PipelineEngine):
    """What pipeline engines share: batches of transformers, and whole steps alone.

    Args:
        args: DeepSpeed's.
        given: The configuration, if the policy ``auto`` chooses its optimizer; else None.
        kwargs: DeepSpeed's, and our own.
    """

    _groups: list[Any] | None = None
    """What the optimizer is made of, if a load may replace it."""
    marks_each = False
    """Whether every activation carries the marks of its batch, or only the first of a step."""
    _has_groups = True
    """Whether the groups of ranks that share a stage are open."""
    _is_built = False
    """Whether DeepSpeed's constructor has run."""
    _folder: str | None = None
    """Of the layers' files, while they are written or read."""

    def __init__(self, *args: Any, given: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._given = given
        super().__init__(*args, **kwargs)
        self._is_built = True

    def train_batch_size(self) -> int:
        """Samples of an optimizer step of all replicas."""
        size = super().train_batch_size()
        # DeepSpeed's constructor compares it with its grid, which is that of one replica.
        return size if self._is_built else size // self.num_replicas

    @property
    def _curr_ckpt_path(self) -> str | None:
        """Where DeepSpeed's save or load has the layers' files: those of this replica."""
        return self._folder

    @_curr_ckpt_path.setter
    def _curr_ckpt_path(self, folder: str | None) -> None:
        self._folder = None if folder is None else self.of_replica(folder)

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if self._given is not None:  # copies: optimizers and ZeRO change the groups
            self._groups = [_copied(each) for each in model_parameters]
            model_parameters = [_copied(each) for each in self._groups]
        super()._configure_optimizer(client_optimizer, model_parameters)

    @property
    def can_replace_optimizer(self) -> bool:
        """Whether a load may go on with another optimizer than the policy's."""
        scheduler = self.client_lr_scheduler
        follows = scheduler is None or callable(scheduler)  # else it belongs to this optimizer
        alone = self.sparse is None and self.num_replicas == 1
        return self._groups is not None and follows and alone

    def goes_on_as(self, written: Written) -> bool:
        """Whether a run with the checkpoint's optimizer corrects staleness as a resume must."""
        wanted = WavemareConfig.of(self._as_written(written)).pipeline.pipemare
        return remedies(wanted) == remedies(self.settings.pipeline.pipemare)

    def _as_written(self, written: Written) -> dict[str, Any]:
        assert self._given is not None
        sizes = {"stages": self.num_stages, "micro_batches": self.micro_batches}
        return as_written(self._given, written, **sizes)

    def replace_optimizer(self, written: Written) -> None:
        """Go on as a checkpoint was written, in place of the policy's choice; all ranks call it."""
        config = self._as_written(written)
        self.settings = WavemareConfig.of(config)
        self.broken = "a load has replaced the optimizer, and did not end"
        if hasattr(self.optimizer, "destroy"):
            self.optimizer.destroy()
        config, make = take_optimizer(config, self.module, None)
        config = without_compiled_optimizer(config, make)
        self.client_optimizer = make
        self._config.optimizer_name = (get_optimizer_name(config) or "").lower() or None
        self._config.optimizer_params = get_optimizer_params(config)
        self._configure_optimizer(make, self._groups)
        self._configure_lr_scheduler()
        self.describe_optimizer()
        self.begin_updates()
        tell_replaced(self.settings, written)

    def begin_updates(self) -> None:
        """Make what belongs to the optimizer."""

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint, also after a step that did not end.

        Raises:
            CommError: Ranks that share stages cannot meet any more.
        """
        if not self._has_groups:
            reason = f"{self.broken}, and the ranks that share a stage were parted"
            raise CommError("load_checkpoint", args[:1], reason, "Start all processes again")
        return super().load_checkpoint(*args, **kwargs)

    def _next_batch(self) -> Any:
        batch = super()._next_batch()
        if batch is None:  # there is no iterator
            return None
        if isinstance(batch, Mapping):
            if not hasattr(self.module, "split_batch"):
                reason = "a batch is a mapping, and a PipelineModule takes (inputs, labels)"
                remedy = "Give pairs of inputs and labels, or a transformers model"
                raise DataError("data_iter", sorted(batch), reason, remedy)
            batch = self.module.split_batch(batch)
        # Here once: DeepSpeed's own copies let a GPU's host wait for the passes that are queued.
        given = (*batch[:2], None)[:2]  # a stage may read inputs alone
        inputs, labels = to_device(given, self.device, detach=True)
        return Batch(inputs, labels, given)

    def _marks_of(self, batch: Batch | None, number: int) -> Marks:
        """Return what the last stage compares.

        Args:
            batch: That this rank has read; None if there was none.
            number: Of the micro-batch, from the first one of the present step.

        Raises:
            DataError: Ranks that split layers have read different ones.
        """
        same = self.same_batches
        if batch is None or same is None:
            return UNKNOWN
        step = self.global_steps + number // self.micro_batches + 1
        may_wait = not torch.is_grad_enabled() or is_due(step)
        uses = [part for part in (0, 1) if (self.is_first_stage, self.is_last_stage)[part]()]
        digests = same.read(batch.given, may_wait=may_wait, uses=uses)
        if self.marks_each:
            return (*digests, *NONE)
        if number:
            same.keep(digests)
            return UNKNOWN
        return (*digests, *same.take())

    def _start_timers(self, timer_names: Sequence[str]) -> None:
        # DeepSpeed's pipeline starts those of a backward pass, and so do its hooks of outputs.
        if timer_names:
            super()._start_timers([n for n in timer_names if not self.timers(n).started_])

    def steps_per_print(self) -> int:
        """Return after how many steps to print, never without a number: DeepSpeed divides by it."""
        return super().steps_per_print() or 1 << 60

    def forward(self, *_: Any, **__: Any) -> None:
        """Refuse a single pass."""
        reason, remedy = "its engine trains whole steps", "Call engine.train_batch(iterator)"
        raise ConfigError("wavemare.pipeline.stages", self.num_stages, reason, remedy)

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train an optimizer step as ``deepspeed.PipelineEngine.train_batch``.

        Returns:
            The mean loss over micro-batches and data ranks, on every rank; scalar.

        Raises:
            StopIteration: The data had ended before the step; on all ranks.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() needs gradients: use eval_batch() to evaluate")
        own = self._own_batches
        if data_iter is None and own is not None and self.data_iterator is own:
            self.warn_of_own_data()
        self.leave_out(self.data_iterator if data_iter is None else data_iter, self.join_replicas())
        with self.training_step():
            self.has_begun = True  # other stages wait for this one, whatever fails from here on
            return super().train_batch(data_iter)

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``deepspeed.PipelineEngine.eval_batch``, micro-batches of any shape."""
        self.reset_activation_shape()
        try:
            with PROGRESS.doing("evaluation"):
                return super().eval_batch(*args, **kwargs)
        finally:
            self.reset_activation_shape()

    def _bcast_pipe_scalar(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of an evaluation as DeepSpeed's method of that name, of all replicas."""
        return self.over_replicas(super()._bcast_pipe_scalar(*args, **kwargs))

    def _broadcast_model(self) -> None:
        """Give all replicas the first one's weights, layer by layer if they are cut apart."""
        if self._segments is None:
            super()._broadcast_model()
        else:
            self._segments.broadcast(self.module)

    def _exec_reduce_grads(self) -> None:
        """Average gradients over the replicas, layer by layer if they are cut apart."""
        if self._segments is None:
            super()._exec_reduce_grads()
        else:
            self._segments.reduce(self.module, self.allreduce_no_retain)

    @property
    def _segments(self) -> Any:
        """The groups of replicas that are cut at layers of their own; else None."""
        return getattr(self.module, "shared_segments", None)

    def _abort_groups(self) -> None:
        """Let the ranks of other replicas fail that would wait for this one in a collective."""
        grid = self.grid
        experts = expert_group(self.module.parameters())  # None on a stage without them
        shared = [
            (grid.get_data_parallel_group(), self.dp_world_size),
            (grid.get_slice_parallel_group(), grid.get_slice_parallel_world_size()),
            (experts, self.settings.expert_parallel.size if experts is not None else 1),
        ]
        if self._segments is not None:
            shared += [(group, 2) for group in self._segments.groups]
        for group, size in shared:
            if size > 1:
                self._has_groups = False
                fail_group(group)

    def destroy(self) -> None:
        """Release the engine's resources; all ranks should call it."""
        # Graphs of the last step, whose hooks would keep the engine alive.
        self.loss: Tensor | None = None
        self.total_loss: Tensor | None = None
        self.pipe_buffers: dict[str, Any] = {}
        super().destroy()


def _copied(group: Any) -> Any:
    """Return a parameter, or a copy of a group of them."""
    if not isinstance(group, dict):
        return group
    held = group["params"]
    return {**group, "params": held if isinstance(held, Tensor) else list(held)}


class DualPipeVEngine(StagedEngine, deepspeed.DualPipeVEngine):
    """``deepspeed.DualPipeVEngine``, chosen by a ``DualPipeVModule``."""
