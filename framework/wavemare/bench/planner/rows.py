# SPDX-License-Identifier: Apache-2.0
"""The rows of ``wavemare bench planner``, and the theoretical gain of unequal parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from statistics import median
from typing import Any

from wavemare.bench.planner.request import BASELINE, CHOICE, CUTS, PLANNED, SHARES, PlannerJob
from wavemare.bench.ranks import ratio_row
from wavemare.errors import CommError
from wavemare.parallel.layout.layout import Layout
from wavemare.pipeline.clock.simulate import Costs, simulate
from wavemare.pipeline.plan.schedules import one_f_one_b

LOSS_TOLERANCE = 1e-6
"""Losses of the same global batches may differ by so much."""
_FORWARD = 1 / 3
_plan = cache(one_f_one_b)

Rounds = Mapping[str, Sequence[Sequence[float]]]
"""For each system and round: the seconds of each rank."""


def share_rows(
    job: PlannerJob,
    shares: Mapping[str, Sequence[int]],
    rounds: Rounds,
    losses: Mapping[str, Sequence[float]],
    *,
    alone_s: Sequence[float],
    predicted_s: float,
) -> list[dict[str, Any]]:
    """Return a row for equal shares and one for planned shares.

    Args:
        job: Has the devices.
        shares: Samples of each rank in a micro-step, for each system.
        rounds: Of both systems.
        losses: Of all steps of each system.
        alone_s: Each rank's passes of equal shares, without messages.
        predicted_s: Seconds of a step with planned shares, before gradients are reduced.

    Raises:
        CommError: Losses differ by more than `LOSS_TOLERANCE`.
    """
    pairs = zip(losses[BASELINE], losses[PLANNED], strict=True)
    gaps = [abs(before - own) for before, own in pairs]
    gap = max(gaps)
    if not all(each <= LOSS_TOLERANCE for each in gaps):  # NaN is not
        reason = f"its losses are off by {gap:g}"
        raise CommError("system", PLANNED, reason, "Report this: its measurements mean nothing")
    return [
        {
            **_row(SHARES, name, job, rounds, share_gain(alone_s)),
            "shares": list(shares[name]),
            "predicted_s": predicted_s if name == PLANNED else None,
            "alone_s": list(alone_s),
            "loss_gap": gap,
            "losses": list(losses[name]),
        }
        for name in (BASELINE, PLANNED)
    ]


def cut_rows(
    job: PlannerJob,
    cuts: Mapping[str, Sequence[int]],
    rounds: Rounds,
    stage_s: Mapping[str, Sequence[float]],
    table: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for equal cuts and one for planned cuts.

    Args:
        job: Has devices and schedule.
        cuts: Bounds of the stages, for each system.
        rounds: Of both systems.
        stage_s: Measured seconds of each stage's passes of a micro-batch, for each system.
        table: (stages, layers): measured seconds of a micro-batch on each stage's device.
    """
    count, schedule = job.micro_batches, job.schedule
    equal_s = cut_step_s(_stage_seconds(table, cuts[BASELINE]), count, schedule)
    best, best_s = best_cut(table, count, schedule)
    rows = []
    for name in (BASELINE, PLANNED):
        predicted = _stage_seconds(table, cuts[name])
        errors = [p / m - 1 for p, m in zip(predicted, stage_s[name], strict=True)]
        slow = job.devices.index(min(job.devices))
        row = _row(f"{schedule}, rank {slow} slow", name, job, rounds, equal_s / best_s)
        row |= {
            "part": CUTS,
            "schedule": schedule,
            "slow": slow,
            "micro_batches": count,
            "cuts": list(cuts[name]),
            "best_cuts": list(best),
            "predicted_s": cut_step_s(predicted, count, schedule),
            "stage_s": list(stage_s[name]),
            "predicted_stage_s": predicted,
            "stage_error": max(map(abs, errors)),
            "table": [list(line) for line in table],
        }
        rows.append(row)
    return rows


