# SPDX-License-Identifier: Apache-2.0
"""The optimizer of one stage, which steps without the other stages; and the norms of all stages.

DeepSpeed's optimizers reduce gradient norms and overflow flags over all stages at each step, even
without clipping: a barrier. Here a stage steps alone. It computes its own norm, and
chooses its clipping bound so that the result equals clipping by the norm of all stages.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist

from wavemare.engine.optim.adapter import adapt
from wavemare.errors import ConfigError
from wavemare.pipeline.config import PipeMareConfig
from wavemare.pipeline.optim.feedback import UpdateFeedback
from wavemare.pipeline.plan.orders import ahead
from wavemare.pipeline.staleness.staleness import lr_factor, mean_staleness

if TYPE_CHECKING:
    from wavemare.engine.pipe.engine import PipelineEngine

_EPSILON = 1e-6  # DeepSpeed's own, in the denominator of the clipping coefficient


class StageOptimizer:
    """What the asynchronous engine needs of DeepSpeed's optimizers, whichever it is.

    Args:
        engine: The pipeline engine that holds the optimizer.
        clip: ``gradient_clipping``; 0 for none.
        config: Says whether the learning rate is rescheduled (PipeMare's T1).

    Attributes:
        feeds_back: Whether its steps correct the ones before.

    Raises:
        ConfigError: The optimizer needs more than its own stage.
    """

    def __init__(self, engine: PipelineEngine, *, clip: float, config: PipeMareConfig) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._clip = clip
        self._adapter = adapt(engine)
        basic = engine.basic_optimizer
        if not self._adapter.steps_one_stage:
            raise ConfigError(
                "optimizer",
                type(self._optimizer).__name__,
                "this wrapper of DeepSpeed's steps all stages together",
                "Use fp32 or bf16, with ZeRO stage 0 or 1",
            )
        if isinstance(basic, torch.optim.LBFGS):
            raise ConfigError(
                "optimizer",
                type(basic).__name__,
                "its line search evaluates all stages at the same weights",
                "Use an optimizer of element-wise state, such as AdamW, Adam or SGD",
            )
        # The ranks that share this stage's layers, which all are at the same step.
        splits = engine.grid.get_slice_parallel_world_size() > 1
        self._group = engine.grid.get_slice_parallel_group() if splits else None
        self._group_rank = engine.grid.get_slice_parallel_rank()
        self._adapter.detach_stage(self._group, self._group_rank)
        self._mean_staleness = 0.0
        if config.lr_rescheduling.enabled:
            self._reschedule(config)
        stale = ahead(engine.stage_id, engine.num_stages, config.slack) > 0
        self.feeds_back = config.error_feedback and stale
        if self.feeds_back:
            UpdateFeedback(basic, lambda: self._mean_staleness)

    def _reschedule(self, config: PipeMareConfig) -> None:
        # In the optimizer's own hooks: a scheduler that derives the next rate from the present
        # one must not see the divided rate.
        rates: list[float] = []

        def divide(optimizer: Any, args: Any, kwargs: Any) -> None:
            engine = self._engine
            tau = mean_staleness(
                engine.stage_id, engine.num_stages, engine.micro_batches, config.slack
            )
            step = engine.global_steps - config.warmup_steps
            anneal_steps = config.lr_rescheduling.anneal_steps
            factor = lr_factor(step, tau, anneal_steps) if step >= 0 else 1.0
            rates[:] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

        def put_back(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

        basic = self._engine.basic_optimizer
        basic.register_step_pre_hook(divide)
        basic.register_step_post_hook(put_back)

    def note_staleness(self, mean: float) -> None:
        """Take the mean staleness of the micro-batches that the next step is made of, in steps."""
        self._mean_staleness = mean

    def norm_squared(self) -> float:
        """Return the squared norm of the stage's gradients, over all its ranks' shares.

        It is not finite if any of them is not.
        """
        return float(self._adapter.norm_squared(self._group, self._group_rank))

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients, before they are reduced."""
        gradients = self._adapter.accumulated_gradients()
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def clip(self, own_squared: float, total_squared: float) -> None:
        """Make the next step clip by the norm of all stages.

        Args:
            own_squared: Squared norm of this stage's gradients.
            total_squared: Squared norm of all stages' gradients, or the best estimate of it.
        """
        # If a stage has an infinite gradient, the others scale theirs to zero.
        total = total_squared**0.5 if math.isfinite(total_squared) else math.inf
        coefficient = self._clip / (total + _EPSILON)
        if self._optimizer is not self._engine.basic_optimizer:
            # It multiplies by min(1, bound / (own + eps)), and takes 0 for no bound.
            own = self._adapter.clipped_norm(own_squared**0.5, self._group)
            bound = coefficient * (own + _EPSILON)
            self._optimizer.clip_grad = max(bound, sys.float_info.min)
            return
        gradients = self._adapter.gradients()
        if coefficient < 1 and gradients:
            torch._foreach_mul_(gradients, coefficient)

    def end_step(self) -> None:
        """Put back what a step has changed for itself, and keep the stages' schedules in step."""
        if self._optimizer is not self._engine.basic_optimizer:
            self._optimizer.clip_grad = self._clip  # checkpoints contain it
        scheduler = self._engine.lr_scheduler
        if scheduler is not None and not self._engine.was_step_applied():
            scheduler.step()  # DeepSpeed leaves it where a stage skips its step


class StageNorms:
    """Squared gradient norms: a stage's own, and those that its neighbours report.

    Backward passes reach a stage after all later ones, so the later stages' norms of the very same
    step arrive in time. Earlier stages report the norm of their last step. On the first stage the
    norm of all stages is exact.

    Args:
        engine: The pipeline engine.

    Attributes:
        own: This stage's, at the present step.
        later_stages_sq_norm: All later stages', at the present step.
        earlier_stages_sq_norm: All earlier stages', at their last step; nan before it.
        exact: All stages', once they are known in a synchronous step; the engine resets it to None.
    """

    def __init__(self, engine: PipelineEngine) -> None:
        stage = engine.stage_id
        counts = torch.zeros(engine.num_stages, dtype=torch.float64, device=engine.device)
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        counts[stage] = sum(getattr(p, "whole_numel", p.numel()) for p in trained)
        dist.all_reduce(counts, group=engine.grid.get_pipe_parallel_group())
        self._later_share = float(counts[stage:].sum() / counts.sum())
        self._is_first = stage == 0
        self.reset()

    def reset(self) -> None:
        """Discard all earlier steps."""
        self.own = self._reported = self.later_stages_sq_norm = 0.0
        self.earlier_stages_sq_norm = 0.0 if self._is_first else math.nan
        self.exact: float | None = None
        self._stepped = False

    def end_step(self) -> None:
        """Note that the step with this stage's own norm is complete, unless it was skipped."""
        if math.isfinite(self.own):
            self._reported, self._stepped = self.own, True

    @property
    def up_to_here(self) -> float:
        """The squared norm of this stage and all earlier ones, for the next stage."""
        return self._reported + self.earlier_stages_sq_norm if self._stepped else math.nan

    @property
    def from_here(self) -> float:
        """The squared norm of this stage and all later ones, for the previous stage."""
        return self.own + self.later_stages_sq_norm

    @property
    def total(self) -> float:
        """The squared norm of all stages, exact or estimated."""
        if self.exact is not None:
            return self.exact
        if math.isnan(self.earlier_stages_sq_norm):
            # Before the first step: assume the same mean square on every stage.
            return self.from_here / self._later_share
        return self.from_here + self.earlier_stages_sq_norm

    def set_exact(self, total: float) -> None:
        """Take the norm of all stages in a synchronous step."""
        self.exact = total
        self.earlier_stages_sq_norm = max(total - self.from_here, 0.0)

    def state_dict(self) -> dict[str, float | bool]:
        """Return what the next step needs to be the same after a resume."""
        return {
            "own": self._reported,
            "prefix": self.earlier_stages_sq_norm,
            "stepped": self._stepped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state."""
        self.own = self._reported = state["own"]
        self.earlier_stages_sq_norm, self._stepped = state["prefix"], state["stepped"]
