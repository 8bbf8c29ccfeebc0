# SPDX-License-Identifier: Apache-2.0
"""What all systems of `wavemare bench sparse` share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from wavemare.bench.sparse.request import Case
from wavemare.comm.statistics import Statistics


class Bench(ABC):
    """One system on one rank."""

    statistics: Statistics | None = None
    case: Case | None = None

    def prepare(self, case: Case, gradient: Tensor) -> None:
        """Take a gradient, in the form that a model would give to the collective."""
        if case != self.case:
            self.reset()
        self.case = case
        self.bucket = gradient

    def reset(self) -> None:
        """Drop what an earlier case has left."""
        return None

    @abstractmethod
    def sum(self) -> Any:
        """Sum over all ranks; this is timed."""

    def result(self, summed: Any) -> Tensor:
        """Return the sum as a flat dense tensor, to be checked."""
        return self.bucket

    def left_out(self) -> Tensor | None:
        """Return what a case's sums lack so far because of this rank; None if they are exact."""
        return None

    def close(self) -> None:
        """Close the collective."""
        return None


def nonzero_rows(table: Tensor) -> Tensor:
    """Return the numbers of a table's rows that are not zero: a model knows them."""
    return table.abs().amax(dim=1).nonzero().flatten()
