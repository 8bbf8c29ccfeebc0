# SPDX-License-Identifier: Apache-2.0
"""The update of an asynchronous pipeline: PipeMare.

Each stage steps its own weights after every ``gradient_accumulation_steps`` micro-batches and
continues at once; nothing is ever flushed. The schedule is endless, and comes from a finite plan
that is proved (`RunPlan.step`). Losses and gradient norms travel with activations and gradients.
"""

from __future__ import annotations

import logging
import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from torch import Tensor

from wavemare.engine.launch.group import gather
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.recorder import Telemetry
from wavemare.engine.optim.policy import remedies, tell_changed
from wavemare.engine.pipe.micro_batch import DataEndedError, MicroBatch
from wavemare.engine.pipe.stage_optimizer import StageNorms, StageOptimizer
from wavemare.engine.pipe.update import Handlers, Update
from wavemare.engine.seams import keeping_versions
from wavemare.errors import ConfigError, ModelError
from wavemare.pipeline.plan.orders import SEND_SLOTS, ahead, steps_to_drain
from wavemare.pipeline.plan.plan import RECEIVES, Action, Kind
from wavemare.pipeline.staleness.correction import make_correction
from wavemare.pipeline.staleness.staleness import max_staleness

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine

logger = logging.getLogger("wavemare")


