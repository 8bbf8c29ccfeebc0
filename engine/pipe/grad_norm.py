# SPDX-License-Identifier: Apache-2.0
"""The gradient norm over all stages, known without a barrier."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import get_gradient_clipping

from wavemare.engine.context import StageContext

__all__ = ["StageNorms", "clipping_limit", "count_all_stages"]


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
        exact: All stages', in a synchronous step; else None.
        share: This stage's share of all parameters.
    """

    def __init__(self, engine: StageContext) -> None:
        stage = engine.stage_id
        counts = torch.zeros(engine.num_stages, dtype=torch.float64, device=engine.device)
        trained = [p for p in engine.module.parameters() if p.requires_grad]
        counts[stage] = sum(getattr(p, "whole_numel", p.numel()) for p in trained)
        dist.all_reduce(counts, group=engine.grid.get_pipe_parallel_group())
        shares = (counts / counts.sum()).tolist()
        self.share: float = shares[stage]
        self._later_share = sum(shares[stage:])
        self._is_first = stage == 0
        self.reset()

    def reset(self) -> None:
        """Discard all earlier steps."""
        self.own = self._reported = self.later_stages_sq_norm = 0.0
        self.earlier_stages_sq_norm = 0.0 if self._is_first else math.nan
        self.exact: float | None = None
        self._stepped = False

    def begin_step(self) -> None:
        """Discard the exact norm of the step before."""
        self.exact = None

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
            # Before the first step: as if all gradients were alike.
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


def clipping_limit(config: Mapping[str, Any]) -> float:
    """Return the norm that gradients are clipped to; 0 for none. DeepSpeed's default is 1."""
    limit = get_gradient_clipping(config)
    return 0.0 if limit in (None, "auto") else float(limit)


def count_all_stages(module: Any) -> bool:
    """Have DeepSpeed's gradient norm count the weights of all of a pipeline's stages.

    Without ZeRO and in fp32 it counts only those of the first stage, unless weights are marked as
    split over ranks: what clipping does would depend on the cuts. Of tied weights one copy counts.

    Args:
        module: A ``PipelineModule`` whose layers are not split over ranks; what is marked stays.

    Returns:
        Whether weights of other stages count now that did not.
    """
    if module.mpu().get_slice_parallel_world_size() > 1:
        return False
    unmarked = [p for p in module.parameters() if not hasattr(p, "model_parallel")]
    for parameter in unmarked:
        parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)
    return bool(unmarked) and module.mpu().get_pipe_parallel_world_size() > 1
