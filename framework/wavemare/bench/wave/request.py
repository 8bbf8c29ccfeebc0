# SPDX-License-Identifier: Apache-2.0
"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.bench.options import MpiRequest, check_heads, check_least
from wavemare.errors import ConfigError

__all__ = ["BASELINE", "SYSTEMS", "WaveRequest"]

BASELINE = "accumulation"
"""All ratios are to it."""
IN_PHASE, DOMINO, TICK_TOCK = "in-phase", "domino", "tick-tock"
SYSTEMS = (BASELINE, IN_PHASE, DOMINO, TICK_TOCK)
"""All there are, in the order in which they are shown."""
_LEAST_RANKS = 2
_LEAST_MICRO_BATCHES = 2
_LEAST_SEQUENCE = 2
_MOST_EXPOSED = 80


@dataclass(frozen=True, kw_only=True)
class WaveRequest(MpiRequest):
    """A measurement of waves; ``mbit`` stays None, as speeds follow from shares.

    Args:
        ranks: Over which the model is split by tensors.
        exposed: Percentages of accumulation's time that collectives shall take; 0 leaves links as
            fast as they are.
        micro_batches: Per optimizer step.
        rounds: Timed rounds; `warmups` more before them.
        warmups: Untimed rounds.
        patience: Seconds in all for which steps that other programs disturb are measured again.
        layers: Blocks of the GPT.
        hidden: Its width.
        heads: Of each block.
        vocabulary: Tokens.
        sequence: Tokens per sequence.
        batch: Sequences per micro-batch, to be halved.
        trace: File for the Chrome trace of a tick-tock step; None for none.
        timeline: File (PNG) for a picture of its first micro-batches.
        memory: File (PNG or SVG) for the bytes that it keeps.
        links: Folder in which other links are asked for; None if the ranks share a machine.
    """

    ranks: int = 2
    exposed: tuple[int, ...] = (0, 10, 25, 40)
    micro_batches: int = 8
    rounds: int = 5
    warmups: int = 1
    patience: int = 0
    layers: int = 2
    hidden: int = 768
    heads: int = 8
    vocabulary: int = 1024
    sequence: int = 64
    batch: int = 4
    trace: str | None = None
    timeline: str | None = None
    memory: str | None = None
    links: str | None = None

    @property
    def shaped(self) -> bool:
        """Whether links of a known speed are needed."""
        return any(self.exposed)

    @property
    def carry_bytes(self) -> int:
        """Size of the tensor that a collective of a micro-batch sums."""
        return self.batch * self.sequence * self.hidden * 4

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: One cannot be; the message names its option.
        """
        check_least(_LEAST_RANKS, self.options("ranks"))
        check_least(_LEAST_MICRO_BATCHES, self.options("micro_batches"))
        check_least(_LEAST_SEQUENCE, self.options("sequence"))
        check_least(1, self.options("rounds", "layers", "hidden", "heads", "vocabulary", "batch"))
        check_least(0, self.options("warmups", "patience"))
        if not self.exposed or not all(0 <= percent <= _MOST_EXPOSED for percent in self.exposed):
            reason = "these are no shares that links can be set to"
            remedy = f"Give percentages from 0 to {_MOST_EXPOSED}"
            raise ConfigError("--exposed", list(self.exposed), reason, remedy)
        if self.batch % 2:
            reason = "domino halves micro-batches"
            raise ConfigError("--batch", self.batch, reason, "Give an even number")
        if self.heads % self.ranks:
            reason = f"{self.ranks} ranks cannot share them equally"
            raise ConfigError("--heads", self.heads, reason, "Give a multiple of --ranks")
        check_heads(self.hidden, self.heads)
