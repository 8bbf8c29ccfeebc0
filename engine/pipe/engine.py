# SPDX-License-Identifier: Apache-2.0
"""The pipeline engine: DeepSpeed's, which runs any checked plan, action by action.

A plan says what each rank does in an optimizer step. `PipelineEngine` has one table, which names a
method for each kind of action. What differs between schedules that empty the pipeline and
asynchronous ones is the update, which the engine has: `Flush` or `PipeMare`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor

from wavemare.engine.config.resolve import SECTION
from wavemare.engine.experts import ExpertsMixin
from wavemare.engine.launch.group import gather, peer_loss
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.observe.recorder import Recorder
from wavemare.engine.pipe.flush import Flush, short_data
from wavemare.engine.pipe.measure import PlanSearch
from wavemare.engine.pipe.micro_batch import DataEndedError, Feed, MicroBatch, as_leaves
from wavemare.engine.pipe.p2p import PeerLink
from wavemare.engine.pipe.passes import StagePasses
from wavemare.engine.pipe.pipemare import PipeMare
from wavemare.engine.pipe.plans import agreed_plan, peer_of
from wavemare.engine.pipe.staged import StagedEngine
from wavemare.engine.pipe.timers import timed
from wavemare.engine.pipe.update import Handlers, Update
from wavemare.engine.same_batches import UNKNOWN, Marks, compare
from wavemare.errors import CommError, DataError, NumericsError, WavemareError
from wavemare.pipeline.optim.feedback import forget_updates
from wavemare.pipeline.plan.files import GivenPlan
from wavemare.pipeline.plan.orders import forward_only
from wavemare.pipeline.plan.plan import Action, Kind, Plan, RankPlan

_NORMS_OF_DEEPSPEED = "1f1b", "pipemare"
"""Schedules whose gradients are clipped by DeepSpeed's norm, to its bits."""


def _forget(action: Action, start: float, end: float) -> None:
    """Take the times of an action that nobody asks for."""


