# SPDX-License-Identifier: Apache-2.0
"""From what the ranks measured to the rows of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from wavemare.bench.whale.bounds import (
    best_cut,
    cut_step_s,
    fluid_cut_step_s,
    share_gain,
    stage_seconds,
)
from wavemare.bench.whale.request import (
    ALONE,
    BASELINE,
    CHOICE,
    CUTS,
    PASSES,
    PLANNED,
    SHARES,
    WhaleJob,
)
from wavemare.errors import CommError
from wavemare.parallel.layout.layout import Layout
from wavemare.parallel.planner.speed import Line

__all__ = [
    "LOSS_TOLERANCE",
    "CutsMeasured",
    "SharesMeasured",
    "choice_rows",
    "cut_rows",
    "share_rows",
]

LOSS_TOLERANCE = 1e-6
"""By so much may losses of the same global batches differ."""


@dataclass(frozen=True, kw_only=True)
class SharesMeasured:
    """What came out of one group of data-parallel ranks.

    Args:
        shares: Samples of each rank in a micro-step, for each system.
        seconds: For each system, and for the passes alone of equal shares (`ALONE`) and of planned
            ones (`PASSES`): for each round those of each rank.
        losses: Of all steps of each system.
        predicted_s: Of a step with the planned shares, before gradients are reduced.
        speeds: Of each rank, that the plan was made from.
        disturbed: Steps that count though other programs disturbed them.
    """

    shares: Mapping[str, Sequence[int]]
    seconds: Mapping[str, Sequence[Sequence[float]]]
    losses: Mapping[str, Sequence[float]]
    predicted_s: float
    speeds: Sequence[Line]
    disturbed: int = 0


def share_rows(job: WhaleJob, measured: SharesMeasured) -> list[dict[str, Any]]:
    """Return a row for each system.

    Raises:
        CommError: Losses differ by more than `LOSS_TOLERANCE`.
    """
    # Of steps that were repeated one of them has more.
    pairs = zip(measured.losses[BASELINE], measured.losses[PLANNED], strict=False)
    gaps = [abs(before - own) for before, own in pairs]
    gap = max(gaps)
    if not all(gap <= LOSS_TOLERANCE for gap in gaps):
        reason = f"its losses are off by {gap:g}"
        raise CommError(
            "system", PLANNED, reason, "Report this: no measurement of it means anything"
        )
    alone_s = [median(own) for own in zip(*measured.seconds[ALONE], strict=True)]
    rounds = {name: [max(ranks) for ranks in measured.seconds[name]] for name in measured.shares}
    ideals = {BASELINE: 1.0, PLANNED: share_gain(alone_s)}
    # Ranks that all work all the time slow each other down more than those that wait.
    passes_s = {
        name: median(max(ranks) for ranks in measured.seconds[passes])
        for name, passes in ((BASELINE, ALONE), (PLANNED, PASSES))
    }
    return [
        {
            "part": SHARES,
            "system": name,
            "ranks": job.ranks,
            "devices": list(job.devices),
            "shares": list(shares),
            **_ratio(rounds, name, ideals[name]),
            "predicted_s": measured.predicted_s if name == PLANNED else None,
            "rho": _rho(job.devices, alone_s),
            "alone_s": alone_s,
            "passes_s": passes_s[name],
            "passes_ratio": passes_s[BASELINE] / passes_s[name],
            "speeds": [line._asdict() for line in measured.speeds],
            "loss_gap": gap,
            "losses": list(measured.losses[name]),
            "disturbed": measured.disturbed,
        }
        for name, shares in measured.shares.items()
    ]


@dataclass(frozen=True, kw_only=True)
class CutsMeasured:
    """What came out of one pipeline.

    Args:
        cuts: Bounds of the stages, for each system.
        table: (stages, layers): seconds of a micro-batch on each stage's device.
        seconds: For each system: for each round those of each stage, per step.
        compute_s: The same of a micro-batch's passes alone.
        predicted: For each system: those of each stage, for a micro-batch.
        disturbed: Rounds that count though other programs disturbed them.
    """

    cuts: Mapping[str, Sequence[int]]
    table: Sequence[Sequence[float]]
    seconds: Mapping[str, Sequence[Sequence[float]]]
    compute_s: Mapping[str, Sequence[Sequence[float]]]
    predicted: Mapping[str, Sequence[float]]
    disturbed: int = 0


def cut_rows(job: WhaleJob, measured: CutsMeasured) -> list[dict[str, Any]]:
    """Return a row for each system.

    What is ideal is told twice: by the table, and by the table with each rank's speed in the timed
    rounds, with which ratios compare.
    """
    count, schedule = job.micro_batches, job.schedule
    compute_s = {
        name: [median(own) for own in zip(*measured.compute_s[name], strict=True)]
        for name in measured.cuts
    }
    now = _at_speed_of_rounds(measured, compute_s)
    equal_s, best_s, _ = _steps(now, measured.cuts[BASELINE], count, schedule)
    table_equal_s, table_best_s, best = _steps(
        measured.table, measured.cuts[BASELINE], count, schedule
    )
    ideals = {BASELINE: 1.0, PLANNED: equal_s / best_s}
    rounds = {name: [max(ranks) for ranks in measured.seconds[name]] for name in measured.cuts}
    rows = []
    for name, cuts in measured.cuts.items():
        predicted = list(measured.predicted[name])
        errors = [p / m - 1 for p, m in zip(predicted, compute_s[name], strict=True)]
        rows.append(
            {
                "part": CUTS,
                "system": name,
                "schedule": schedule,
                "ranks": job.ranks,
                "devices": list(job.devices),
                "slow": job.devices.index(min(job.devices)),
                "micro_batches": count,
                "cuts": list(cuts),
                "best_cuts": list(best),
                **_ratio(rounds, name, ideals[name]),
                "ideal_before": table_equal_s / table_best_s if name == PLANNED else 1.0,
                "fluid": equal_s / fluid_cut_step_s(now, count, schedule),
                "predicted_s": cut_step_s(predicted, count, schedule),
                "stage_s": compute_s[name],
                "predicted_stage_s": predicted,
                "stage_error": max(map(abs, errors)),
                "table": [list(row) for row in measured.table],
                "disturbed": measured.disturbed,
            }
        )
    return rows


def _at_speed_of_rounds(
    measured: CutsMeasured, compute_s: Mapping[str, Sequence[float]]
) -> list[list[float]]:
    """Return the table scaled, for each rank, to what its stages took in the rounds."""
    expected = {name: stage_seconds(measured.table, cuts) for name, cuts in measured.cuts.items()}
    factors = [
        mean(compute_s[name][rank] / expected[name][rank] for name in measured.cuts)
        for rank in range(len(measured.table))
    ]
    return [
        [factor * spent for spent in row]
        for factor, row in zip(factors, measured.table, strict=True)
    ]


def _steps(
    table: Sequence[Sequence[float]], equal: Sequence[int], micro_batches: int, schedule: str
) -> tuple[float, float, tuple[int, ...]]:
    """Return the seconds of a step with equal cuts and with the best ones, and these."""
    best, best_s = best_cut(table, micro_batches, schedule)
    return cut_step_s(stage_seconds(table, equal), micro_batches, schedule), best_s, best


def choice_rows(
    job: WhaleJob,
    cluster: str,
    plans: Sequence[Layout],
    trials: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Return a row for each plan; ratios are to the one that was fastest.

    Args:
        job: Has the devices.
        cluster: Of `CLUSTERS`.
        plans: By predicted time: the first one is the planner's choice.
        trials: What was measured of each.
    """
    medians = [median(trial["rounds_s"]) for trial in trials]
    rows = []
    for place, (plan, trial, own) in enumerate(zip(plans, trials, medians, strict=True)):
        assert plan.predicted is not None, "plans of a search have predictions"
        rows.append(
            {
                "part": CHOICE,
                "system": f"{plan.stages}x{plan.tensor_parallel}x{plan.data_parallel}",
                "cluster": cluster,
                "ranks": job.ranks,
                "devices": list(job.devices),
                "chosen": place == 0,
                "median_s": own,
                "ratio": min(medians) / own,
                "ideal": 1.0,
                "bound_fraction": min(medians) / own,
                "predicted_s": plan.predicted.step_s,
                "error": plan.predicted.step_s / own - 1,
                "cuts": None if plan.cuts is None else list(plan.cuts),
                "shares": list(plan.shares),
                "micro_steps": plan.micro_steps,
                "zero_stage": plan.zero_stage,
                "order": None if plan.order is None else list(plan.order),
                "disturbed": trial["disturbed"],
                "rounds_s": list(trial["rounds_s"]),
            }
        )
    return rows


def _ratio(rounds: Mapping[str, Sequence[float]], name: str, ideal: float) -> dict[str, Any]:
    own = median(rounds[name])
    ratio = median(rounds[BASELINE]) / own
    return {
        "median_s": own,
        "ratio": ratio,
        "ideal": ideal,
        "bound_fraction": ratio / ideal,
        "rounds_s": list(rounds[name]),
    }


def _rho(devices: Sequence[float], alone_s: Sequence[float]) -> float:
    """Return how many times as fast the fast ranks are, by what they took alone."""
    slow = [spent for spent, share in zip(alone_s, devices, strict=True) if share == min(devices)]
    fast = [spent for spent, share in zip(alone_s, devices, strict=True) if share == max(devices)]
    return mean(slow) / mean(fast)
