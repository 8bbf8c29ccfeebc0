# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks wave``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from benchmarks.request import ComputeRequest
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row

BASELINE = "accumulation"
IN_PHASE, DOMINO, TICK_TOCK = "in-phase", "domino", "tick-tock"
SYSTEMS = (BASELINE, IN_PHASE, DOMINO, TICK_TOCK)
_MIB = 2**20


class WaveRequest(ComputeRequest):
    """Measure gradient accumulation, two waves in phase, Domino's halves, and tick-tock.

    A GPT-2 or a Llama is split by tensors over the ranks, or a Mixtral's experts are divided.
    Tick-tock hides their collectives behind the other wave. Ratios are to accumulation.

    For example: python -m benchmarks wave --exposed 25 --json result.json
    """

    measured_by: ClassVar[str] = "benchmarks.wave.measure:measure"
    columns: ClassVar[Mapping[str, Column]] = {
        "exposed": Column("exposed", ".0%"),
        "measured": Column("measured_exposed", ".1%"),
        "Mbit/s": Column("mbit", ".0f"),
        "system": Column("system"),
        "ms": Column("median_s", ".0f", 1000),
        "ratio": Column("ratio", ".3f"),
        "model": Column("model", ".3f"),
        "waiting": Column("waiting", ".1%"),
        "hidden": Column("hidden", ".0%"),
    }

    exposed: tuple[Annotated[int, Field(ge=0, le=80)], ...] = (0, 10, 25, 40)
    """Percentages of accumulation's time that collectives take. The links get the matching speed
    (needs root); 0 leaves them without a limit."""

    parallel: Literal["tensor", "experts"] = "tensor"
    """What the ranks share: every layer, or two experts each, of which two serve a token."""

    llama: bool = False
    """Split a Llama, with a head of its own, in place of a GPT-2."""

    micro_batches: Annotated[int, Field(ge=2)] = 8
    """Micro-batches per optimizer step."""

    ranks: Annotated[int, Field(ge=2)] = 2
    """Ranks over which the model is split."""

    trace: Path | None = None
    """Write the last round's timelines into this folder: a picture, and a trace for Perfetto."""

    layers: PositiveInt = 2
    hidden: PositiveInt = 768
    heads: PositiveInt = 8
    vocabulary: PositiveInt = 1024
    sequence: Annotated[int, Field(ge=2)] = 64
    batch: PositiveInt = 4

    @property
    def activation_bytes(self) -> int:
        """Size of the tensor that a collective of a micro-batch sums.

        Around a ring that is as much as all-to-alls send: each row of two experts, once.
        """
        return self.batch * self.sequence * self.hidden * 4

    def check(self) -> None:
        """Check values against each other."""
        super().check()
        if not self.exposed:
            reason = "there is no share to set links to"
            raise ConfigError("--exposed", [], reason, "Give percentages from 0 to 80")
        if self.batch % 2:
            reason = "domino halves micro-batches"
            raise ConfigError("--batch", self.batch, reason, "Give an even number")
        if self.llama and self.parallel == "experts":
            raise ConfigError("--llama", True, "a Llama has no experts", "Leave it out")
        if self.parallel == "tensor" and self.heads % self.ranks:
            reason = f"{self.ranks} ranks cannot share them equally"
            raise ConfigError("--heads", self.heads, reason, "Give a multiple of --ranks")

    def prepare(self) -> None:
        """Ask for short time slices, before gloo starts its threads."""
        from benchmarks.wave.links import ask_for_short_slices

        ask_for_short_slices()

    def run(self) -> dict[str, Any]:
        """Run the ranks on this machine, or on emulated hosts if links have a limit."""
        from benchmarks.cluster import EmulatedCluster
        from benchmarks.cluster.limits import ADDRESS, serving
        from benchmarks.run import run_ranks

        if not any(self.exposed):
            return run_ranks(self)
        with (
            EmulatedCluster(self.ranks) as cluster,
            serving(lambda pid, mbit: cluster.shape(mbit)) as address,
        ):
            return run_ranks(self, cluster=cluster, environment={ADDRESS: address})

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        shared = {"tensor": "split by tensors", "experts": f"{2 * self.ranks} experts divided"}
        return (
            f"{self.ranks} ranks, {self.micro_batches} micro-batches of {self.batch} x "
            f"{self.sequence}: {self.layers} layers of {self.hidden}, {shared[self.parallel]}"
            + (f", passes sleep for {self.step_ms:g} ms" if self.compute == "sleep" else "")
        )

    def case(self, row: Row) -> str:
        """Return the share of exposed collectives."""
        return f"{row['exposed']:.0%} exposed"

    def remarks(self, result: Row) -> Iterator[str]:
        """Yield what mode ``auto`` chooses, and each system's memory."""
        for decision in result["auto"]:
            chosen = "on" if decision["on"] else "off"
            yield f"auto at {decision['exposed']:.0%}: {chosen}, {decision['reason']}"
        for row in result["memory"]:
            yield (
                f"{row['system']}: autograd keeps {row['peak_bytes'] / _MIB:.1f} MiB, "
                f"{row['of_accumulation']:.3f} of accumulation, {row['of_in_phase']:.3f} of "
                f"in-phase; gradients are {'' if row['bitwise'] else 'not '}bit-identical"
            )