def choice_rows(
    job: PlannerJob,
    cluster: str,
    layouts: Sequence[Layout],
    rounds_s: Sequence[Sequence[float]],
) -> list[dict[str, Any]]:
    """Return a row for each layout, the planner's choice first; ratios are to the fastest one."""
    fastest = min(rounds_s, key=median)
    rows = []
    for place, (layout, own) in enumerate(zip(layouts, rounds_s, strict=True)):
        assert layout.predicted is not None, "layouts of a search have predictions"
        timed = ratio_row(own, fastest)
        rows.append(
            {
                "part": CHOICE,
                "case": f"choice, {cluster}",
                "system": f"{layout.stages}x{layout.tensor_parallel}x{layout.data_parallel}",
                "cluster": cluster,
                "ranks": job.ranks,
                "devices": list(job.devices),
                "chosen": place == 0,
                **timed,
                "ideal": 1.0,
                "bound_fraction": timed["ratio"],
                "predicted_s": layout.predicted.step_s,
                "error": layout.predicted.step_s / timed["median_s"] - 1,
                "cuts": None if layout.cuts is None else list(layout.cuts),
                "shares": list(layout.shares),
                "micro_steps": layout.micro_steps,
                "zero_stage": layout.zero_stage,
                "order": None if layout.order is None else list(layout.order),
            }
        )
    return rows


def _row(case: str, name: str, job: PlannerJob, rounds: Rounds, ideal: float) -> dict[str, Any]:
    slowest = {system: [max(ranks) for ranks in rounds[system]] for system in rounds}
    timed = ratio_row(slowest[name], slowest[BASELINE])
    own = ideal if name == PLANNED else 1.0
    return {
        "part": job.part,
        "case": f"{case}, {job.ranks} ranks",
        "system": name,
        "ranks": job.ranks,
        "devices": list(job.devices),
        **timed,
        "ideal": own,
        "bound_fraction": timed["ratio"] / own,
    }


def share_gain(seconds: Sequence[float]) -> float:
    """Return the gain of shares in proportion to speed over equal shares.

    ``sum(s) / (N min(s))`` for speeds ``s``; (1 + rho) / 2 for as many fast ranks as slow ones, of
    which the fast are rho times as fast (Whale's bound for two types).

    Args:
        seconds: Of each rank for the same work.
    """
    speeds = [1 / spent for spent in seconds]
    return sum(speeds) / (len(speeds) * min(speeds))


def cut_step_s(stage_s: Sequence[float], micro_batches: int, schedule: str) -> float:
    """Return a pipeline step's seconds without messages.

    Args:
        stage_s: Of each stage for a micro-batch, a third of it forward.
        micro_batches: Of a step.
        schedule: ``1f1b``, which is simulated, or ``pipemare``, which takes the slowest stage's
            time for each micro-batch.
    """
    if schedule == "pipemare":
        return micro_batches * max(stage_s)
    costs = Costs(
        forward_s=tuple(spent * _FORWARD for spent in stage_s),
        backward_s=tuple(spent * (1 - _FORWARD) for spent in stage_s),
    )
    timeline = simulate(_plan(len(stage_s), micro_batches), costs)
    return max(events[-1].end_s for events in timeline.ranks)


def best_cut(
    table: Sequence[Sequence[float]], micro_batches: int, schedule: str
) -> tuple[tuple[int, ...], float]:
    """Return the bounds of the best of all cuts, and the seconds of its step.

    Args:
        table: (stages, layers): seconds of a micro-batch on each stage's device.
        micro_batches: Of a step.
        schedule: ``1f1b`` or ``pipemare``.
    """
    stages, layers = len(table), len(table[0])
    found = []
    for inner in combinations(range(1, layers), stages - 1):
        bounds = (0, *inner, layers)
        step_s = cut_step_s(_stage_seconds(table, bounds), micro_batches, schedule)
        found.append((step_s, bounds))
    step_s, best = min(found)
    return best, step_s


def _stage_seconds(table: Sequence[Sequence[float]], bounds: Sequence[int]) -> list[float]:
    spans = zip(table, bounds, bounds[1:], strict=False)
    return [sum(row[first:end]) for row, first, end in spans]
