# SPDX-License-Identifier: Apache-2.0
"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.bench.options import MpiRequest, check_least, check_names, check_positive
from wavemare.errors import ConfigError

__all__ = ["DEFAULT_SYSTEMS", "DENSE", "PATTERNS", "SYSTEMS", "Case", "SparseRequest"]

DENSE = ("mpi-dense", "mpi-dense-blocking", "gloo-dense")
"""Systems that send everything; the fastest of them in each case is the baseline."""
_PEERS = ("torch-sparse", "deepspeed-sparse")
_EXECUTORS = (
    "ordered",
    "packed",
    "pushpull",
    "allgather",
    "auto",
    "streaming",
    "agsparse",
    "sparcml",
)
SYSTEMS = (
    *DENSE,
    *_PEERS,
    *(f"wavemare-{name}" for name in _EXECUTORS),
    *(f"wavemare-{name}-gloo" for name in _EXECUTORS),
)
"""All there are. Those of wavemare without a suffix go over MPI."""
PATTERNS = ("random", "identical", "zipf")
DEFAULT_SYSTEMS = tuple(name for name in SYSTEMS if not name.endswith("-gloo"))
_SLOW = ("wavemare-streaming", "wavemare-agsparse", "wavemare-sparcml", *_PEERS)
"""At high densities these take several times the dense one's time."""
_LEAST_RANKS = 2


@dataclass(frozen=True)
class Case:
    """One kind of gradient.

    Args:
        pattern: ``random``: every rank has other blocks; ``identical``: all have the same;
            ``zipf``: low blocks are likelier, as the rows of an embedding sorted by frequency.
        density: Share of a rank's blocks that are not zero.
    """

    pattern: str
    density: float

    @property
    def key(self) -> str:
        """A name."""
        return f"{self.pattern} {self.density:g}"


@dataclass(frozen=True, kw_only=True)
class SparseRequest(MpiRequest):
    """A measurement of collectives: what `MpiRequest` takes, and more.

    Args:
        mebibytes: Size of the bucket, float32.
        block: Elements per block.
        densities: Shares of blocks that are not zero.
        patterns: Names of `PATTERNS`.
        systems: Names of `SYSTEMS`.
        rounds: Timed rounds; `warmups` more before them.
        warmups: Untimed rounds: the selector looks at its first few calls more closely.
        dense_limit: Above this density, systems that only make sense below are left out.
    """

    ranks: int = 4
    mebibytes: float = 100.0
    block: int = 256
    densities: tuple[float, ...] = (1.0, 0.4, 0.1, 0.04, 0.01)
    patterns: tuple[str, ...] = PATTERNS
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    rounds: int = 5
    warmups: int = 2
    dense_limit: float = 0.4

    @property
    def numel(self) -> int:
        """Elements of the bucket."""
        return int(self.mebibytes * 2**20) // 4

    @property
    def cases(self) -> list[Case]:
        """All pairs of pattern and density; all patterns are one where nothing is zero."""
        pairs = [Case(pattern, density) for pattern in self.patterns for density in self.densities]
        return [c for c in pairs if c.density < 1 or c.pattern == self.patterns[0]]

    def obstacle(self, system: str, case: Case) -> str | None:
        """Return why a system is not measured in a case; None if it is."""
        if system.removesuffix("-gloo") in _SLOW and case.density > self.dense_limit:
            return f"it sends several times the dense bytes above a density of {self.dense_limit:g}"
        return None

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: One cannot be; the message names its option.
        """
        if self.ranks < _LEAST_RANKS:
            raise ConfigError("--ranks", self.ranks, "nothing would be sent", "Give 2 or more")
        check_positive({"--mbit": self.mbit, "--mib": self.mebibytes})
        check_least(1, self.options("block", "rounds"))
        if self.warmups < 0:
            raise ConfigError("--warmups", self.warmups, "it is negative", "Give 0 or more")
        if not self.densities or not all(0 <= d <= 1 for d in self.densities):
            reason = "densities are shares"
            raise ConfigError("--densities", list(self.densities), reason, "Give 0 to 1")
        check_names("--patterns", self.patterns, PATTERNS, "thing")
        check_names("--systems", self.systems, SYSTEMS, "thing")
