# SPDX-License-Identifier: Apache-2.0
"""The plan that all ranks of a job run: proved, and the same on each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from wavemare.engine.launch.group import gather
from wavemare.errors import ConfigError, PlanError
from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.plan.files import GivenPlan
from wavemare.pipeline.plan.plan import RECEIVES, SENDS, Action
from wavemare.pipeline.plan.run_plan import RunPlan

_NEIGHBOURS = {kind: distance for kind, (_, distance) in (SENDS | RECEIVES).items()}


def agreed_plan(
    config: PipelineConfig,
    num_ranks: int,
    micro_batches: int,
    *,
    clips: bool,
    plan: GivenPlan | None = None,
) -> RunPlan:
    """Return the plan of a pipeline; all ranks call this, and fail alike.

    Args:
        config: The section ``pipeline``.
        num_ranks: Length of the pipeline.
        micro_batches: Per optimizer step.
        clips: Whether gradients are clipped.
        plan: The caller's, in place of the schedule.

    Raises:
        ConfigError: There are two plans, or a file cannot be read.
        PlanError: The plan is wrong, or not the same on all ranks.
    """
    key, value = "wavemare.pipeline.schedule", config.schedule
    run, error = None, None
    try:
        if plan is not None and config.schedule != "1f1b":
            reason = "initialize was given a plan, too, which is another schedule"
            raise ConfigError(key, value, reason, "Leave one of them out")
        run = RunPlan.of(config, num_ranks, micro_batches, clips=clips, plan=plan)
        settings = config.pipemare
        run.check(warmup_steps=settings.warmup_steps, drain_interval=settings.drain_interval)
        text = repr(run) if run.plan is None else str(run.plan)
        found = hashlib.sha256(text.encode()).hexdigest()[:12]
    except (ConfigError, PlanError) as failure:
        error, found = failure, f"{type(failure).__name__}: {failure}"
    ranks = gather(found)
    for rank, other in enumerate(ranks):
        if other != ranks[0]:
            reason = f"the ranks' plans differ: rank 0 has {ranks[0]}, rank {rank} has {other}"
            raise PlanError(
                key if plan is None else "plan", value, reason, "Give all ranks the same one"
            )
    if run is None or error is not None:
        assert error is not None
        raise error
    return run


def peer_of(ranks: Sequence[int], homes: Sequence[int], action: Action) -> int | None:
    """Return the global rank of a message's other side; None if it is no message.

    Args:
        ranks: Global ranks of the pipeline.
        homes: For each stage its rank in the pipeline.
        action: Of one of these ranks.
    """
    distance = _NEIGHBOURS.get(action.kind)
    return None if distance is None else int(ranks[homes[action.stage + distance]])
