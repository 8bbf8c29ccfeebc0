# SPDX-License-Identifier: Apache-2.0
"""From the times of all rounds and ranks to the rows of the result: medians and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from wavemare.bench.recorder import Busy
from wavemare.bench.request import PipelineRequest
from wavemare.bench.systems import BASELINE, BOUND, SYSTEMS

__all__ = ["Sample", "Samples", "build_rows", "skipped", "step_medians"]


class Sample(NamedTuple):
    """One round of one system on one rank.

    Args:
        seconds: Per optimizer step.
        busy: Where they went; None if the system's actions cannot be told apart.
    """

    seconds: float
    busy: Busy | None = None

    @property
    def waiting_s(self) -> float:
        """Seconds that were neither compute nor optimizer."""
        assert self.busy is not None
        return self.seconds - self.busy.compute_s - self.busy.step_s


Samples = Mapping[tuple[str, int], Sequence[Sequence[Sample]]]
"""For each system and number of micro-batches: for each timed round a sample of each rank."""


def step_medians(samples: Samples) -> dict[tuple[str, int], float]:
    """Return the median over the rounds of the slowest rank's seconds per optimizer step."""
    return {key: median(_slowest(rounds)) for key, rounds in samples.items()}


def build_rows(request: PipelineRequest, samples: Samples) -> list[dict[str, Any]]:
    """Return the rows of the result, by number of micro-batches and then by system.

    Args:
        request: What was measured.
        samples: What came out.
    """
    medians = step_medians(samples)
    return [
        _row(request, name, count, samples[name, count], medians)
        for count in request.micro_batches
        for name in SYSTEMS
        if (name, count) in samples
    ]


def skipped(request: PipelineRequest) -> list[dict[str, Any]]:
    """Return what was not measured, with the reasons."""
    obstacles = (
        (name, count, request.obstacle(name, count))
        for count in request.micro_batches
        for name in request.systems
    )
    return [
        {"system": name, "stages": request.stages, "micro_batches": count, "reason": reason}
        for name, count, reason in obstacles
        if reason is not None
    ]


def _slowest(rounds: Sequence[Sequence[Sample]]) -> list[float]:
    return [max(sample.seconds for sample in ranks) for ranks in rounds]


def _row(
    request: PipelineRequest,
    name: str,
    count: int,
    rounds: Sequence[Sequence[Sample]],
    medians: Mapping[tuple[str, int], float],
) -> dict[str, Any]:
    own = medians[name, count]
    ideal = SYSTEMS[name].ideal
    row: dict[str, Any] = {
        "system": name,
        "stages": request.stages,
        "micro_batches": count,
        "median_s": own,
        "ratio": _over(medians.get((BASELINE, count)), own),
        "ideal": ideal(request.stages, count) if ideal else None,
        "bound_fraction": _over(medians.get((BOUND, count)), own),
        "steps_per_round": request.steps(count),
        "rounds_s": _slowest(rounds),
        **_shares(rounds),
    }
    if request.stage_seconds is not None:
        row["utilisation"] = request.stage_seconds * count / own
        row["ideal_utilisation"] = (
            1.0 if SYSTEMS[name].steady else _one_f_one_b_utilisation(request.stages, count)
        )
    return row


def _over(numerator: float | None, denominator: float) -> float | None:
    return None if numerator is None else numerator / denominator


def _one_f_one_b_utilisation(stages: int, micro_batches: int) -> float:
    return micro_batches / (micro_batches + stages - 1)


def _shares(rounds: Sequence[Sequence[Sample]]) -> dict[str, Any]:
    """Return each rank's medians, their mean share of busy time, and what the busiest one waits."""
    if any(sample.busy is None for samples in rounds for sample in samples):
        return {"waiting": None, "busy": None, "ranks": None}
    ranks = [_rank_medians(samples) for samples in zip(*rounds, strict=True)]
    bottleneck = max(ranks, key=lambda rank: rank["compute_s"] + rank["step_s"])
    busy = [(rank["compute_s"] + rank["step_s"]) / rank["seconds"] for rank in ranks]
    return {
        "waiting": bottleneck["waiting_s"] / bottleneck["seconds"],
        "busy": sum(busy) / len(busy),
        "ranks": ranks,
    }


def _rank_medians(samples: Sequence[Sample]) -> dict[str, float]:
    busy = [sample.busy for sample in samples if sample.busy is not None]
    parts = {name: median(getattr(b, name) for b in busy) for name in Busy._fields}
    return {
        "seconds": median(sample.seconds for sample in samples),
        "waiting_s": median(sample.waiting_s for sample in samples),
        **parts,
    }
