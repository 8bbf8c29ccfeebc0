# SPDX-License-Identifier: Apache-2.0
"""The beginning of the plan that a pipeline engine is going to follow, to be checked before it is.

The engines take their actions step by step from the same generators; no engine holds a plan.
"""

from __future__ import annotations

from dataclasses import replace

from wavemare.pipeline.config import PipelineConfig
from wavemare.pipeline.passes import pair_passes
from wavemare.pipeline.plan import Plan
from wavemare.pipeline.schedules import one_f_one_b, paired_one_f_one_b, pipemare
from wavemare.pipeline.staleness import max_staleness

__all__ = ["MOST_PASSES", "run_plan"]

MOST_PASSES = 512
"""Forward passes, over all stages, to make a plan of: to check so many takes some 0.02 s."""


def run_plan(config: PipelineConfig, num_stages: int, micro_batches: int, *, clips: bool) -> Plan:
    """Return the plan of a run's first optimizer steps, as far as later ones are not like them.

    Of 1F1B that is one step. Of PipeMare it is a synchronous one if there is a warm-up, and those
    in which staleness grows to its most, the last of which drains the pipeline. Where that is more
    than `MOST_PASSES`, there are fewer steps (of PipeMare two at least), and then fewer
    micro-batches.

    Args:
        config: Schedule and its settings.
        num_stages: Length of the pipeline.
        micro_batches: Per optimizer step.
        clips: Whether gradients are clipped.

    Raises:
        PlanError: A number is out of range.
    """
    if config.schedule != "pipemare":
        make = paired_one_f_one_b if config.pair_passes else one_f_one_b
        return make(num_stages, _bounded(micro_batches, num_stages))
    settings = config.pipemare
    warmup_steps = min(settings.warmup_steps, 1)
    least = warmup_steps + 2
    size = _bounded(micro_batches, num_stages * least)
    steps = warmup_steps + max_staleness(0, num_stages, size, settings.slack) + 1
    plan = pipemare(
        num_stages,
        size,
        min(steps, max(least, MOST_PASSES // (num_stages * size))),
        warmup_steps=warmup_steps,
        drain_interval=settings.drain_interval,
        **settings.stream_options(clips=clips),
    )
    if not config.pair_passes:
        return plan
    return replace(plan, ranks=tuple(tuple(pair_passes(actions)) for actions in plan.ranks))


def _bounded(micro_batches: int, passes_of_each: int) -> int:
    return min(micro_batches, max(1, MOST_PASSES // passes_of_each))
