# SPDX-License-Identifier: Apache-2.0
"""When the stages of a pipeline are done with a step, over links that are slow or fast.

The passes are those of 1F1B's order. A message takes its link for its bytes, one after the other,
and arrives after the latency; no rank waits for a message that it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from wavemare.pipeline.plan.orders import ahead

_FORWARD = 1 / 3
"""A forward pass's part of both passes."""
_PERIODS = 24
"""Micro-batches of whole periods."""


@dataclass(frozen=True)
class Hop:
    """What lies between two neighbours of a pipeline.

    Args:
        alpha_s: From the end of a message's transfer to its arrival.
        busy_s: For which a message of a micro-batch takes the link, in one direction.
    """

    alpha_s: float = 0.0
    busy_s: float = 0.0


@lru_cache(maxsize=50_000)
def pipeline_ends(
    stage_s: tuple[float, ...],
    hops: tuple[Hop, ...],
    micro_steps: int,
    slack: int = 0,
    *,
    drains: bool = True,
) -> tuple[float, ...]:
    """Return for each stage when its last backward pass of a step ends, in seconds.

    A long step is that of fewer micro-batches, and for each of the others the mean of the last
    ones: they come in periods of one, two or a few.

    Args:
        stage_s: Both passes of a micro-batch, for each stage.
        hops: Between each stage and the next one.
        micro_steps: Micro-batches of a step.
        slack: See `ahead`.
        drains: Whether the pipeline is emptied at each step; without it, all stages take the time
            of the steady state.
    """
    stages = len(stage_s)
    if stages == 1:
        return (micro_steps * stage_s[0],)
    few = 6 * ahead(0, stages, slack) + 6
    if drains and micro_steps <= few + _PERIODS:
        return _run(stage_s, hops, micro_steps, slack)
    short, long = (_run(stage_s, hops, count, slack) for count in (few, few + _PERIODS))
    each = [(b - a) / _PERIODS for a, b in zip(short, long, strict=True)]
    if not drains:
        return (max(*each, *stage_s) * micro_steps,) * stages
    more = micro_steps - few - _PERIODS
    return tuple(end + more * own for end, own in zip(long, each, strict=True))


def _run(
    stage_s: Sequence[float], hops: Sequence[Hop], micro_steps: int, slack: int
) -> tuple[float, ...]:
    last = len(stage_s) - 1
    leads = [ahead(stage, last + 1, slack) + 1 for stage in range(last + 1)]
    clock = [0.0] * (last + 1)
    forwarded, returned = [0] * (last + 1), [0] * (last + 1)
    # When each message arrives, and when each direction of a link is free.
    arrived: list[list[float]] = [[] for _ in range(last + 1)]
    given: list[list[float]] = [[] for _ in range(last + 1)]
    free = [[0.0, 0.0] for _ in range(last)]
    waiting = list(range(last + 1))
    while waiting:
        stage = waiting.pop()
        while returned[stage] < micro_steps:
            number = forwarded[stage]
            runs_forward = number < min(returned[stage] + leads[stage], micro_steps)
            inbox, place = (arrived, number) if runs_forward else (given, returned[stage])
            has_source = stage > 0 if runs_forward else stage < last
            start = clock[stage]
            if has_source:
                if len(inbox[stage]) <= place:
                    break
                start = max(start, inbox[stage][place])
            part = _FORWARD if runs_forward else 1 - _FORWARD
            clock[stage] = end = start + part * stage_s[stage]
            if runs_forward:
                forwarded[stage] += 1
                to, link, way = stage + 1, stage, 0
            else:
                returned[stage] += 1
                to, link, way = stage - 1, stage - 1, 1
            if 0 <= to <= last:
                hop = hops[link]
                free[link][way] = max(free[link][way], end) + hop.busy_s
                (arrived if runs_forward else given)[to].append(free[link][way] + hop.alpha_s)
                if to not in waiting:
                    waiting.append(to)
    return tuple(clock)


def estimated_ends(
    stage_s: Sequence[float],
    hops: Sequence[Hop],
    micro_steps: int,
    slack: int = 0,
    *,
    drains: bool = True,
) -> tuple[float, ...]:
    """Return about what `pipeline_ends` does, in a hundredth of its time.

    A micro-batch takes the slowest stage's time, or a link's, or that of the way from a stage to
    the last one and back, on which as many micro-batches are as the stage is ahead. The first one
    passes all stages and links.
    """
    last = len(stage_s) - 1
    period, way = max(stage_s), stage_s[last]
    for stage in reversed(range(last)):
        hop = hops[stage]
        way += stage_s[stage] + 2 * (hop.alpha_s + hop.busy_s)
        period = max(period, hop.busy_s, way / (ahead(stage, last + 1, slack) + 1))
    if not drains:
        return (micro_steps * period,) * len(stage_s)
    path = sum(stage_s) + sum(2 * (hop.alpha_s + hop.busy_s) for hop in hops)
    end = path + (micro_steps - 1) * period
    ends, back = [], 0.0
    for stage, spent in enumerate(stage_s):
        ends.append(end - back)
        back += (1 - _FORWARD) * spent
        back += hops[stage].alpha_s + hops[stage].busy_s if stage < len(hops) else 0.0
    return tuple(ends)
