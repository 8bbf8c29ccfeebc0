# SPDX-License-Identifier: Apache-2.0
"""The engine that runs any checked plan of steps that empty the pipeline."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.schedule import PipeSchedule

from wavemare.engine.launch.group import gather
from wavemare.engine.observe.progress import PROGRESS
from wavemare.engine.pipe.engine import Handlers, StepSchedule
from wavemare.engine.pipe.linked import FlushingEngine
from wavemare.engine.pipe.micro_batch import MicroBatch, as_leaves
from wavemare.engine.pipe.p2p import PeerLink
from wavemare.engine.pipe.split_backward import SavedBytes, SplitBackward
from wavemare.engine.pipe.stage_optimizer import LayerwiseNorm
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.clock.simulate import Event, measured_costs, simulate
from wavemare.pipeline.plan.automatic import EQUAL_PASSES, lower_bound
from wavemare.pipeline.plan.check import Memory, check
from wavemare.pipeline.plan.chunked import forward_only
from wavemare.pipeline.plan.cursor import OF_A_STEP
from wavemare.pipeline.plan.lowering import Pair
from wavemare.pipeline.plan.plan import Action, Kind, Plan
from wavemare.pipeline.plan.run_plan import RunPlan

_MEASURED_STEPS = 3
"""They follow the first step, which is a warm-up."""


class PlanEngine(FlushingEngine):
    """Runs each optimizer step by a plan: split backward passes, and several stages on a rank.

    Losses, gradients and weights equal those of `PipelineEngine` bit for bit, where a weight is
    used once; with several stages per rank only without dropout, which draws other numbers. A plan
    with norms clips by a `LayerwiseNorm`, to the same bits wherever layers are. Stages on one rank
    hand each other tensors without a message.

    The schedule ``auto`` measures steps 2 to 4 of each run, and from then on takes the plan for
    these times; for a limit in bytes the first micro-batch counts what it saves. Meanwhile the host
    waits for the accelerator after each action.

    Attributes:
        splitter: Keeps what split passes still need.

    Args:
        args: As for `PipelineEngine`; a model with several stages per rank is a
            `ChunkedPipelineModule`.
        plan: One step of the model's stages; see `check`. That of the configuration's schedule if
            omitted.
        kwargs: As for `PipelineEngine`.

    Raises:
        PlanError: The plan is wrong, or is made for another pipeline.
        ConfigError: The model has other stages than the schedule, or stages would send each other
            parts of tensors.
        ModelError: See `SplitBackward`.
    """

    _homes: tuple[int, ...] = ()
    """For each stage its rank; empty while DeepSpeed's constructor runs."""
    _stage: int | None = None
    """The stage whose action runs."""
    _splits = False
    """Whether the step's backward passes are split."""

    def __init__(self, *args: Any, plan: Plan | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_pipe_partitioned or self.is_grad_partitioned:
            raise ConfigError(
                "pipeline.pipe_partitioned",
                True,
                "by a plan stages send each other whole tensors",
                'Set it and "grad_partitioned" to false, or use schedule 1f1b',
            )
        if self.grid.get_slice_parallel_world_size() > 1:
            raise ConfigError(
                "wavemare.pipeline.schedule",
                self.settings.pipeline.schedule,
                "it is not tested with layers that are split over ranks",
                "Use schedule 1f1b, or a model that is not split",
            )
        self._homes = tuple(getattr(self.module, "homes", range(self.num_stages)))
        self._is_chunked = len(self._homes) > self.num_stages
        self._labels: dict[int, Any] = {}
        self._given_plan = plan
        if plan is not None:
            check(plan)
        self._costs = EQUAL_PASSES
        # Micro-batches that a rank keeps, where the limit is in bytes and stages are measured.
        self._limit: float | None = None
        self._saved_bytes: dict[int, int] = {}  # by stage, what a micro-batch keeps
        self._events: list[Event] | None = None  # while steps are measured, their actions so far
        measures = plan is None and self.settings.pipeline.schedule == "auto"
        self._steps_to_measure = (1 + _MEASURED_STEPS) * measures
        self.splitter = SplitBackward(self.module)
        self._check_plan(self.plan)
        if self.plan.has_norms:
            self._norm = LayerwiseNorm(self)
        self._link = PeerLink(self.grid, self.device, self._homes, dynamic=self.dynamic_shape)

    @property
    def plan(self) -> Plan:
        """The plan of a step with the present number of micro-batches."""
        if self._given_plan is not None:
            return self._given_plan
        sizes = self.num_stages, self.micro_batches
        run = replace(RunPlan.of(self.settings.pipeline, *sizes, clips=False), costs=self._costs)
        if self._limit is not None:
            run = replace(run, memory_limit=self._limit / min(sizes))
        return run.whole

    def _check_plan(self, plan: Plan) -> None:
        """Check that a plan is one of this pipeline."""
        homes = tuple(plan.rank_of)
        given = (plan.num_steps, plan.num_stages, plan.micro_batches, homes)
        needed = (1, len(self._homes), self.micro_batches, self._homes)
        kinds = {action.kind for rank in plan.ranks for action in rank}
        others = ", ".join(sorted(kinds - set(self._handlers())))
        if given != needed or others or not plan.send_slots:
            raise PlanError(
                "plan",
                f"{plan.schedule} (steps, stages, micro_batches, homes: {given}; send_slots "
                f"{plan.send_slots}; other actions: {others or 'none'})",
                f"this pipeline needs {needed}, and sends that do not block",
                "Make the plan for these numbers, with send_slots of 1 or more",
            )

    # --- where a stage is ------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Whether the stage whose action runs is the first; else, whether this rank has it."""
        if not self._homes:
            return bool(super().is_first_stage())
        return self._homes[0] == self.stage_id if self._stage is None else self._stage == 0

    def is_last_stage(self) -> bool:
        """Whether the stage whose action runs is the last; else, whether this rank has it."""
        if not self._homes:
            return bool(super().is_last_stage())
        here = self._homes[-1] == self.stage_id
        return here if self._stage is None else self._stage == self._last_stage

    @property
    def active_stage(self) -> int:
        """The stage whose action runs; between actions one of this rank's."""
        return super().active_stage if self._stage is None else self._stage

    @property
    def _last_stage(self) -> int:
        return len(self._homes) - 1

    def _home_of(self, stage: int) -> int:
        return self._homes[stage]

    def _loss_stage_global_rank(self) -> int:
        return self.loss_rank

    def _hands_over(self, stage: int) -> bool:
        """Whether the stage after this one is on this rank, too."""
        return stage < self._last_stage and self._homes[stage + 1] == self._homes[stage]

    def _run(self, action: Action | Pair, handlers: Handlers) -> None:
        assert isinstance(action, Action)
        self._set_stage(None if action.kind in OF_A_STEP else action.stage)
        measures = self._events is not None and torch.is_grad_enabled()
        start_s = _now() if measures else 0.0
        super()._run(action, handlers)
        if measures and self._events is not None:
            self._events.append(Event(action, start_s, _now()))

    def _set_stage(self, stage: int | None) -> None:
        if stage == self._stage:  # attributes of a module are slow to set
            return
        self._stage = stage
        if stage is not None and self._is_chunked:
            self.module.activate(stage)

    # --- steps and evaluations -------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Any:
        """Train an optimizer step as ``deepspeed.PipelineEngine.train_batch``."""
        loss = super().train_batch(data_iter)
        if self._steps_to_measure:
            self._steps_to_measure -= 1
            if self._steps_to_measure == _MEASURED_STEPS:
                self._events = []
            elif not self._steps_to_measure:
                with PROGRESS.doing("the search of a schedule"):
                    self._plan_for_measured_times()
        return loss

    def _plan_for_measured_times(self) -> None:
        """Search a plan for what passes took; all ranks have the same times, and find the same."""
        own = self._events, self._saved_bytes
        ranks = gather(own, self.grid.get_pipe_parallel_group())
        self._events = None
        costs, before = measured_costs([events for events, _ in ranks], self._homes), self.plan
        before_s = simulate(before, costs).makespan_s
        old, self._costs = self._costs, costs
        if self.settings.pipeline.memory_bytes is not None:
            saved = {stage: kept for _, stages in ranks for stage, kept in stages.items()}
            self._fit(self.settings.pipeline.memory_bytes, [saved[s] for s in sorted(saved)])
        after_s = simulate(self.plan, costs).makespan_s
        if after_s >= before_s:
            after_s, self._costs, self._limit = before_s, old, None
        bound_s = lower_bound(self._homes, before.micro_batches, costs, split=True)
        if self.global_rank == 0:
            logging.getLogger("wavemare").info(
                "schedule auto: predicted passes of a step %.4g ms before, %.4g ms from now on "
                "(%.1f %% above the lower bound)",
                1e3 * before_s,
                1e3 * after_s,
                100 * (after_s / bound_s - 1),
            )

    def _fit(self, limit: float, saved: list[int]) -> None:
        """Find the most micro-batches that a plan keeps within a limit, given stages' bytes."""
        memory, most = Memory(tuple(saved)), math.inf
        for slots in range(2 * min(self.num_stages, self.micro_batches), 1, -1):
            self._limit = slots / 2
            most = max(map(memory.peak, self.plan.ranks))
            if most <= limit:
                return
        least = f"{math.ceil(most / 1e3) / 1e6:g}GB"
        raise ConfigError(
            "wavemare.pipeline.memory_limit",
            self.settings.pipeline.memory_limit,
            f"one micro-batch keeps {least} on a rank",
            f"Give {least} or more, smaller micro-batches or more stages",
        )

    def _forward_context(self, number: int) -> AbstractContextManager[None]:
        context = super()._forward_context(number)
        first = self._steps_to_measure > _MEASURED_STEPS and not number and torch.is_grad_enabled()
        return self._count_saved() if first else context

    @contextmanager
    def _count_saved(self) -> Iterator[None]:
        saved = SavedBytes(self.module)
        with saved.hooks():
            yield
        self._saved_bytes[self.active_stage] = saved.now

    def _train_schedule(self) -> StepSchedule:
        plan = self.plan
        self._check_plan(plan)
        self.tput_timer.start()
        return self._begin_plan(plan)

    def _inference_schedule(self, micro_batches: int) -> PipeSchedule:
        if not self._is_chunked:
            return super()._inference_schedule(micro_batches)
        return self._begin_plan(forward_only(self._homes, micro_batches))

    def _begin_plan(self, plan: Plan) -> StepSchedule:
        self._labels.clear()
        self._splits = plan.is_split
        schedule = StepSchedule(plan.ranks[self.stage_id])
        return self._begin(schedule, plan.receives(self.stage_id), plan.send_slots)

    @contextmanager
    def whole_passes(self, stage: int) -> Iterator[None]:
        """Return the context of a stage's passes that are not the plan's: none is split."""
        before = self._stage
        self._set_stage(stage)
        with self.splitter.paused():
            yield
        self._set_stage(before)

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        splits = torch.is_grad_enabled() and self._splits
        try:
            with self.splitter.step() if splits else nullcontext():
                super()._exec_schedule(pipe_schedule)
        finally:
            self._set_stage(None)

    # --- the actions -----------------------------------------------------------------------------

    def _handlers(self) -> Handlers:
        return {
            **super()._handlers(),
            Kind.BACKWARD_INPUT: self._do_backward_input,
            Kind.BACKWARD_WEIGHT: self._do_backward_weight,
            Kind.NORM: lambda _: None,  # the optimizer step asks for it
        }

    def _do_load(self, action: Action) -> None:
        batch = self._next_batch()
        if action.stage == 0:
            self._micro_batches[action.place] = MicroBatch(inputs=self._first_inputs(batch[0]))
        if self._homes[-1] == self.stage_id:
            self._labels[action.micro_batch] = batch[1]

    def _do_forward(self, action: Action) -> None:
        if self.is_last_stage():
            self._micro_batches[action.place].labels = self._labels.pop(action.micro_batch)
        super()._do_forward(action)

    def _end_forward(self, action: Action, micro_batch: MicroBatch) -> None:
        trains = torch.is_grad_enabled()
        if self.is_last_stage():
            if trains:
                self._add_loss(micro_batch.loss)
            else:
                loss = micro_batch.loss
                single = isinstance(loss, torch.Tensor)
                self.fwd_outputs.append(loss.detach() if single else [t.detach() for t in loss])
        elif self._hands_over(action.stage):
            following = action.stage + 1, action.micro_batch
            self._micro_batches[following] = MicroBatch(inputs=as_leaves(micro_batch.outputs))
        elif trains:
            self._expect_grad(action, micro_batch)
        if not trains and (self.is_last_stage() or self._hands_over(action.stage)):
            del self._micro_batches[action.place]

    def _do_send_activation(self, action: Action) -> None:
        super()._do_send_activation(action)
        if not torch.is_grad_enabled():
            del self._micro_batches[action.place]

    def _do_backward(self, action: Action) -> None:
        if self._splits:
            self._do_backward_input(action)
            self._do_backward_weight(action)
        else:
            self._backward_whole(action)

    def _do_backward_input(self, action: Action) -> None:
        with self.splitter.input_pass(action.place):
            self._backward_whole(action)

    def _backward_whole(self, action: Action) -> None:
        if self._hands_over(action.stage):
            following = action.stage + 1, action.micro_batch
            grads = self._micro_batches.pop(following).input_grads()
            self._micro_batches[action.place].grads = grads
        super()._do_backward(action)

    def _do_backward_weight(self, action: Action) -> None:
        self._accumulate(partial(self.splitter.backward_weight, action.place))


def _now() -> float:
    """Return the seconds on the host's clock once the passes that are queued have ended."""
    stream = get_accelerator().current_stream()  # not all streams: others wait for messages
    if stream is not None:
        stream.synchronize()
    return time.perf_counter()