class PipeMare(Update):
    """Steps each stage alone, with corrected weights, rates and norms.

    Args:
        engine: Its DeepSpeed part is built; its messages are not yet.

    Raises:
        ModelError: Stages share a weight.
        ConfigError: The optimizer, or the grid of ranks, needs more than one stage.
    """

    activation_numbers = Update.activation_numbers + 1  # the squared norm
    in_each_activation = True
    trains_short_steps = clips_alone = True

    def __init__(self, engine: PipelineEngine) -> None:
        super().__init__(engine)
        self._config = engine.settings.pipeline.pipemare
        _check_model(engine)
        self._clip = max(float(engine.gradient_clipping()), 0.0)
        self._norms = StageNorms(engine)
        self._optimizer = StageOptimizer(engine, clip=self._clip, config=self._config)
        self.feeds_back = self._optimizer.feeds_back
        self._telemetry = Telemetry(engine.stage_id, engine.num_stages)
        self.grad_numbers = 1 + len(self._telemetry.pack())
        self._first = self._next = 0  # micro-batch of the present step, and of the next one
        self._end: int | None = None  # the first micro-batch without data, if it is known
        self._since_empty = 0  # steps since the pipeline was empty
        self._version = 0  # of this stage's weights
        self._in_flight: list[Action] = []  # activations of later steps that are on their way here
        self._loss_sum: Tensor | float = 0.0
        self._mean_loss: Tensor | None = None
        self.sizes_changed()

    @property
    def handlers(self) -> Handlers:
        """What does the kinds of action that only asynchronous plans have."""
        return {
            Kind.RECV_NORM: self._receive_norm,
            Kind.SEND_NORM: lambda it: self._link.send_number(it, self._norms.from_here),
            Kind.RECV_TOTAL: lambda it: self._norms.set_exact(self._link.receive_number(it)),
            Kind.SEND_TOTAL: self._send_total,
            Kind.CORRECT: self._correct,
            Kind.RESTORE: lambda _: self._correction.restore(),
        }

    @property
    def _link(self) -> Any:
        return self._engine.link

    @property
    def lead(self) -> int:
        """How many optimizer steps more than rank 0 another rank may have done."""
        engine = self._engine
        return ahead(0, engine.num_stages, self._config.slack) // engine.micro_batches

    # --- a step -----------------------------------------------------------------------------------

    def train(self) -> None:
        """Run the plan's next step; its first stage reads micro-batches ahead, as `ahead` says.

        If the data ends within a step, the step trains the micro-batches that were read.

        Raises:
            DataEndedError: The data had ended before the step; on all ranks.
            ModelError: Other layers are trained than the micro-batches in flight began with.
        """
        self._ask_what_is_trained()
        if not (self._train_step() or (self._goes_on() and self._train_step())):
            raise DataEndedError
        shares = self._engine.recorder.shares()
        self._telemetry.end_step(shares)

    def _ask_what_is_trained(self) -> None:
        """Note which weights are trained from now on; an empty pipeline alone can change them."""
        trained = self._trained_weights()
        if list(map(id, trained)) == list(map(id, self._parameters)):
            return
        if self._since_empty:
            reason = "layers were frozen or thawed while micro-batches are between their passes"
            remedy = "Call engine.drain() on all ranks after such a change, before train_batch"
            raise ModelError("requires_grad", f"{len(trained)} weights", reason, remedy)
        former = self._correction
        self._new_correction()
        self._correction.go_on_from(former)

    def _trained_weights(self) -> list[Tensor]:
        return [p for p in self._engine.module.parameters() if p.requires_grad]

    def _train_step(self) -> int:
        """Run one step of the plan; return how many micro-batches it trained."""
        engine, first = self._engine, self._next
        size, settings = engine.micro_batches, self._config
        left = steps_to_drain(engine.global_steps, settings.warmup_steps, settings.drain_interval)
        run, place = engine.run_plan, (self._since_empty, left)
        actions = run.step(engine.stage_id, *place, first=first, version=self._version)
        self._first, self._loss_sum, self._next = first, 0.0, first + size
        self._since_empty = 0 if left == 1 else self._since_empty + 1
        self._norms.exact = None
        self._telemetry.begin_step()
        self._in_flight = [
            Action(Kind.RECV_ACTIVATION, engine.stage_id, self._next + number)
            for number in run.unreceived(engine.stage_id, left)
        ]
        receives = [*(each for each in actions if each.kind in RECEIVES), *self._in_flight]
        slots = SEND_SLOTS + settings.slack
        engine.begin_messages(receives, slots, first=first, may_end=False)
        try:
            engine.run_actions(actions)
        except BaseException:
            self._correction.restore()
            raise
        if engine.is_last_stage() and not engine.is_first_stage():
            # The first stage's iterator is so far ahead.
            with PROGRESS.doing("the data loader"):
                engine.feed.prefetch(run.read_ahead(left))
        trained = self._trained
        if trained < size:
            self._empty(first + trained)
        return trained

    @property
    def _trained(self) -> int:
        """Number of micro-batches in the present step, as far as the end of the data is known."""
        end = self._first + self._engine.micro_batches
        return max(min(end, self._end if self._end is not None else end) - self._first, 0)

    def _goes_on(self) -> bool:
        """Whether another iterator follows the one that ended; all stages must ask."""
        engine = self._engine
        goes_on = engine.is_first_stage() and engine.feed.goes_on
        flag = torch.tensor(float(goes_on), device=engine.device)
        dist.all_reduce(flag, group=engine.grid.get_pipe_parallel_group())
        return bool(flag.item())

    def drain(self) -> None:
        """Empty the pipeline, so that all stages hold the same version; all ranks must call it.

        Between two optimizer steps only forward passes of later micro-batches are in flight. They
        are dropped, and done again with the next step.
        """
        self._empty(None)

    def _empty(self, end: int | None) -> None:
        engine = self._engine
        self._link.discard(self._in_flight)
        self._in_flight = []
        engine.put_back()
        self._next = self._next if end is None else end
        self._since_empty = 0
        self._end = None
        self._correction.discard_versions()

    # --- passes and messages ----------------------------------------------------------------------

    def next_batch(self, action: Action) -> Any:
        """Return the batch of a micro-batch; None if the data has ended."""
        if self._end is not None:
            return None
        try:
            return self._engine.feed.next()
        except StopIteration:
            self.note_end(action)
            return None

    def note_end(self, action: Action) -> None:
        """Note that the data has ended before a micro-batch."""
        number = action.micro_batch
        self._end = number if self._end is None else min(self._end, number)

    def forward_context(self, action: Action) -> AbstractContextManager[None]:
        """Return the context of a forward pass."""
        # Micro-batches of later steps run backward so many weight versions later.
        staleness = (action.micro_batch - self._first) // self._engine.micro_batches
        return self._correction.forward(staleness)

    def note_forward(self, action: Action, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """See the result of a forward pass.

        Raises:
            ModelError: The module has losses beside the one that is trained.
        """
        micro_batch.version = self._version
        module = self._engine.module
        if is_last and module.get_additional_losses() is not None:
            raise ModelError(
                "get_additional_losses",
                type(module).__name__,
                "the schedule pipemare carries one loss",
                "Add them up in the loss function, or use schedule 1f1b",
            )

    def activation_header(self, action: Action, micro_batch: MicroBatch) -> list[Any]:
        """Return the numbers that go with an activation."""
        return [float(micro_batch.ended), self._norms.up_to_here, *micro_batch.marks]

    def read_activation_header(self, action: Action, header: list[float]) -> bool:
        """Take these numbers; return whether the data has ended."""
        ended, self._norms.earlier_stages_sq_norm = bool(header[0]), header[1]
        if ended:
            self.note_end(action)
        return ended

    def note_backward(self, action: Action, micro_batch: MicroBatch, *, is_last: bool) -> None:
        """See the result of a backward pass."""
        if micro_batch.ended:
            return
        self._telemetry.note_staleness(self._version - micro_batch.version)
        if is_last:
            loss = micro_batch.loss.detach()
            self._loss_sum = self._loss_sum + loss.float()
            engine = self._engine
            if engine.guard is not None:
                number = action.micro_batch - self._first + 1
                engine.guard.note_loss(number, loss, micro_batch.labels)

    def grads_received(
        self, action: Action, header: list[float], grads: list[Tensor]
    ) -> list[Tensor]:
        """Return the gradients of a message."""
        self._loss_sum = header[0]
        self._telemetry.unpack(header[1:])
        return grads

    def grads_to_send(self, action: Action, grads: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
        """Return the header and the tensors of a message of gradients."""
        return [self._loss_sum, *self._telemetry.pack()], grads

    def _correct(self, action: Action) -> None:
        micro_batch = self._engine.micro_batch_of(action)
        if not micro_batch.ended:
            self._correction.correct(self._version - micro_batch.version)

    # --- the optimizer step -----------------------------------------------------------------------

    def reduce(self, action: Action) -> None:
        """Average the gradients and the loss over the ranks that have this stage."""
        engine, trained = self._engine, self._trained
        if not trained:
            return
        if trained < engine.micro_batches:
            self._optimizer.scale_gradients(engine.micro_batches / trained)
        engine._exec_reduce_tied_grads()  # of weights that are tied within the stage: none
        if engine.is_data_parallel or engine.zero_optimization():
            engine._exec_reduce_grads()
        loss = self._loss_sum
        if not isinstance(loss, Tensor):
            loss = torch.full((), loss, dtype=torch.float32, device=engine.device)
        loss = loss / trained
        if engine.is_data_parallel:
            dist.all_reduce(loss, group=engine.grid.get_data_parallel_group())
            loss /= engine.dp_world_size
        self._mean_loss = loss
        if self._clip:
            self._norms.own = self._optimizer.norm_squared()

    def _receive_norm(self, action: Action) -> None:
        self._norms.later_stages_sq_norm = self._link.receive_number(action)

    def _send_total(self, action: Action) -> None:
        if self._engine.is_first_stage():
            self._norms.set_exact(self._norms.from_here)
        self._link.send_number(action, self._norms.total)

    def step(self, action: Action) -> None:
        """Step this stage's optimizer, unless the data had ended."""
        if self._trained:
            self._step()
        self._version += 1

    def _step(self) -> None:
        engine, norms = self._engine, self._norms
        if self._clip:
            engine.norm.take(norms.from_here)
            self._optimizer.clip(norms.own, norms.total)
        self._optimizer.note_staleness(self._telemetry.mean_staleness)
        self._correction.before_step()
        missing = engine.micro_batches - self._trained
        engine.global_samples -= missing * engine.micro_batch_size * engine.dp_world_size
        with keeping_versions(tuple(self._parameters)):
            engine._exec_optimizer_step()
        self._optimizer.end_step()
        self._correction.after_step()
        norms.end_step()
        if self._clip:
            engine._global_grad_norm = math.sqrt(norms.total)

    def mean_loss(self) -> Tensor:
        """Return the mean loss of the very step over micro-batches and data ranks: scalar, fp32."""
        assert self._mean_loss is not None
        return self._mean_loss

    # --- between steps ----------------------------------------------------------------------------

    def sizes_changed(self) -> None:
        """Begin with an empty pipeline; the stages' staleness follows from the settings."""
        self._new_correction()
        self._next = self._since_empty = 0
        self._in_flight, self._end = [], None  # also of a step that did not end

    def _new_correction(self) -> None:
        engine, settings = self._engine, self._config.discrepancy_correction
        slack = self._config.slack
        self._parameters = self._trained_weights()
        self._correction = make_correction(
            settings.mode,
            self._parameters,
            max_staleness(engine.stage_id, engine.num_stages, engine.micro_batches, slack),
            decay_base=settings.decay,
        )

    def reset(self) -> None:
        """Discard what belonged to replaced weights, and what was read ahead."""
        self._engine.feed.drop_waiting()
        self._norms.reset()
        self.sizes_changed()

    def metrics(self) -> dict[str, float]:
        """Return staleness and waiting by stage, and the bubble; on the first stage.

        The figures of later stages are one step old.
        """
        return self._telemetry.metrics()

    def state(self) -> dict[str, Any]:
        """Return what the next step needs beside weights and optimizer."""
        return {
            "norms": self._norms.state_dict(),
            "correction": self._correction.state_dict(),
            # A stage whose weights are all frozen shows them nowhere else.
            **remedies(self._config),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a `state`; another schedule or correction has saved none."""
        tell_changed(self._config, state)
        if "norms" in state:
            self._norms.load_state_dict(state["norms"])
        correction = state.get("correction", {})
        if correction.get("mode") == self._correction.mode:
            self._correction.load_state_dict(correction)
        elif self._correction.mode == "ema":
            logger.warning("pipemare: the moving average of the weight changes starts anew")


def _check_model(engine: PipelineEngine) -> None:
    """Check the model and topology of an engine; all ranks fail alike.

    Raises:
        ConfigError: The topology has a model axis with an unknown distribution of weights.
        ModelError: Stages share a weight.
    """
    grid = engine.grid
    # Ranks of one stage that share a weight of one layer do no more than its other layers.
    shared = [
        key
        for key, comm in engine.module.tied_comms.items()
        if len({grid._topo.get_coord(rank).pipe for rank in comm["ranks"]}) > 1
    ]
    tied = sorted({key for keys in gather(shared) for key in keys})
    if tied:
        raise ModelError(
            "tied layers",
            ", ".join(tied),
            "stages that share a weight must synchronize at each step; asynchronous ones never do",
            "Use LayerSpec instead of TiedLayerSpec (to_pipeline: untie=True), or schedule 1f1b",
        )
    splits = grid.get_slice_parallel_world_size() > 1
    if splits and not getattr(engine.module, "sends_whole", False):
        raise ConfigError(
            "wavemare.pipeline.schedule",
            "pipemare",
            "the topology has a model axis, of whose ranks it is not known which weights they all "
            "hold and which they split",
            "Use the axes pipe and data alone, a model split by wavemare.tensor_parallel, or "
            "schedule 1f1b",
        )
