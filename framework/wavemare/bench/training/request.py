# SPDX-License-Identifier: Apache-2.0
"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from wavemare.bench.options import (
    MpiRequest,
    check_heads,
    check_least,
    check_names,
    check_positive,
)
from wavemare.errors import ConfigError

__all__ = ["BASELINE", "BOUND", "QUALITY_SYSTEMS", "SYSTEMS", "TrainingRequest"]

BASELINE = "deepspeed-dense"
"""All ratios are to it."""
BOUND = "no-communication-bound"
"""Every rank trains for itself."""
SYSTEMS = (
    BASELINE,
    "deepspeed-dense-zero1",
    "deepspeed-sparse",
    "torch-ddp",
    "wavemare-ddp",
    "wavemare-auto",
    "wavemare-auto-gloo",
    "wavemare-auto-zero1",
    "wavemare-pushpull",
    "wavemare-topk",
    BOUND,
)
"""All there are. Those of wavemare without a suffix go over MPI."""
QUALITY_SYSTEMS = (BASELINE, "wavemare-auto", "wavemare-topk")
"""What is trained with ``--quality-steps`` if nothing is named."""
_LEAST_RANKS = 2
_LEAST_VOCABULARY = 1000
_LEAST_SEQUENCE = 8


@dataclass(frozen=True, kw_only=True)
class TrainingRequest(MpiRequest):
    """A measurement of training: what `MpiRequest` takes, and more.

    Args:
        systems: Names of `SYSTEMS`.
        rounds: Timed rounds; `warmups` more before them.
        warmups: Untimed rounds.
        steps_per_round: Optimizer steps that a system does in a round.
        vocabulary: Rows of the word embedding.
        hidden: Width of the BERT.
        layers: Its blocks.
        heads: Of each block.
        batch: Texts per rank and step.
        sequence: Tokens per text.
        data: A table of texts and labels; None for made-up texts.
        ratio: Share of the blocks that ``wavemare-topk`` sends.
        block: Elements per block.
        quality_steps: Optimizer steps after which held-out losses are compared; None to measure
            times instead.
        learning_rate: Highest; it rises for a tenth of the steps, then falls to zero, linearly.
        compressor_warmup: Optimizer steps in which ``wavemare-topk`` sends all.
        seed: Of weights and data.
    """

    ranks: int = 2
    systems: tuple[str, ...] = SYSTEMS
    rounds: int = 5
    warmups: int = 1
    steps_per_round: int = 4
    vocabulary: int = 30_522
    hidden: int = 256
    layers: int = 2
    heads: int = 4
    batch: int = 8
    sequence: int = 64
    data: str | None = None
    ratio: float = 0.01
    block: int = 256
    quality_steps: int | None = None
    learning_rate: float = 1e-3
    compressor_warmup: int = 0
    seed: int = 0

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: One cannot be; the message names its option.
        """
        sizes = ("hidden", "layers", "heads", "batch", "ratio", "block")
        check_positive(self.options("mbit", "rounds", "steps_per_round", *sizes))
        check_positive(self.options("quality_steps", "learning_rate"))
        check_least(_LEAST_RANKS, self.options("ranks"))
        check_least(_LEAST_VOCABULARY, self.options("vocabulary"))
        check_least(_LEAST_SEQUENCE, self.options("sequence"))
        check_least(0, self.options("warmups", "compressor_warmup", "seed"))
        if self.ratio > 1:
            raise ConfigError("--ratio", self.ratio, "it is a share", "Give 1 or less")
        check_heads(self.hidden, self.heads)
        check_names("--systems", self.systems, SYSTEMS)
        if self.quality_steps is not None:
            self._check_quality()

    def _check_quality(self) -> None:
        if BASELINE not in self.systems:
            reason = f"{BASELINE} is missing, to which losses are compared"
            raise ConfigError("--systems", ",".join(self.systems), reason, "Name it as well")
        if BOUND in self.systems:
            reason = "its ranks train different models"
            raise ConfigError("--systems", BOUND, reason, "Leave it out, or --quality-steps")
