# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks layouts``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median
from typing import Annotated, Any, ClassVar

from pydantic import Field, PositiveInt

from benchmarks.layouts.clusters import CLUSTERS
from benchmarks.request import GptRequest, NonNegative, Positive
from wavemare.cli.options import check_names
from wavemare.observe.tables import Column, Row

CHOSEN, METIS, EQUAL = "chosen", "metis", "equal"
"""The planner's choice, the other rule's, and equal parts; further layouts of the planner's have
numbers."""


class LayoutsRequest(GptRequest):
    """Measure the planner's layouts on emulated clusters beside their predictions.

    Ranks on emulated hosts (they need root) train a GPT whose blocks sleep as long as a device of
    their speed would compute. Links have limited rates, which are measured first. For each cluster
    the planner's best layouts are measured, beside Metis' rule and equal parts.

    For example: python -m benchmarks layouts --clusters 2:1 --rounds 3 --json result.json
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "cluster": Column("cluster"),
        "system": Column("system"),
        "P x D": Column("axes"),
        "cuts": Column("cuts"),
        "samples": Column("shares"),
        "other": Column("other"),
        "predicted ms": Column("predicted_s", ".0f", 1000),
        "ms": Column("median_s", ".0f", 1000),
        "error": Column("error", "+.1%"),
        "of the best": Column("of_best", ".1%"),
    }

    layers: PositiveInt = 12
    hidden: PositiveInt = 128
    heads: PositiveInt = 4
    vocabulary: PositiveInt = 32
    sequence: Annotated[int, Field(ge=2)] = 32
    batch: PositiveInt = 32
    """Samples of an optimizer step, of all ranks."""

    clusters: tuple[str, ...] = tuple(CLUSTERS)
    """Names of clusters."""

    block_ms: Positive = 8.0
    """Milliseconds of a block's forward pass of one sample on a device of speed 1; the backward
    pass takes twice as long."""

    overhead_ms: NonNegative = 12.0
    """Milliseconds of a block's passes of a micro-batch that do not depend on its samples: small
    micro-batches use a device badly."""

    keep: PositiveInt = 3
    """Layouts of the planner that are measured."""

    timeout_s: Positive = 240.0
    """Seconds that the ranks of one layout may take."""

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        check_names("--clusters", self.clusters, tuple(CLUSTERS), "cluster")

    def run(self) -> dict[str, Any]:
        """Measure all clusters, one after the other."""
        from benchmarks.layouts.run import measure_clusters

        return measure_clusters(self)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return (
            f"GPT, {self.layers} blocks of {self.hidden} that sleep, {self.batch} x "
            f"{self.sequence} tokens per step"
        )

    def case(self, row: Row) -> str:
        """Return the cluster."""
        return str(row["cluster"])

    def remarks(self, result: Row) -> Iterator[str]:
        """Yield the lines below the table."""
        yield from super().remarks(result)
        errors = [abs(row["error"]) for row in result["rows"]]
        yield (
            f"error of {len(errors)} predictions: median {median(errors):.1%}, worst "
            f"{max(errors):.1%}"
        )
        chosen = {row["cluster"]: row for row in result["rows"] if row["system"] == CHOSEN}
        worst = min(row["of_best"] for row in chosen.values())
        yield f"the choice, of the best measured: worst {worst:.1%}"
        gains = {
            row["cluster"]: row["median_s"] / chosen[row["cluster"]]["median_s"]
            for row in result["rows"]
            if row["system"] == METIS
        }
        unlike = [gain for name, gain in gains.items() if chosen[name]["unlike"]]
        for name, values in (("all clusters", [*gains.values()]), ("unlike replicas", unlike)):
            if values:
                yield (
                    f"speed beside Metis' rule, {name} ({len(values)}): median "
                    f"{median(values):.3f}, from {min(values):.3f} to {max(values):.3f}"
                )
