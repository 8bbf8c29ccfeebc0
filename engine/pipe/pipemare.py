# SPDX-License-Identifier: Apache-2.0
"""The asynchronous pipeline engine: PipeMare on DeepSpeed's ``PipelineEngine``.

Each stage steps its own weights after every ``gradient_accumulation_steps`` micro-batches and goes
on at once; nothing is ever flushed. A stage runs a checked plan, one optimizer step at a time
(:mod:`wavemare.pipeline.plan.run_plan`), through DeepSpeed's instruction map.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.observe.recorder import Recorder
from wavemare.engine.observe.telemetry import Telemetry
from wavemare.engine.pipe.channels import Channels
from wavemare.engine.pipe.engine import PipelineEngine
from wavemare.engine.pipe.exchange import Exchange
from wavemare.engine.pipe.feed import Feed
from wavemare.engine.pipe.grad_norm import StageNorms
from wavemare.engine.pipe.micro_batch import MicroBatch, as_tuple, to_device
from wavemare.engine.pipe.pipemare_checks import check_losses, check_model
from wavemare.engine.pipe.stage_optimizer import StageOptimizer
from wavemare.engine.pipe.stage_passes import StagePasses
from wavemare.engine.pipe.step_schedule import INSTRUCTIONS, Pair, Window
from wavemare.pipeline.config import PipeMareConfig
from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.plan.order import ahead
from wavemare.pipeline.plan.run_plan import RunPlan
from wavemare.pipeline.plan.schedules import SEND_SLOTS, steps_to_drain
from wavemare.pipeline.staleness.correction import make_correction
from wavemare.pipeline.staleness.staleness import max_staleness

__all__ = ["PipeMareEngine"]

logger = logging.getLogger("wavemare")

_GAP_INTERVAL = 10
"""Optimizer steps between two measurements of the update gap, which read all weights."""


class PipeMareEngine(PipelineEngine):
    """A pipeline that never flushes.

    ``train_batch``, ``eval_batch`` and checkpoints are used as with ``deepspeed.PipelineEngine``.
    ``train_batch`` returns the exact mean loss of its own step on every rank, without a barrier: it
    travels with the gradients.
    """

    def __init__(
        self, *args: Any, pipemare: PipeMareConfig, pairs: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.pipemare = pipemare
        check_model(self)
        self._clip = max(float(self.gradient_clipping()), 0.0)
        self._norms = StageNorms(self)
        self._stage_optimizer = StageOptimizer(self, clip=self._clip, config=pipemare)
        self._recorder = Recorder()
        self._passes = self._make_passes() if pairs else None
        self._telemetry = Telemetry(self.stage_id, self.num_stages)
        self._channels = Channels(self.grid, self.device, SEND_SLOTS + pipemare.slack)
        self._exchange = Exchange(
            self._channels,
            down_header=3,
            up_header=1 + self._telemetry.num_numbers,
            dynamic=self.dynamic_shape,
        )
        self._feed = Feed(self._read, keeps_older=self.is_last_stage())
        self._feed.use(self.data_iterator)
        self._evaluating = False
        self._micro_batches: dict[int, MicroBatch] = {}
        self._first = 0
        self._end: int | None = None
        self._version = 0
        self._position: Action | None = None
        self._loss_sum: Tensor | float = 0.0
        self._update_gap = math.nan
        self._start_stream()

    def _start_stream(self) -> None:
        """Begin with an empty pipeline; what a micro-batch's staleness may be follows from it."""
        settings = self.pipemare.discrepancy_correction
        self._correction = make_correction(
            settings.mode,
            (p for p in self.module.parameters() if p.requires_grad),
            max_staleness(self.stage_id, self.num_stages, self.micro_batches, self.pipemare.slack),
            decay_base=settings.decay,
        )
        self._plan = RunPlan(
            self.num_stages,
            self.micro_batches,
            asynchronous=True,
            pairs=self._passes is not None,
            **self.pipemare.plan_options(clips=self._clip > 0),
        )
        self._next = 0
        self._since_empty = 0

    # --- training -------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Train one optimizer step of this rank's stage.

        The first stage reads micro-batches ahead of the step, as many as `ahead` says. Where the
        data ends within a step, the step is made of the micro-batches that there are.

        Args:
            data_iter: Gives micro-batches to the first and last stage, as in DeepSpeed; if
                omitted, that of the call before or the ``training_data`` given to ``initialize``.

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
            trained = self._train_step()
            if not trained and self._goes_on():
                trained = self._train_step()
            if not trained:
                raise StopIteration
            self._report_step()
        return self.agg_train_loss

    def _train_step(self) -> int:
        """Do one step of the plan; return how many micro-batches it trained."""
        first, size = self._next, self.micro_batches
        left = steps_to_drain(
            self.global_steps, self.pipemare.warmup_steps, self.pipemare.drain_interval
        )
        window = self._plan.step(
            self.stage_id, self._since_empty, left, first=first, version=self._version
        )
        self._first, self._loss_sum, self._next = first, 0.0, first + size
        self._since_empty = 0 if left == 1 else self._since_empty + 1
        self._norms.begin_step()
        self._exchange.begin(window, self._plan.unreceived(self.stage_id, left))
        try:
            self._exec_schedule(Window(window, pairs=self._passes is not None))
        except Exception as error:
            self._correction.restore()
            error.add_note(
                f"rank {self.global_rank}, stage {self.stage_id}, optimizer step "
                f"{self.global_steps + 1}: in action {self._position} of the plan"
            )
            raise
        trained = self._trained
        if trained < size:
            self._empty(first + trained)
        return trained

    @property
    def _trained(self) -> int:
        """Number of micro-batches of the present step, as far as the data is known to go."""
        end = self._first + self.micro_batches
        return max(min(end, self._end if self._end is not None else end) - self._first, 0)

    def _goes_on(self) -> bool:
        """Whether the data ended only to go on with another iterator; all stages must ask."""
        flag = torch.tensor([float(self.is_first_stage() and self._feed.goes_on)])
        flag = flag.to(self.device)
        dist.all_reduce(flag, group=self.grid.get_pipe_parallel_group())
        return bool(flag.item())

    def drain(self) -> None:
        """Empty the pipeline, so that all stages hold the same version; all ranks must call it.

        Between two optimizer steps no backward pass is under way, only forward passes of later
        micro-batches: these are dropped, and done again with the next step.
        """
        self._empty(None)

    def _empty(self, end: int | None) -> None:
        self._exchange.discard(self.device)
        self._channels.flush()
        if self.is_first_stage():
            read = [m for m in self._micro_batches.values() if not m.ended]
            self._feed.put_back([(m.source, m.batch) for m in read])
        self._micro_batches.clear()
        if self._passes is not None:
            self._passes.forget()
        self._next = self._next if end is None else end
        self._since_empty = 0
        if self._stage_watch is not None:
            self._stage_watch.discard()
        self._end = None
        self._correction.discard_versions()

    # --- the actions ----------------------------------------------------------------------------

    def _exec_load(self, action: Action) -> None:
        number = action.micro_batch
        if self.is_first_stage():
            found = None if self._end is not None else self._feed.next_inputs()
            if found is None:
                self._note_end(number)
                self._micro_batches[number] = MicroBatch(ended=True)
                return
            source, batch = found
            inputs = self._on_device(batch[0])
            self._micro_batches[number] = MicroBatch(inputs=inputs, source=source, batch=batch)
        micro_batch = self._micro_batches[number]
        if self.is_last_stage() and not micro_batch.ended:
            if not self.is_first_stage():
                batch = self._feed.next_labels(micro_batch.source)
            micro_batch.labels = to_device(batch[1], self.device, detach=True)

    def _read(self, iterator: Iterator[Any]) -> Any:
        self.data_iterator = iterator
        return self._next_batch()

    def _note_end(self, number: int) -> None:
        self._end = number if self._end is None else min(self._end, number)

    def _on_device(self, inputs: Any) -> Tensor | tuple[Tensor, ...]:
        tensors = [t.detach().to(self.device) for t in as_tuple(inputs)]
        if self._reentrant_activation_checkpointing():
            tensors = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        return tensors[0] if isinstance(inputs, Tensor) else tuple(tensors)

    def _exec_recv_activation(self, action: Action) -> None:
        header, inputs = self._exchange.receive_activation(self.device)
        ended, source, self._norms.prefix = bool(header[0]), int(header[1]), header[2]
        if ended:
            self._note_end(action.micro_batch)
            inputs = ()
        self._micro_batches[action.micro_batch] = MicroBatch(
            inputs=inputs, ended=ended, source=source
        )

    def _make_passes(self) -> StagePasses:
        if not self.pipemare.slack and self.num_stages > 1 and self.global_rank == 0:
            logger.warning(
                "pipemare: with pair_passes and without slack neighbouring stages wait for each "
                "other's pairs; set wavemare.pipeline.pipemare.slack to 1"
            )
        return StagePasses(self, forward=self._forward_context, recorder=self._recorder)

    def _forward_context(self, number: int) -> AbstractContextManager[None]:
        if self._stage_watch is not None:
            self._stage_watch.begin(number, number)
        # What lies beyond this step will go backward after the weights have changed.
        return self._correction.forward((number - self._first) // self.micro_batches)

    def _exec_forward(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        if micro_batch.ended:
            pass
        elif self._passes is not None:
            self._passes.forward(action.micro_batch, micro_batch)
        else:
            with self._forward_context(action.micro_batch):
                self._forward(micro_batch)
            if self._stage_watch is not None:
                outputs = micro_batch.loss if self.is_last_stage() else micro_batch.outputs
                labels = micro_batch.labels
                self._stage_watch.end_forward(
                    action.micro_batch, micro_batch.inputs, outputs, labels
                )
        self._end_forward(action)

    def _end_forward(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        micro_batch.version = self._version
        if not self.is_last_stage():
            self._exchange.expect_grad(action.micro_batch, micro_batch.differentiable_outputs)

    def _forward(self, micro_batch: MicroBatch) -> None:
        inputs = micro_batch.inputs
        # Cloned as a layer may change its input in place, and leaves must not be changed.
        if isinstance(inputs, Tensor):
            outputs = deepspeed.DeepSpeedEngine.forward(self, inputs.clone())
        else:
            clones = tuple(tensor.clone() for tensor in inputs)
            outputs = deepspeed.DeepSpeedEngine.forward(self, clones)
        if self.is_last_stage():
            loss_fn = self.module.loss_fn
            loss = outputs if loss_fn is None else loss_fn(outputs, micro_batch.labels)
            check_losses(self.module)
            micro_batch.loss = self.loss = loss
        else:
            micro_batch.outputs = outputs

    def _exec_send_activation(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        header = [float(micro_batch.ended), float(micro_batch.source), self._norms.up_to_here]
        outputs = () if micro_batch.ended else micro_batch.outputs
        self._exchange.send_activation(header, outputs)

    def _exec_recv_grad(self, action: Action) -> None:
        number = action.micro_batch
        header, grads = self._exchange.receive_grad(number, self.device)
        self._micro_batches[number].grads = grads
        self._loss_sum = header[0]
        self._telemetry.hear(header[1:])

    def _exec_backward(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        if micro_batch.ended:
            pass
        elif self._passes is not None:
            self._passes.backward(action.micro_batch, micro_batch)
        elif self.is_last_stage():
            deepspeed.DeepSpeedEngine.backward(self, self.watched(micro_batch.loss))
        else:
            self._backward_of_outputs(micro_batch)
        if self._stage_watch is not None and not micro_batch.ended:
            self._stage_watch.end_backward(action.micro_batch, micro_batch.grads)
        self._end_backward(action)

    def _exec_pair(self, backward: Action, forward: Action) -> None:
        self._position = backward
        number, next_number = backward.micro_batch, forward.micro_batch
        micro_batch, following = self._micro_batches[number], self._micro_batches[next_number]
        if micro_batch.ended or following.ended:
            self._exec_backward(backward)
            self._exec_forward(forward)
            return
        assert self._passes is not None
        self._passes.pair(number, micro_batch, next_number, following)
        self._end_backward(backward)
        self._end_forward(forward)

    def _end_backward(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        if not micro_batch.ended:
            self._telemetry.note_staleness(self._version - micro_batch.version)
            if self.is_last_stage():
                self._loss_sum = self._loss_sum + micro_batch.loss.detach().float()
        micro_batch.free_graph()
        if self.is_first_stage():
            del self._micro_batches[action.micro_batch]

    def _backward_of_outputs(self, micro_batch: MicroBatch) -> None:
        # As DeepSpeed's own _exec_backward_pass, but for all outputs at once.
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True
        try:
            micro_batch.backward()
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    def _exec_send_grad(self, action: Action) -> None:
        micro_batch = self._micro_batches.pop(action.micro_batch)
        # Only the step's last message tells its loss: reading it waits for the device.
        complete = action.micro_batch == self._first + self.micro_batches - 1
        header = [float(self._loss_sum) if complete else 0.0, *self._telemetry.tell()]
        self._exchange.send_grad(header, micro_batch.input_grads())

    def _exec_reduce(self, action: Action) -> None:
        trained = self._trained
        if not trained:
            return
        if trained < self.micro_batches:
            self._stage_optimizer.scale_gradients(self.micro_batches / trained)
        if self.is_data_parallel or self.zero_optimization():
            self._exec_reduce_grads()
        loss = torch.as_tensor(self._loss_sum, dtype=torch.float32, device=self.device) / trained
        if self.is_data_parallel:
            dist.all_reduce(loss, group=self.grid.get_data_parallel_group())
            loss /= self.dp_world_size
        self.agg_train_loss = loss
        if self._clip:
            self._norms.own = self._stage_optimizer.norm_squared()

    def _exec_recv_norm(self, action: Action) -> None:
        self._norms.suffix = self._exchange.receive_number(action.kind)

    def _exec_send_norm(self, action: Action) -> None:
        self._exchange.send_number(action.kind, self._norms.from_here)

    def _exec_recv_total(self, action: Action) -> None:
        self._norms.set_exact(self._exchange.receive_number(action.kind))

    def _exec_send_total(self, action: Action) -> None:
        if self.is_first_stage():
            self._norms.set_exact(self._norms.from_here)
        self._exchange.send_number(action.kind, self._norms.total)

    def _exec_step(self, action: Action) -> None:
        if self._trained:
            self._step()
        self._version += 1

    def _step(self) -> None:
        norms = self._norms
        if self._guard is not None:
            norm = norms.from_here if self._clip else None
            self._guard.expect(self._first + self.micro_batches, norm)
        if self._clip and self.pipemare.clipping == "stage":
            self._stage_optimizer.clip(norms.own, norms.own / norms.share)
        elif self._clip:
            self._stage_optimizer.clip(norms.own, norms.total)
        self._stage_optimizer.note_staleness(self._telemetry.mean_staleness)
        self._correction.before_step()
        with self._stage_optimizer.keeping_versions():
            self._exec_optimizer_step()
        self._stage_optimizer.end_step()
        self._correction.after_step()
        norms.end_step()
        if self._clip:
            squared = norms.total if self.pipemare.clipping == "global" else norms.own
            self._global_grad_norm = math.sqrt(squared)
        missing = self.micro_batches - self._trained
        self.global_samples -= missing * self.micro_batch_size * self.dp_world_size

    def clip_fp32_gradients(self) -> None:
        """Do nothing: DeepSpeed's way is a barrier, and the gradients are clipped already."""

    def _exec_correct(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.micro_batch]
        if not micro_batch.ended:
            self._correction.correct(self._version - micro_batch.version)

    def _exec_restore(self, action: Action) -> None:
        self._correction.restore()

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

    def synchronize(self) -> None:
        """Have one version of the weights on all stages, so that it can be saved."""
        self.drain()

    def drain_before_load(self) -> None:
        """Have one version of the weights on all stages, so that others can take its place."""
        self.drain()

    def reset_state(self) -> None:
        """Forget what belonged to the weights that were, and what was read ahead."""
        super().reset_state()
        self._drop_read_ahead()
        self._norms.reset()
        self._start_stream()

    def _drop_read_ahead(self) -> None:
        """Leave out on the last stage, too, what the first one has read and never trained."""
        read_ahead = self._feed.drop_put_back()
        most = ahead(0, self.num_stages, self.pipemare.slack) + self.micro_batches
        sources = torch.zeros(most, dtype=torch.int64, device=self.device)
        sources[: len(read_ahead)] = torch.tensor(read_ahead, dtype=torch.int64)
        dist.all_reduce(sources, group=self.grid.get_pipe_parallel_group())
        if self.is_last_stage() and not self.is_first_stage():
            self._feed.skip(number for number in sources.tolist() if number)

    def destroy(self) -> None:
        """Give back what the engine holds, as `PipelineEngine.destroy`."""
        if hasattr(self, "_micro_batches"):  # DeepSpeed's destructor comes here, too
            # Graphs of forward passes that are ahead would keep the engine alive.
            self._micro_batches.clear()
        super().destroy()

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs beside weights and optimizer."""
        return {
            **super().extra_state(),
            "norms": self._norms.state_dict(),
            "correction": self._correction.state_dict(),
        }

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Take over a state of `extra_state`; of another schedule or correction there is none."""
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
        self._start_stream()

    def reset_activation_shape(self) -> None:
        """Forget the shapes of the micro-batches so far; all stages must call it."""
        self.drain()
        super().reset_activation_shape()
        self._exchange.forget_shapes()

    # --- what is told of a step -------------------------------------------------------------------

    @property
    def recorder(self) -> Recorder:
        """Where this rank's time goes."""
        return self._recorder

    @property
    def step_lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        return ahead(0, self.num_stages, self.pipemare.slack) // self.micro_batches

    def step_metrics(self) -> dict[str, float]:
        """Return staleness, waiting and update gap by stage, and the bubble; on the first stage.

        Those of later stages are of their step before. Beside them, what `EngineMixin` tells.
        """
        return {**self._telemetry.metrics(), **super().step_metrics()}

    def _report_step(self) -> None:
        if self.global_steps % _GAP_INTERVAL == 0:
            self._update_gap = self._correction.update_gap()
        self._telemetry.end_step(self._recorder.shares(), self._update_gap)
        if self.global_rank != 0:
            return
        every = self.steps_per_print()
        if every is not None and self.global_steps % every == 0:
            print(f"steps: {self.global_steps} loss: {self.agg_train_loss:0.4f}")
        if self.monitor.enabled:
            loss = self.agg_train_loss.item()
            self.monitor.write_events([("Train/Samples/train_loss", loss, self.global_samples)])

    def _measured(method: Callable[..., None]) -> Callable[..., None]:
        """Return an instruction's method that is timed, and leaves word of where it is."""

        def run(self: PipeMareEngine, action: Action) -> None:
            self._position = action
            with self._recorder.action(action):
                method(self, action)

        return run

    _INSTRUCTION_MAP: ClassVar = {
        **PipelineEngine._INSTRUCTION_MAP,
        INSTRUCTIONS[Kind.LOAD]: _measured(_exec_load),
        INSTRUCTIONS[Kind.FORWARD]: _measured(_exec_forward),
        INSTRUCTIONS[Kind.BACKWARD]: _measured(_exec_backward),
        INSTRUCTIONS[Kind.SEND_ACTIVATION]: _measured(_exec_send_activation),
        INSTRUCTIONS[Kind.RECV_ACTIVATION]: _measured(_exec_recv_activation),
        INSTRUCTIONS[Kind.SEND_GRAD]: _measured(_exec_send_grad),
        INSTRUCTIONS[Kind.RECV_GRAD]: _measured(_exec_recv_grad),
        INSTRUCTIONS[Kind.REDUCE]: _measured(_exec_reduce),
        INSTRUCTIONS[Kind.SEND_NORM]: _measured(_exec_send_norm),
        INSTRUCTIONS[Kind.RECV_NORM]: _measured(_exec_recv_norm),
        INSTRUCTIONS[Kind.SEND_TOTAL]: _measured(_exec_send_total),
        INSTRUCTIONS[Kind.RECV_TOTAL]: _measured(_exec_recv_total),
        INSTRUCTIONS[Kind.STEP]: _measured(_exec_step),
        INSTRUCTIONS[Kind.CORRECT]: _measured(_exec_correct),
        INSTRUCTIONS[Kind.RESTORE]: _measured(_exec_restore),
        Pair: _exec_pair,
    }
