# SPDX-License-Identifier: Apache-2.0
"""The rows of a vocabulary as they are spread over the ranks.

All ranks hold the same number of rows, a multiple of 8, so that products stay aligned; the last
ones are padding: zero, never read, without probability, and so with a gradient of zero.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["VocabularyShare"]

_ROW_MULTIPLE = 8


@dataclass(frozen=True)
class VocabularyShare:
    """Which tokens a rank holds.

    Args:
        tokens: Size of the whole vocabulary.
        rank: The rank in its group.
        ranks: Size of the group.
    """

    tokens: int
    rank: int
    ranks: int

    @property
    def rows(self) -> int:
        """How many rows each rank holds, with padding."""
        return -(-self.tokens // (self.ranks * _ROW_MULTIPLE)) * _ROW_MULTIPLE

    @property
    def first(self) -> int:
        """The token of this rank's first row."""
        return self.rank * self.rows

    @property
    def held(self) -> int:
        """How many of this rank's rows are tokens; the others, at its end, are padding."""
        return min(max(self.tokens - self.first, 0), self.rows)

    def part(self, whole: Tensor) -> Tensor:
        """Return a view of this rank's rows of a tensor (tokens, ...), without padding."""
        return whole.narrow(0, min(self.first, self.tokens), self.held)

    def padded(self, part: Tensor) -> Tensor:
        """Return a copy of the rank's rows (held, ...) with rows of zeros at the end."""
        result = part.new_zeros((self.rows, *part.shape[1:]))
        result[: self.held] = part
        return result

    def locate(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return each token's row here, and whether it is here; where it is not, the row is 0.

        A token that no rank holds fails as an index would: with RuntimeError on a CPU, with the
        device's assertion elsewhere.
        """
        known = (tokens >= 0) & (tokens < self.tokens)
        torch._assert_async(known.all(), f"a token is not one of the {self.tokens} known")
        rows = tokens - self.first
        here = (rows >= 0) & (rows < self.held)
        return rows.masked_fill(~here, 0), here
