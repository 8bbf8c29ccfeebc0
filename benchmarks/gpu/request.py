# SPDX-License-Identifier: Apache-2.0
"""The options of ``benchmarks gpu``, and its parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from pydantic import PositiveInt

from benchmarks.request import NonNegativeInt, Positive, Request
from wavemare.cli.options import check_names
from wavemare.observe.tables import Column, Row

NCCL, GLOO = "nccl", "gloo"
COPY = "copy"
DENSE = "all-reduce"
TORCH_STEP = "torch-autocast"
TORCH_ZBV = "torch-zbv"
WHOLE = "whole"
ACCUMULATION = "accumulation"
ONE_STREAM = "one-stream"
ADAMW = "AdamW"
SCHEDULES = (
    TORCH_ZBV,
    "deepspeed-1f1b",
    "wavemare-1f1b",
    "wavemare-interleaved",
    "wavemare-zb-h1",
    "wavemare-zbv",
    "wavemare-auto-v",
    "wavemare-pipemare",
    "wavemare-pipemare-drained",
)
"""Systems of the part ``schedules``."""


class Part(NamedTuple):
    """What is measured together.

    Args:
        ranks: Processes.
        baselines: Systems that ratios are to; the first one that is there counts.
        figure: The key that ratios compare, in seconds.
        backends: Of the process group on a GPU; each has a launch of its own.
    """

    ranks: int
    baselines: tuple[str, ...]
    figure: str = "median_s"
    backends: tuple[str, ...] = (NCCL,)


PARTS: Mapping[str, Part] = {
    "kernels": Part(1, (COPY,)),
    "collectives": Part(2, (f"{NCCL}-{DENSE}", f"{GLOO}-{DENSE}"), backends=(NCCL, GLOO)),
    "step": Part(1, (TORCH_STEP,)),
    "schedules": Part(2, (TORCH_ZBV,), figure="host_s"),
    "split": Part(1, (WHOLE,)),
    "waves": Part(1, (ACCUMULATION,)),
    "streams": Part(1, (ONE_STREAM,)),
    "optimizers": Part(1, (ADAMW,)),
}


class _Turns(Request):
    """What the command and its jobs share."""

    on_cpu: ClassVar[bool] = False

    parts: tuple[str, ...] = tuple(PARTS)
    """Parts to measure: kernels, collectives, step, schedules, split, waves, streams,
    optimizers."""

    systems: tuple[str, ...] = SCHEDULES
    """Systems of the part schedules, whose ranks wait for each other: without one that hangs, the
    others can be measured."""

    tiny: bool = False
    """Take tiny sizes, which only show that a part works. Without a GPU, they are always taken."""

    rounds: PositiveInt = 5

    warmups: NonNegativeInt = 2


class GpuJob(_Turns):
    """Parts that one launch measures."""

    measured_by: ClassVar[str] = "benchmarks.gpu.measure:measure"

    ranks: int
    """Processes."""

    backend: str
    """Of the process group: nccl or gloo."""


class GpuRequest(_Turns):
    """Measure kernels, collectives, steps, schedules, waves and optimizers on a GPU.

    Each part has a launch of its own, so that a part that fails ends no other one. Two ranks share
    the GPU if there is only one.

    For example: python -m benchmarks gpu --parts kernels,step --json result.json
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "part": Column("part"),
        "case": Column("case"),
        "system": Column("system"),
        "ms": Column("median_s", ".3f", 1000),
        "host ms": Column("host_s", ".3f", 1000),
        "cpu ms": Column("cpu_s", ".3f", 1000),
        "GB/s": Column("gb_s", ".0f"),
        "ratio": Column("ratio", ".2f"),
        "share": Column("share", ".1%"),
        "loss": Column("loss", ".4f"),
    }

    limit_s: Positive = 600.0
    """Seconds for all parts together. A part has at most a third of them."""

    def check(self) -> None:
        """Check that all parts are known."""
        check_names("--parts", self.parts, PARTS, "part")
        check_names("--systems", self.systems, SCHEDULES)

    def jobs(self, *, on_gpu: bool) -> Iterator[GpuJob]:
        """Yield the launches.

        On a GPU each part has one for each backend. On CPUs no failure spoils a device, so that the
        parts of one rank share a launch.
        """
        turns = {name: getattr(self, name) for name in _Turns.model_fields if name != "parts"}
        alone = [name for name in self.parts if PARTS[name].ranks == 1]
        if not on_gpu and alone:
            yield GpuJob(parts=tuple(alone), ranks=1, backend=GLOO, **turns)
        for name in self.parts:
            part = PARTS[name]
            if on_gpu or name not in alone:
                for backend in part.backends if on_gpu else (GLOO,):
                    yield GpuJob(parts=(name,), ranks=part.ranks, backend=backend, **turns)

    def run(self) -> dict[str, Any]:
        """Run all parts, and return their rows."""
        from benchmarks.gpu.run import run_jobs

        return run_jobs(self)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        return f"{result['device']}{', tiny sizes' if result['tiny'] else ''}"

    def case(self, row: Row) -> str:
        """Return part and case."""
        return f"{row['part']} {row['case']}"

    def remarks(self, result: Row) -> Iterator[str]:
        """Yield what is left out, and how long the launches took."""
        for row in result["skipped"]:
            names = dict.fromkeys(filter(None, (row["part"], row["case"], row["system"])))
            yield f"{' '.join(names)} is left out: {row['reason']}"
        for launch in result["launches"]:
            yield f"{', '.join(launch['parts'])}: {launch['seconds']:.0f} s"
