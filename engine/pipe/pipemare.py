# SPDX-License-Identifier: Apache-2.0
"""The asynchronous pipeline engine: PipeMare on DeepSpeed's ``PipelineEngine``.

Each stage steps its own weights after every ``gradient_accumulation_steps`` micro-batches and
continues at once; nothing is ever flushed. A stage runs a checked plan, one optimizer step at a
time (:mod:`wavemare.pipeline.plan.run_plan`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.observe.recorder import Telemetry
from wavemare.engine.pipe.engine import Handlers, StepSchedule
from wavemare.engine.pipe.linked import LinkedEngine, StagePasses
from wavemare.engine.pipe.micro_batch import Feed, MicroBatch
from wavemare.engine.pipe.p2p import PeerLink
from wavemare.engine.pipe.stage_optimizer import StageNorms, StageOptimizer
from wavemare.engine.seams import keeping_versions
from wavemare.errors import ConfigError, ModelError
from wavemare.pipeline.plan.lowering import ahead
from wavemare.pipeline.plan.plan import Action, Kind
from wavemare.pipeline.plan.run_plan import RunPlan
from wavemare.pipeline.plan.schedules import SEND_SLOTS, steps_to_drain
from wavemare.pipeline.staleness.correction import make_correction
from wavemare.pipeline.staleness.staleness import max_staleness

logger = logging.getLogger("wavemare")

_GAP_INTERVAL = 10
"""Optimizer steps between two measurements of the update gap, which read all weights."""


class PipeMareEngine(LinkedEngine):
    """A pipeline that never flushes.

    ``train_batch``, ``eval_batch`` and checkpoints are used as with ``deepspeed.PipelineEngine``.
    ``train_batch`` returns the exact mean loss of its own step on every rank, without a barrier:
    the loss travels with the gradients.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipemare = self.settings.pipeline.pipemare
        _check_model(self)
        self._trained_parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._clip = max(float(self.gradient_clipping()), 0.0)
        self._norms = StageNorms(self)
        self._stage_optimizer = StageOptimizer(self, clip=self._clip, config=self.pipemare)
        self._passes = None
        if self.settings.pipeline.overlap_forward_backward:
            if not self.pipemare.slack and self.num_stages > 1 and self.global_rank == 0:
                logger.warning(
                    "pipemare: with overlap_forward_backward and without slack, neighbouring "
                    "stages wait for each other's pairs; set wavemare.pipeline.pipemare.slack to 1"
                )
            self._passes = StagePasses(self, self._forward, self._forward_context)
        self._telemetry = Telemetry(self.stage_id, self.num_stages)
        self._link = PeerLink(
            self.grid,
            self.device,
            range(self.num_stages),
            activation_numbers=3,
            grad_numbers=1 + len(self._telemetry.pack()),
            dynamic=self.dynamic_shape,
        )
        self._feed = Feed(self._read, keeps_older=self.is_last_stage())
        self._feed.use(self.data_iterator)
        self._evaluating = False
        self._first = 0
        self._end: int | None = None
        self._version = 0
        self._in_flight: list[Action] = []
        self._loss_sum: Tensor | float = 0.0
        self._update_gap = math.nan
        self._start_schedule()

    def _start_schedule(self) -> None:
        """Begin with an empty pipeline; the stages' staleness follows from the settings."""
        settings = self.pipemare.discrepancy_correction
        self._correction = make_correction(
            settings.mode,
            self._trained_parameters,
            max_staleness(self.stage_id, self.num_stages, self.micro_batches, self.pipemare.slack),
            decay_base=settings.decay,
        )
        self._plan = RunPlan.of(
            self.settings.pipeline, self.num_stages, self.micro_batches, clips=self._clip > 0
        )
        self._next = 0
        self._since_empty = 0

    # --- training -------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one optimizer step of this rank's stage.

        The first stage reads micro-batches ahead of the step; `ahead` says how many. If the data
        ends within a step, the step trains the micro-batches that were read.

        Args:
            data_iter: Gives micro-batches to the first and last stage, as in DeepSpeed. If omitted,
                the iterator of the call before, or the ``training_data`` given to ``initialize``.

        Returns:
            The mean loss of this very step over micro-batches and data ranks, on every rank;
            scalar, float32.

        Raises:
            StopIteration: The data had ended before the step; on all ranks.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch() requires gradients: use eval_batch() to evaluate")
        if torch.is_autocast_enabled(self.device.type):
            raise RuntimeError("train_batch() under torch.autocast: use bf16 in the configuration")
        self._feed.use(data_iter)
        self.module.train()
        self._compute_loss = True
        with self.training_step():
            trained = self._train_step() or (self._goes_on() and self._train_step())
            if not trained:
                raise StopIteration
            self._report_step()
        return self.agg_train_loss

    def _train_step(self) -> int:
        """Run one step of the plan; return how many micro-batches it trained."""
        first, size = self._next, self.micro_batches
        left = steps_to_drain(
            self.global_steps, self.pipemare.warmup_steps, self.pipemare.drain_interval
        )
        actions = self._plan.step(
            self.stage_id, self._since_empty, left, first=first, version=self._version
        )
        self._first, self._loss_sum, self._next = first, 0.0, first + size
        self._since_empty = 0 if left == 1 else self._since_empty + 1
        self._norms.exact = None
        self._telemetry.begin_step()
        self._in_flight = [
            Action(Kind.RECV_ACTIVATION, self.stage_id, self._next + number)
            for number in self._plan.unreceived(self.stage_id, left)
        ]
        self._link.begin([*actions, *self._in_flight], SEND_SLOTS + self.pipemare.slack)
        try:
            self._exec_schedule(StepSchedule(actions, overlap=self._passes is not None))
        except Exception:
            self._correction.restore()
            raise
        trained = self._trained
        if trained < size:
            self._empty(first + trained)
        return trained

    @property
    def _trained(self) -> int:
        """Number of micro-batches in the present step, as far as the end of the data is known."""
        end = self._first + self.micro_batches
        return max(min(end, self._end if self._end is not None else end) - self._first, 0)

    def _goes_on(self) -> bool:
        """Whether another iterator follows the one that ended; all stages must ask."""
        flag = torch.tensor(float(self.is_first_stage() and self._feed.goes_on), device=self.device)
        dist.all_reduce(flag, group=self.grid.get_pipe_parallel_group())
        return bool(flag.item())

    def drain(self) -> None:
        """Empty the pipeline, so that all stages hold the same version; all ranks must call it.

        Between two optimizer steps only forward passes of later micro-batches are in flight. They
        are dropped, and done again with the next step.
        """
        self._empty(None)

    def _empty(self, end: int | None) -> None:
        self._link.discard(self._in_flight)
        self._in_flight = []
        if self.is_first_stage():
            read = [m for m in self._micro_batches.values() if not m.ended]
            self._feed.put_back([(m.source, m.batch) for m in read])
        self._micro_batches.clear()
        self._next = self._next if end is None else end
        self._since_empty = 0
        if self._stage_watch is not None:
            self._stage_watch.discard()
        self._end = None
        self._correction.discard_versions()

    # --- the actions ----------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            **super()._handlers(),
            Kind.RECV_NORM: self._do_recv_norm,
            Kind.SEND_NORM: lambda it: self._link.send_number(it, self._norms.from_here),
            Kind.RECV_TOTAL: lambda it: self._norms.set_exact(self._link.receive_number(it)),
            Kind.SEND_TOTAL: self._do_send_total,
            Kind.CORRECT: self._do_correct,
            Kind.RESTORE: lambda _: self._correction.restore(),
        }

    def _do_load(self, action: Action) -> None:
        number = action.micro_batch
        if self.is_first_stage():
            found = None if self._end is not None else self._feed.next_inputs()
            if found is None:
                self._note_end(number)
                self._micro_batches[action.place] = MicroBatch(ended=True)
                return
            source, batch = found
            self._micro_batches[action.place] = MicroBatch(
                inputs=self._first_inputs(batch[0]), source=source, batch=batch
            )
        micro_batch = self._micro_batches[action.place]
        if self.is_last_stage() and not micro_batch.ended:
            if not self.is_first_stage():
                batch = self._feed.next_labels(micro_batch.source)
            micro_batch.labels = batch[1]

    def _read(self, iterator: Iterator[Any]) -> Any:
        self.data_iterator = iterator
        return self._next_batch()

    def _note_end(self, number: int) -> None:
        self._end = number if self._end is None else min(self._end, number)

    def _do_recv_activation(self, action: Action) -> None:
        header, inputs = self._link.receive_activation(action)
        ended, source = bool(header[0]), int(header[1])
        self._norms.earlier_stages_sq_norm = header[2]
        if ended:
            self._note_end(action.micro_batch)
            inputs = ()
        self._micro_batches[action.place] = MicroBatch(inputs=inputs, ended=ended, source=source)

    def _forward_context(self, number: int) -> AbstractContextManager[None]:
        if self._stage_watch is not None:
            self._stage_watch.begin(number, self._first)
        # Micro-batches of later steps run backward so many weight versions later.
        return self._correction.forward((number - self._first) // self.micro_batches)

    def _end_forward(self, action: Action, micro_batch: MicroBatch) -> None:
        micro_batch.version = self._version
        super()._end_forward(action, micro_batch)

    def _do_send_activation(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.place]
        header = [float(micro_batch.ended), float(micro_batch.source), self._norms.up_to_here]
        outputs = () if micro_batch.ended else micro_batch.outputs
        self._link.send_activation(action, outputs, header)

    def _do_recv_grad(self, action: Action) -> None:
        header, grads = self._link.receive_grad(action)
        self._micro_batches[action.place].grads = grads
        self._loss_sum = header[0]
        self._telemetry.unpack(header[1:])

    def _end_backward(self, action: Action, micro_batch: MicroBatch) -> None:
        if not micro_batch.ended:
            self._telemetry.note_staleness(self._version - micro_batch.version)
            if self.is_last_stage():
                self._loss_sum = self._loss_sum + micro_batch.loss.detach().float()
        super()._end_backward(action, micro_batch)

    def _do_send_grad(self, action: Action) -> None:
        micro_batch = self._micro_batches.pop(action.place)
        header = [self._loss_sum, *self._telemetry.pack()]
        self._link.send_grad(action, micro_batch.input_grads(), header)

    def _do_reduce(self, action: Action) -> None:
        trained = self._trained
        if not trained:
            return
        if trained < self.micro_batches:
            self._stage_optimizer.scale_gradients(self.micro_batches / trained)
        if self.is_data_parallel or self.zero_optimization():
            self._exec_reduce_grads()
        loss = self._loss_sum
        if not isinstance(loss, Tensor):
            loss = torch.full((), loss, dtype=torch.float32, device=self.device)
        loss = loss / trained
        if self.is_data_parallel:
            dist.all_reduce(loss, group=self.grid.get_data_parallel_group())
            loss /= self.dp_world_size
        self.agg_train_loss = loss
        if self._clip:
            self._norms.own = self._stage_optimizer.norm_squared()

    def _do_recv_norm(self, action: Action) -> None:
        self._norms.later_stages_sq_norm = self._link.receive_number(action)

    def _do_send_total(self, action: Action) -> None:
        if self.is_first_stage():
            self._norms.set_exact(self._norms.from_here)
        self._link.send_number(action, self._norms.total)

    def _do_step(self, action: Action) -> None:
        if self._trained:
            self._step()
        self._version += 1

    def _step(self) -> None:
        norms = self._norms
        if self.guard is not None:
            norm = norms.from_here if self._clip else None
            self.guard.expect(self._first + self.micro_batches, norm)
        if self._clip:
            self._stage_optimizer.clip(norms.own, norms.total)
        self._stage_optimizer.note_staleness(self._telemetry.mean_staleness)
        self._correction.before_step()
        with keeping_versions(tuple(self._trained_parameters)):
            self._exec_optimizer_step()
        self._stage_optimizer.end_step()
        self._correction.after_step()
        norms.end_step()
        if self._clip:
            self._global_grad_norm = math.sqrt(norms.total)
        missing = self.micro_batches - self._trained
        self.global_samples -= missing * self.micro_batch_size * self.dp_world_size

    def clip_fp32_gradients(self) -> None:
        """Do nothing: DeepSpeed's way is a barrier, and the gradients are clipped already."""

    def _do_correct(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.place]
        if not micro_batch.ended:
            self._correction.correct(self._version - micro_batch.version)

    # --- evaluation, checkpoints, changes of size -------------------------------------------------

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as `PipelineEngine.eval_batch`, at one version of the weights on all stages."""
        self.drain()
        self._evaluating = True
        try:
            return super().eval_batch(*args, **kwargs)
        finally:
            self._evaluating = False

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator of the next training steps."""
        super().set_dataiterator(iterator)
        if not self._evaluating:
            self._feed.use(iterator)

    def set_dataloader(self, loader: Any) -> None:
        """Set the loader of the next training steps."""
        super().set_dataloader(loader)
        if hasattr(self, "_feed"):  # DeepSpeed's constructor calls this, too
            self._feed.use(self.data_iterator)

    def reset_state(self) -> None:
        """Discard what belonged to replaced weights, and what was read ahead."""
        super().reset_state()
        self._drop_read_ahead()
        self._norms.reset()
        self._start_schedule()

    def _drop_read_ahead(self) -> None:
        """Skip on the last stage what the first one has read and never trained."""
        read_ahead = self._feed.drop_put_back()
        most = ahead(0, self.num_stages, self.pipemare.slack) + self.micro_batches
        sources = torch.zeros(most, dtype=torch.int64, device=self.device)
        sources[: len(read_ahead)] = torch.tensor(read_ahead, dtype=torch.int64)
        dist.all_reduce(sources, group=self.grid.get_pipe_parallel_group())
        if self.is_last_stage() and not self.is_first_stage():
            self._feed.skip(number for number in sources.tolist() if number)

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs besides weights and optimizer."""
        return {
            **super().extra_state(),
            "norms": self._norms.state_dict(),
            "correction": self._correction.state_dict(),
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load an `extra_state`; another schedule or correction has saved none."""
        super().load_extra_state(state)
        if "norms" in state:
            self._norms.load_state_dict(state["norms"])
        correction = state.get("correction", {})
        if correction.get("mode") == self._correction.mode:
            self._correction.load_state_dict(correction)
        elif self._correction.mode == "ema":
            logger.warning("pipemare: the moving average of the weight changes starts anew")

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step; all ranks must call it."""
        self.drain()
        super().set_train_batch_size(train_batch_size)
        self._start_schedule()

    def reset_activation_shape(self) -> None:
        """Forget the shapes of earlier micro-batches; all stages must call it."""
        self.drain()
        super().reset_activation_shape()

    # --- figures of a step ------------------------------------------------------------------------

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        return ahead(0, self.num_stages, self.pipemare.slack) // self.micro_batches

    def step_metrics(self) -> dict[str, float]:
        """Return staleness, waiting and update gap by stage, and the bubble; on the first stage.

        The figures of later stages are one step old. `EngineMixin.step_metrics` adds others.
        """
        return {**self._telemetry.metrics(), **super().step_metrics()}

    def _report_step(self) -> None:
        if self.global_steps % _GAP_INTERVAL == 0:
            self._update_gap = self._correction.update_gap()
        self._telemetry.end_step(self.recorder.shares(), self._update_gap)
        if self.global_rank != 0:
            return
        if self.global_steps % self.steps_per_print() == 0:
            print(f"steps: {self.global_steps} loss: {self.agg_train_loss:0.4f}")
        if self.monitor.enabled:
            loss = self.agg_train_loss.item()
            self.monitor.write_events([("Train/Samples/train_loss", loss, self.global_samples)])


def _check_model(engine: PipeMareEngine) -> None:
    """Check the model and topology of an engine.

    Raises:
        ConfigError: The topology has a model axis with an unknown distribution of weights.
        ModelError: Weights are tied.
    """
    tied = engine.module.tied_comms
    if tied:
        raise ModelError(
            "tied layers",
            ", ".join(sorted(tied)),
            "stages that share a weight must synchronize at each step; asynchronous ones never do",
            "Use LayerSpec instead of TiedLayerSpec (to_pipeline: untie=True), or schedule 1f1b",
        )
    splits = engine.grid.get_slice_parallel_world_size() > 1
    if splits and not getattr(engine.module, "sends_whole", False):
        raise ConfigError(
            "wavemare.pipeline.schedule",
            "pipemare",
            "the topology has a model axis, of whose ranks it is not known which weights they all "
            "hold and which they split",
            "Use the axes pipe and data alone, a model split by wavemare.tensor_parallel, or "
            "schedule 1f1b",
        )
