# SPDX-License-Identifier: Apache-2.0
"""The options of a benchmark: one pydantic model, from which the command line is made."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import Field, PositiveInt

from wavemare.cli.options import option
from wavemare.errors import ConfigError
from wavemare.observe.tables import Column, Row
from wavemare.section import Section

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NonNegativeInt = Annotated[int, Field(ge=0)]


class Waits(NamedTuple):
    """Seconds that layers sleep in the passes of a micro-batch.

    Args:
        forward_s: In the forward pass.
        input_s: For the gradient of the input.
        weight_s: For the gradient of the weights.
    """

    forward_s: float
    input_s: float
    weight_s: float

    def share(self, part: float) -> Waits:
        """Return those of a part of the layers."""
        return Waits(*(part * seconds for seconds in self))


class Request(Section):
    """A benchmark. Each field is an option, and the docstring below the field its help.

    Attributes:
        measured_by: ``module:function``, called with the request on each rank. It returns the
            result of rank 0 without the machine.
        by_mpi: Whether ``mpirun`` starts the ranks, so that MPI and gloo are both there.
        on_cpu: Whether ranks use no accelerator.
        columns: Of the printed table, by heading; columns without any value are left out.
    """

    panel: ClassVar[str | None] = None
    measured_by: ClassVar[str]
    by_mpi: ClassVar[bool] = False
    on_cpu: ClassVar[bool] = True
    columns: ClassVar[Mapping[str, Column]]

    rounds: PositiveInt = 5
    """Timed rounds."""

    warmups: NonNegativeInt = 1
    """Untimed rounds before them."""

    @property
    def num_ranks(self) -> int:
        """Number of processes."""
        return cast(int, self.ranks)  # type: ignore[attr-defined]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return a checked request.

        Raises:
            ConfigError: A value is wrong; the message names its option.
        """
        try:
            request = cls.parse(values, "-")
        except ConfigError as error:
            name = re.split(r"\W+", error.key.lstrip("-."))[0]
            value = values.get(name, error.value)
            value = list(value) if isinstance(value, tuple) else value
            raise ConfigError(option(name), value, error.reason, error.remedy) from None
        request.check()
        return request

    def check(self) -> None:
        """Check values against each other.

        Raises:
            ConfigError: A value is wrong; the message names its option.
        """

    def prepare(self) -> None:
        """Prepare a rank before it joins the process group."""

    def run(self) -> dict[str, Any]:
        """Start the ranks, and return the result with the machine.

        Raises:
            LaunchError: The ranks cannot be started, or one failed.
        """
        from benchmarks.run import run_ranks

        return run_ranks(self)

    def title(self, result: Row) -> str:
        """Return the heading of the printed table."""
        raise NotImplementedError

    def case(self, row: Row) -> str:
        """Return what the systems of a row are compared in."""
        raise NotImplementedError

    def draw(self, result: Row, file: Path) -> None:
        """Draw a result: by default the ratios of all systems over the cases."""
        from benchmarks.result import draw

        draw(self, result, file)

    def remarks(self, result: Row) -> Iterator[str]:
        """Yield the lines below the table."""
        skipped: dict[tuple[str, str], list[str]] = {}
        for row in result.get("skipped", ()):
            skipped.setdefault((row["system"], row["reason"]), []).append(self.case(row))
        for (system, reason), cases in skipped.items():
            yield f"{system} is left out at {', '.join(cases)}: {reason}"


class GptRequest(Request):
    """A benchmark that trains a GPT."""

    panel: ClassVar[str | None] = "Size of the model"

    layers: PositiveInt = 8
    """Blocks."""

    hidden: PositiveInt = 256
    """Width."""

    heads: PositiveInt = 4
    """Attention heads."""

    vocabulary: PositiveInt = 256
    """Tokens."""

    sequence: Annotated[int, Field(ge=2)] = 128
    """Tokens per sequence."""

    batch: PositiveInt = 2
    """Sequences per micro-batch."""

    def check(self) -> None:
        """Check that the heads share the width."""
        if self.hidden % self.heads:
            reason = f"{self.heads} heads cannot share it equally"
            raise ConfigError("--hidden", self.hidden, reason, "Give a multiple of --heads")


class ComputeRequest(GptRequest):
    """A benchmark of messages beside computation."""

    panel: ClassVar[str | None] = "Computation"

    compute: Literal["real", "sleep"] = "real"
    """Compute on the processors, or sleep in all passes, as the host of a GPU does: the processors
    are free, and gradients are handed out at their times."""

    step_ms: Positive = 300.0
    """With --compute sleep: milliseconds of both passes of a micro-batch; the backward pass takes
    twice as long as the forward pass."""

    @property
    def waits(self) -> Waits:
        """The sleep of the whole model."""
        return Waits(*[self.step_ms / 3000] * 3)
