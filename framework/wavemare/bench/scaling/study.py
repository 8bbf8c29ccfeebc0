# SPDX-License-Identifier: Apache-2.0
"""Measured points, the curves through them, and how far they are apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wavemare.bench.scaling import collectives, pipelines
from wavemare.bench.scaling.point import Point
from wavemare.bench.sparse.request import Case
from wavemare.errors import DataError

__all__ = [
    "CASES",
    "COUNTS",
    "PIPELINE_KEYS",
    "SPARSE_KEYS",
    "collective_rows",
    "pipeline_rows",
    "read_results",
]

Row = dict[str, Any]

COUNTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Stages, or ranks."""
CASES = tuple(
    Case(*case) for case in (("random", 0.1), ("random", 0.01), ("zipf", 0.1), ("zipf", 0.01))
)
_DENSITIES = (0.02, 0.05, 0.2, 0.5, 1.0)
"""Of random blocks, beside those of `CASES`."""
_COMPUTE_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_STAGES = 8
MEBIBYTES = (1, 4, 16, 64, 256, 1024)
_RANKS = 8
_BASELINES = ("deepspeed-1f1b", "dense")


PIPELINE_KEYS = frozenset({"stages", "micro_batches", "median_s", "ranks"})
SPARSE_KEYS = frozenset({"ranks", "mbit", "pattern", "density", "median_s"})
"""What each row of a result has."""


def read_results(option: str, files: Iterable[Path], keys: Set[str]) -> list[Mapping[str, Any]]:
    """Read what other commands wrote with ``--json``.

    Args:
        option: Names them.
        files: Of one command.
        keys: That each of their rows has.

    Raises:
        DataError: A file is not there or not such a result.
    """
    results: list[Mapping[str, Any]] = []
    for file in files:
        remedy = "Give files that `wavemare bench` wrote with --json"
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(option, str(file), str(error), remedy) from None
        rows = result.get("rows") if isinstance(result, dict) else None
        if not isinstance(rows, list) or not rows:
            raise DataError(option, str(file), "it has no rows", remedy)
        if not all(isinstance(row, dict) and keys <= row.keys() for row in rows):
            reason = f"its rows lack some of {', '.join(sorted(keys))}: it is of another command"
            raise DataError(option, str(file), reason, remedy)
        results.append(result)
    return results


def pipeline_rows(
    results: Sequence[Mapping[str, Any]], counts: Sequence[int] = COUNTS
) -> tuple[list[Row], Mapping[str, Any]]:
    """Return rows over stages and over a stage's compute, and the calibrated costs by system.

    Args:
        results: Of ``bench pipeline``.
        counts: Predicted numbers of stages.

    Raises:
        DataError: A system was not measured.
    """
    rows, costs = [], {}
    over_stages: list[Point] = []
    over_compute: list[tuple[float, Point]] = []
    for system, found in pipelines.measured(results).items():
        if not found:
            remedy = (
                "Run `wavemare bench pipeline --synthetic` with as many micro-batches as stages"
            )
            raise DataError("--pipeline", system, "none of the files has it", remedy)
        shortest = min(found)
        known = pipelines.calibrate(system, found[shortest])
        costs[system] = {"stages": shortest, **asdict(known)}
        points = [Point(system, stages, row["median_s"]) for stages, row in found.items()]
        rows += _rows("stages", "stages", points, measured=True, calibrated=shortest)
        over_stages += pipelines.predict(system, counts, known)
        for compute_s in _COMPUTE_S:
            other = pipelines.StageCosts(compute_s, known.step_s, known.message_s)
            over_compute += [(compute_s, p) for p in pipelines.predict(system, [_STAGES], other)]
    rows += _rows("stages", "stages", over_stages, measured=False)
    for compute_s, point in sorted(over_compute, key=lambda pair: pair[0]):
        rows += _rows("compute", "stages", [point], measured=False, compute_s=compute_s)
    return _with_ratios(rows, "stages"), costs


def collective_rows(
    results: Sequence[Mapping[str, Any]],
    transport: str,
    counts: Sequence[int] = COUNTS,
    sizes: Sequence[int] = MEBIBYTES,
) -> tuple[list[Row], Mapping[str, Any]]:
    """Return rows over ranks, density and the size of the gradient, and the calibrated rates.

    Args:
        results: Of ``bench sparse``, with links of one rate and gradients of one size.
        transport: Whose rates, ``mpi`` or ``gloo``.
        counts: Predicted numbers of ranks.
        sizes: Predicted MiB of the gradient.

    Raises:
        DataError: The results are of unlike links or sizes, or have no rates of the transport.
    """
    alike = {(r["mebibytes"], r["block"], r["rows"][0]["mbit"]) for r in results}
    if len(alike) != 1:
        reason = "MiB, elements of a block and Mbit/s must be alike"
        raise DataError("--sparse", sorted(map(str, alike)), reason, "Give files of like runs")
    (mebibytes, block, mbit) = alike.pop()
    fewest = min(results, key=lambda result: int(result["rows"][0]["ranks"]))
    known_ranks = fewest["rows"][0]["ranks"]
    if transport not in fewest["constants"]:
        reason = f"the result of {known_ranks} ranks has no rates of it"
        raise DataError("--transport", transport, reason, "Measure wavemare-auto-gloo for gloo")
    known = collectives.constants_of(fewest, transport)

    def predicted(part: str, case: Case, counts: Sequence[int], size: float) -> list[Row]:
        points, chosen = collectives.curves(
            case,
            counts,
            known,
            known_ranks,
            num_blocks=round(size * 2**20 / 4 / block),
            block=block,
        )
        parameters = {"pattern": case.pattern, "density": case.density, "mebibytes": size}
        rows = _rows(part, "ranks", points, measured=False, **parameters)
        for row in rows:
            row["executor"] = chosen[row["ranks"]] if row["system"] != "dense" else None
        return rows

    def over_ranks(part: str, case: Case) -> list[Row]:
        parameters = {"pattern": case.pattern, "density": case.density, "mebibytes": mebibytes}
        points = collectives.measured(results, case, transport)
        rows = _rows(part, "ranks", points, measured=True, calibrated=known_ranks, **parameters)
        return rows + predicted(part, case, counts, mebibytes)

    rows: list[Row] = []
    for case in CASES:
        rows += over_ranks("ranks", case)
        for size in sizes:
            rows += predicted("size", case, [_RANKS], size)
    for density in _DENSITIES:
        rows += over_ranks("density", Case("random", density))
    rates = {"ranks": known_ranks, "mbit": mbit, "transport": transport, **asdict(known)}
    return _with_ratios(rows, "ranks"), rates


def _rows(
    part: str, name: str, points: Iterable[Point], *, measured: bool, **parameters: Any
) -> list[Row]:
    calibrated = parameters.pop("calibrated", None)
    return [
        {
            "part": part,
            "system": point.system,
            name: point.processes,
            **parameters,
            "measured": measured,
            "calibrates": point.processes == calibrated,
            "median_s": point.seconds,
        }
        for point in points
    ]


def _with_ratios(rows: list[Row], name: str) -> list[Row]:
    """Add to each row how many times as fast as the baseline of its case it is."""
    keys = ("part", name, "measured", "pattern", "density", "mebibytes", "compute_s")

    def case(row: Row) -> tuple[Any, ...]:
        return tuple(row.get(key) for key in keys)

    baselines = {case(row): row["median_s"] for row in rows if row["system"] in _BASELINES}
    for row in rows:
        baseline = baselines.get(case(row))
        row["ratio"] = baseline / row["median_s"] if baseline is not None else None
    return rows