class PipelineEngine(ExpertsMixin, StagedEngine):
    """Runs each optimizer step by a plan, whatever the schedule.

    A rank may have several stages of the model. Stages on one rank hand each other tensors without
    a message. Messages never block, and carry their own types and shapes.

    Args:
        args: DeepSpeed's. A model with several stages per rank is a `ChunkedPipelineModule`.
        plan: One step of the model's stages, or a function from the numbers of ranks and of
            micro-batches to one; the configuration's schedule if omitted.
        kwargs: DeepSpeed's.

    Attributes:
        steps_plainly: Whether torch's optimizer steps, without a wrapper of DeepSpeed's.
        recorder: Where this rank's time goes.
        passes: What passes are.
        update: What a step does beside passes and messages.
        link: The messages of this rank.
        feed: The micro-batches of training.

    Raises:
        PlanError: The plan is wrong, or is made for another pipeline.
    """

    _homes: tuple[int, ...] = ()
    """For each stage its rank; empty while DeepSpeed's constructor runs."""
    feed: Any = None  # both are there once DeepSpeed's constructor has run
    link: Any = None
    _failed: Kind | None = None
    """The kind of the action that an error ended."""

    def __init__(self, *args: Any, plan: GivenPlan | None = None, **kwargs: Any) -> None:
        settings = kwargs.get("settings")
        schedule = "1f1b" if settings is None else settings.pipeline.schedule
        self.norms_by_layer = plan is not None or schedule not in _NORMS_OF_DEEPSPEED
        super().__init__(*args, **kwargs)
        self.is_pipe_partitioned = self.is_grad_partitioned = False  # messages hold whole tensors
        self.dynamic_shape |= self.settings.pipeline.dynamic_shape
        self._given_plan = plan
        self._homes = tuple(getattr(self.module, "homes", range(self.num_stages)))
        self._is_chunked = len(self._homes) > self.num_stages
        self._search: PlanSearch | None = None
        self._evaluating = self._evaluates_training_data = False
        self.steps_plainly = self.optimizer is getattr(self, "basic_optimizer", None)
        self._accumulates_alone = (
            self.steps_plainly
            and self.managed_gradient_accumulation()
            and not self.wall_clock_breakdown()
        )
        if not self._watches_forwards():
            self.module_forward_pre_hook.remove()
            self.module_forward_post_hook.remove()
        self.recorder = Recorder()
        self.feed = Feed(self._read)
        self.feed.use(self.data_iterator)
        # By stage and number.
        self._micro_batches: dict[tuple[int, int], MicroBatch] = {}
        self._labels: dict[int, tuple[Any, Marks]] = {}
        self._first = 0  # number of the step's first micro-batch
        if plan is None and self.settings.pipeline.schedule == "auto":
            self._search = PlanSearch(self)
        self.begin_updates()
        self.link = self._new_link()

    def begin_updates(self) -> None:
        """Make the plan and the update, which are those of the settings and of the optimizer."""
        asynchronous = self._given_plan is None and self.settings.pipeline.is_asynchronous
        self._prepare_plan()
        self.passes = StagePasses(self, split=not asynchronous and self.plan.is_split)
        self.update: Update = PipeMare(self) if asynchronous else Flush(self)
        self.marks_each = self.update.in_each_activation
        self._do = timed(self, {**self._handlers(), **self.update.handlers})

    def _watches_forwards(self) -> bool:
        """Whether DeepSpeed's hooks of the module do anything in a forward pass."""
        return bool(
            self.wall_clock_breakdown()
            or self.flops_profiler_enabled()
            or self.memory_breakdown()
            or self.random_ltd_enabled()
            or self.fp16_auto_cast()
        )

    # --- where stages are, and what they do -------------------------------------------------------

    def _prepare_plan(self) -> None:
        """Find the plan of the present number of micro-batches; all ranks call it."""
        self.run_plan = agreed_plan(
            self.settings.pipeline,
            self.num_stages,
            self.micro_batches,
            clips=float(self.gradient_clipping()) > 0,
            plan=self._given_plan,
        )

    @property
    def plan(self) -> Plan:
        """The plan of a synchronous step, proved."""
        run = self.run_plan
        return (run if self._search is None else self._search.applied_to(run)).whole

    def _new_link(self) -> PeerLink:
        update = self.update
        return PeerLink(
            self.grid,
            self.device,
            self._homes,
            activation_numbers=update.activation_numbers,
            in_each_activation=update.in_each_activation,
            grad_numbers=update.grad_numbers,
            dynamic=self.dynamic_shape,
        )

    def is_first_stage(self) -> bool:
        """Whether this rank has the first stage."""
        return self._homes[0] == self.stage_id if self._homes else bool(super().is_first_stage())

    def is_last_stage(self) -> bool:
        """Whether this rank has the last stage."""
        return self._homes[-1] == self.stage_id if self._homes else bool(super().is_last_stage())

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return len(self._homes) - 1

    @property
    def loss_rank(self) -> int:
        """Global rank of the process of this pipeline that computes the loss."""
        return int(self.grid.pp_group[self._homes[-1]])

    def _loss_stage_global_rank(self) -> int:
        return self.loss_rank

    def _hands_over(self, stage: int) -> bool:
        """Whether the stage after this one is on this rank, too."""
        return stage < self.last_stage and self._homes[stage + 1] == self._homes[stage]

    # --- a step -----------------------------------------------------------------------------------

    def _train_schedule(self) -> None:
        self.tput_timer.start()

    def _inference_schedule(self, micro_batches: int) -> Plan:
        return forward_only(self._homes, micro_batches)

    def _exec_schedule(self, plan: Plan | None) -> None:
        """Run an evaluation's plan, or the update's own step if None."""
        self._failed = None
        try:
            if plan is None:
                self.update.train()
                if self._search is not None:
                    self._search.after_step()
            else:
                self._evaluate(plan.of_rank(self.stage_id))
        except DataEndedError:
            self.timers(TRAIN_BATCH_TIMER).reset()  # else it could not be started again
            if self._search is not None:
                self._search.forget_step()
            raise StopIteration from None
        except BaseException as error:
            self.timers(TRAIN_BATCH_TIMER).reset()
            self._leave_step(error)
            if isinstance(error, StopIteration):  # of a layer: to callers the data would have ended
                raise RuntimeError(f"a pass of stage {self.stage_id} raised {error!r}") from error
            raise

    def _evaluate(self, part: RankPlan) -> None:
        self.fwd_outputs: list[Any] = []
        self.begin_messages(part.receives, part.send_slots)
        self.run_actions(part.actions, keep=False)
        self.link.flush()
        self.link.await_later_stages()  # else one that fails would not join the loss's broadcast

    def begin_messages(
        self, receives: Sequence[Action], slots: int, *, first: int = 0, may_end: bool = True
    ) -> None:
        """Note a step's receives.

        Args:
            receives: Those of one sender in its order.
            slots: Messages that may be pending in one direction.
            first: Number of the step's first micro-batch.
            may_end: Whether the first activation may say that the step has no data.
        """
        if not first:
            self._micro_batches.clear()
            self._labels.clear()
        self._first = first
        self.link.begin(receives, slots, first=first, may_end=may_end)

    def run_actions(
        self, actions: Sequence[Action], *, split: bool = False, keep: bool = True
    ) -> None:
        """Do actions one after the other.

        Args:
            actions: Of this rank.
            split: Whether backward passes are split.
            keep: Whether the recorder takes their times.
        """
        do, add, now = self._do, self.recorder.add if keep else _forget, self.recorder.clock
        # Not a method: the place outlives the engine.
        PROGRESS.begin_actions(actions, partial(peer_of, self.grid.pp_group, self._homes))
        with self.passes.step(split=split):
            for position, action in enumerate(actions):
                PROGRESS.at_action(position)
                start = now()
                try:
                    do[action.kind](action)
                except Exception as error:
                    self._failed = action.kind
                    error.add_note(
                        f"rank {self.global_rank}, stage {action.stage}, optimizer step "
                        f"{self.global_steps + 1}: in action {action} of the plan"
                    )
                    raise
                add(action, start, now())
        PROGRESS.end_actions()

    def _leave_step(self, error: BaseException) -> None:
        """Let all ranks that wait for this one fail, too: it will send nothing more.

        Raises:
            CommError: Another rank has left the step before, and has told why.
        """
        in_step = self._failed is Kind.STEP and isinstance(error, WavemareError)
        if isinstance(error, NumericsError) or in_step:
            return  # all messages of the step are sent, and all ranks come here
        told = self.link.told() if peer_loss(error) else None
        if told is None and peer_loss(error):
            return  # a process has ended
        self.broken = self.broken or "a step or an evaluation began on this rank and did not end"
        reason = f"rank {self.global_rank} left the step ({type(error).__name__}: {error})"
        self.link.abort(told or reason)
        self._abort_groups()
        if told is not None:
            remedy = "Mend that, and load a checkpoint on all ranks or start them again"
            raise CommError("optimizer step", self.global_steps + 1, told, remedy) from error

    # --- the actions ------------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            Kind.LOAD: self._load,
            Kind.RECV_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECV_GRAD: self._receive_grads,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.SEND_GRAD: self._send_grads,
            Kind.REDUCE: self.update.reduce,
            Kind.NORM: lambda _: None,  # the optimizer step asks for it
            Kind.STEP: self.update.step,
        }

    def _load(self, action: Action) -> None:
        here = self._micro_batches.get(action.place)  # a plan may load labels before inputs come
        if action.stage and here is not None and here.ended:
            return
        trains = torch.is_grad_enabled()
        batch = self.update.next_batch(action) if trains else self._next_evaluated(action)
        if action.stage and batch is None:
            reason = "the last stage has fewer micro-batches than the first stage read"
            remedy = "Give the first and last stage iterators over the same data"
            raise DataError("data_iter", f"micro-batch {action.micro_batch}", reason, remedy)
        marks = self._marks_of(batch, action.micro_batch - self._first)
        if action.stage == 0:
            inputs = () if batch is None else self.passes.first_inputs(batch.inputs)
            micro_batch = MicroBatch(inputs, ended=batch is None, batch=batch, marks=marks)
            self._micro_batches[action.place] = micro_batch
        if batch is not None and self.is_last_stage():
            self._labels[action.micro_batch] = batch.labels, marks

    def _receive_activation(self, action: Action) -> None:
        header, inputs = self.link.receive_activation(action)
        ended = self.update.read_activation_header(action, header)
        marks: Any = tuple(header[-len(UNKNOWN) :]) or UNKNOWN
        micro_batch = MicroBatch(() if ended else inputs, ended=ended, marks=marks)
        self._micro_batches[action.place] = micro_batch

    def _forward(self, action: Action) -> None:
        stage, is_last = action.stage, action.stage == self.last_stage
        micro_batch, trains = self._micro_batches[action.place], torch.is_grad_enabled()
        if micro_batch.ended:
            if not (trains and self.update.trains_short_steps):
                self._end_data(action)
            if not is_last:  # its gradient carries losses
                self.link.expect_grad(action, ())
            return
        if self._is_chunked:
            self.module.activate(stage)
        if is_last:
            micro_batch.labels, own = self._labels.pop(action.micro_batch)
            if any(own):
                first = self.grid.pp_group[self._homes[0]]
                compare((first, micro_batch.marks), (self.global_rank, own))
        with (trains and self.update.forward_context(action)) or nullcontext():
            self.passes.forward(micro_batch, is_last=is_last)
        if trains:
            self.update.note_forward(action, micro_batch, is_last=is_last)
        elif is_last:
            loss = micro_batch.loss
            single = isinstance(loss, Tensor)
            self.fwd_outputs.append(loss.detach() if single else [t.detach() for t in loss])
        if self._hands_over(stage):
            following = stage + 1, action.micro_batch
            inputs = as_leaves(micro_batch.outputs)
            self._micro_batches[following] = MicroBatch(inputs, marks=micro_batch.marks)
        elif trains and not is_last:
            outputs = micro_batch.differentiable_outputs
            self.link.expect_grad(action, self.update.grads_expected(action, outputs))
        if not trains and (is_last or self._hands_over(stage)):
            del self._micro_batches[action.place]

    def _end_data(self, action: Action) -> None:
        """Tell the next ranks that there is no data for a step, and end it here.

        Raises:
            DataEndedError: Always.
        """
        self.link.end_step(action.micro_batch, self.update.activation_numbers)
        raise DataEndedError

    def _send_activation(self, action: Action) -> None:
        micro_batch = self._micro_batches[action.place]
        header = self.update.activation_header(action, micro_batch)
        self.link.send_activation(action, () if micro_batch.ended else micro_batch.outputs, header)
        if not torch.is_grad_enabled():
            del self._micro_batches[action.place]

    def _receive_grads(self, action: Action) -> None:
        header, grads = self.link.receive_grad(action)
        self._micro_batches[action.place].grads = self.update.grads_received(action, header, grads)

    def _backward(self, action: Action) -> None:
        if self.passes.splits:
            self._backward_input(action)
            self._backward_weight(action)
        else:
            self._run_backward(action, is_split=False)

    def _backward_input(self, action: Action) -> None:
        self._run_backward(action, is_split=True)

    def _run_backward(self, action: Action, *, is_split: bool) -> None:
        stage, is_last = action.stage, action.stage == self.last_stage
        micro_batch = self._micro_batches[action.place]
        if self._hands_over(stage):
            following = self._micro_batches.pop((stage + 1, action.micro_batch))
            micro_batch.grads = following.input_grads()
        if not micro_batch.ended:
            if self._is_chunked:
                self.module.activate(stage)
            if is_split:
                self.passes.input_gradient(micro_batch, action.place, is_last=is_last)
            else:
                self.passes.backward(micro_batch, is_last=is_last)
        self.update.note_backward(action, micro_batch, is_last=is_last)
        micro_batch.free_graph()
        if stage == 0:
            del self._micro_batches[action.place]

    def _backward_weight(self, action: Action) -> None:
        if self._is_chunked:
            self.module.activate(action.stage)
        self.passes.weight_gradient(action.place)

    def _send_grads(self, action: Action) -> None:
        micro_batch = self._micro_batches.pop(action.place)
        header, grads = self.update.grads_to_send(action, micro_batch.input_grads())
        self.link.send_grad(action, grads, header)

    def accumulate(self, backward: Callable[[], None]) -> None:
        """Run a backward pass as `EngineMixin.accumulate`.

        Where torch's optimizer reads the gradients and nothing is timed, nobody else has to know.
        """
        if self._accumulates_alone:
            backward()
        else:
            super().accumulate(backward)

    def _aggregate_total_loss(self) -> Tensor:
        """Return the mean loss as DeepSpeed's method of that name, without its broadcast."""
        loss: Tensor = self.update.mean_loss()
        return loss

    # --- data -------------------------------------------------------------------------------------

    def _read(self, iterator: Iterator[Any]) -> Any:
        self.data_iterator = iterator
        return self._next_batch()

    def _next_evaluated(self, action: Action) -> Any:
        """Return the batch of a micro-batch of an evaluation; None if there is none at all."""
        try:
            return self.feed.next() if self._evaluates_training_data else self._next_batch()
        except StopIteration:
            if not action.micro_batch:
                return None
            raise short_data(action.micro_batch) from None

    def _build_data_iter(self, dataset: Any) -> None:
        """Read ``training_data`` in the order of the data-parallel engine.

        Without our section the order is stock's, that of the data set.
        """
        if SECTION not in self.config:
            super()._build_data_iter(dataset)
        elif self.is_first_stage() or self.is_last_stage():
            # Not the loader that ``initialize`` returns: a caller who reads it moves that one on.
            self.data_iterator = iter(RepeatingLoader(self.deepspeed_io(dataset)))
        self._own_batches = self.data_iterator

    def put_back(self) -> None:
        """Give what was read for micro-batches in flight back, to be read again."""
        read = [m.batch for m in self._micro_batches.values() if m.batch is not None]
        self.feed.put_back(read)
        self._micro_batches.clear()
        self._labels.clear()

    def micro_batch_of(self, action: Action) -> MicroBatch:
        """Return what a stage holds of a micro-batch."""
        return self._micro_batches[action.place]

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Set the iterator of the next training steps."""
        super().set_dataiterator(iterator)
        if self.feed is not None and not self._evaluating:
            self.feed.use(iterator)

    def set_dataloader(self, loader: Any) -> None:
        """Set the loader of the next training steps."""
        super().set_dataloader(loader)
        if self.feed is not None:
            self.feed.use(self.data_iterator)

    # --- evaluations, checkpoints, changes of size ------------------------------------------------

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as ``deepspeed.PipelineEngine.eval_batch``.

        All stages have one version of the weights. The micro-batches of one call have one shape,
        which need not be the training's (with ``dynamic_shape`` each may have its own). If the
        iterator is that of training, what was read ahead comes first.

        Raises:
            StopIteration: The data had ended before; on all ranks.
        """
        self.check_passed_over()
        self.settle()
        self.drain()
        self._evaluating = True
        self._evaluates_training_data = self.feed.serves(data_iter)
        try:
            result = super().eval_batch(data_iter, *args, **kwargs)
        finally:
            self._evaluating = self._evaluates_training_data = self.eval_return_logits = False
        if isinstance(result, tuple) and getattr(self.module, "sends_router_sums", False):
            loss, outputs = result
            result = loss, outputs and outputs[0]  # None but on the last stage
        return result

    def clip_fp32_gradients(self) -> None:
        """Clip by the norm of all stages, unless each has clipped its own gradients already."""
        if not self.update.clips_alone:
            super().clip_fp32_gradients()

    def drain(self) -> None:
        """Empty the pipeline, so that all stages hold the same version; all ranks must call it."""
        if not self.link.is_closed:
            self.update.drain()

    def settle(self) -> None:
        """Wait for the verdict on all steps so far; all ranks call it.

        Raises:
            CommError: A step began and did not end, so that ranks may be at different steps.
            NumericsError: A step had a number that is not finite.
        """
        self.check_whole()
        super().settle()

    def reset_activation_shape(self) -> None:
        """Forget the shapes of earlier micro-batches; all stages must call it."""
        self.drain()
        super().reset_activation_shape()
        self.link.reset_shapes()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step; all ranks must call it."""
        self.drain()
        before = self.train_batch_size()
        super().set_train_batch_size(train_batch_size)
        try:
            self._prepare_plan()
        except WavemareError:
            super().set_train_batch_size(before)
            raise
        self.update.sizes_changed()

    def reset_state(self) -> None:
        """Discard what belonged to replaced weights, and what was read ahead; all ranks call it."""
        super().reset_state()
        self._micro_batches.clear()
        self._labels.clear()
        if self.same_batches is not None:
            self.same_batches.take()
        self.update.reset()
        if any(gather(self.link.is_closed)):
            self.link.close()
            self.link = self._new_link()

    def extra_state(self) -> dict[str, Any]:
        """Return what this rank's next step needs besides weights and optimizer."""
        return {**super().extra_state(), **self.update.state()}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        """Load an `extra_state`."""
        super().load_extra_state(state)
        self.update.load_state(state)
        optimizer = getattr(self, "basic_optimizer", None)
        if optimizer is not None and not self.update.feeds_back:
            forget_updates(optimizer)

    @property
    def stage_lead(self) -> int:
        """How many optimizer steps more than the first stage another one may have done."""
        return int(self.update.lead)

    def step_metrics(self) -> dict[str, float]:
        """Return the figures of the last step, by name; those of stages on the first one."""
        return {**self.update.metrics(), **super().step_metrics()}

    def destroy(self) -> None:
        """Release the engine's resources; all ranks should call it."""
        link, self.link = self.link, None  # DeepSpeed's destructor comes here again
        try:
            if link is not None:
                # Graphs of forward passes that are ahead would keep the engine alive.
                self._micro_batches.clear()
                if not self.is_collected:  # by the garbage collector, in any thread
                    link.close()
        finally:
            super().destroy()
