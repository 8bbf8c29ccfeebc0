# SPDX-License-Identifier: Apache-2.0
"""From what the ranks measured to the rows of the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from wavemare.bench.training.request import BASELINE, BOUND, TrainingRequest

if TYPE_CHECKING:
    from wavemare.bench.training.quality import Curve

__all__ = ["Sample", "build_quality", "build_result"]

_CALLS = "sparse_calls_"


class Sample(NamedTuple):
    """One round of one system.

    Args:
        seconds: Per optimizer step, of the slowest rank.
        loss: Of the last step, mean over the ranks.
        link_bytes: What rank 0's link sent per step, headers included; None without a laboratory.
        figures: What rank 0's collectives did in the last step, by name.
    """

    seconds: float
    loss: float
    link_bytes: float | None
    figures: Mapping[str, float]


def build_result(
    request: TrainingRequest, samples: Mapping[str, Sequence[Sample]], *, task_name: str
) -> dict[str, Any]:
    """Return what is written to the file of a measurement of times, but for command and machine.

    Args:
        request: What was asked for.
        samples: All rounds of each system.
        task_name: What was learned.
    """
    medians = {name: median(s.seconds for s in rounds) for name, rounds in samples.items()}
    return {
        "baseline": BASELINE,
        "task": task_name,
        "request": asdict(request),
        "rows": [
            _row(request, name, rounds, medians) for name, rounds in samples.items() if rounds
        ],
    }


def build_quality(
    request: TrainingRequest, curves: Mapping[str, Curve], *, task_name: str
) -> dict[str, Any]:
    """Return what is written to the file of a comparison of losses, but for command and machine.

    ``gap_percent`` is by how much a system's last held-out loss is above the baseline's;
    ``same_losses`` is whether all its losses are the baseline's, bit for bit.

    Args:
        request: What was asked for.
        curves: What each system learned.
        task_name: What it was.
    """
    dense = curves[BASELINE]
    last = dense.held_out[-1][1]
    rows = []
    for name, curve in curves.items():
        own = curve.held_out[-1][1]
        rows.append(
            {
                "system": name,
                "ranks": request.ranks,
                "held_out": own,
                "gap_percent": 100 * (own / last - 1),
                "same_losses": curve.losses == dense.losses and curve.held_out == dense.held_out,
                "bytes_up": curve.bytes_up,
                "curve": [list(point) for point in curve.held_out],
                "losses": curve.losses,
            }
        )
    return {"baseline": BASELINE, "task": task_name, "request": asdict(request), "quality": rows}


def _row(
    request: TrainingRequest,
    name: str,
    rounds: Sequence[Sample],
    medians: Mapping[str, float],
) -> dict[str, Any]:
    own, figures = medians[name], rounds[-1].figures
    communication = _communication(name, medians)
    dense = _communication(BASELINE, medians)
    link = [s.link_bytes for s in rounds if s.link_bytes is not None]
    calls = {key.removeprefix(_CALLS): n for key, n in figures.items() if key.startswith(_CALLS)}
    up = figures.get("sparse_bytes_up")
    return {
        "system": name,
        "ranks": request.ranks,
        "mbit": request.mbit,
        "median_s": own,
        "ratio": medians[BASELINE] / own if BASELINE in medians else None,
        "communication_s": communication,
        # Less than nothing is noise, of which no ratio can be made.
        "communication_ratio": (
            dense / communication if dense is not None and communication else None
        ),
        "bytes_up": None if up is None else int(up),
        "link_bytes_up": median(link) if link else None,
        "density": figures.get("sparse_density"),
        "union": figures.get("sparse_union"),
        "executor": "+".join(sorted(calls)) or None,
        "loss": rounds[-1].loss,
        "rounds_s": [sample.seconds for sample in rounds],
    }


def _communication(name: str, medians: Mapping[str, float]) -> float | None:
    """Return what a step takes beyond one without messages; None if that is not known."""
    if name == BOUND or name not in medians or BOUND not in medians:
        return None
    return max(0.0, medians[name] - medians[BOUND])
