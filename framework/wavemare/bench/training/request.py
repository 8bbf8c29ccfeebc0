"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from wavemare.errors import ConfigError, did_you_mean

__all__ = ["BASELINE", "BOUND", "DEFAULT_SYSTEMS", "QUALITY_SYSTEMS", "SYSTEMS", "TrainingRequest"]

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
DEFAULT_SYSTEMS = SYSTEMS
QUALITY_SYSTEMS = (BASELINE, "wavemare-auto", "wavemare-topk")
"""What is trained with ``--quality-steps`` if nothing is named."""
_LEAST_RANKS = 2
_LEAST_VOCABULARY = 1000
_LEAST_SEQUENCE = 8


@dataclass(frozen=True, kw_only=True)
class TrainingRequest:
    """A measurement of training.

    Args:
        ranks: Number of processes.
        mbit: Speed of each rank's link in Mbit/s; None for the memory of this machine.
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
    mbit: float | None = None
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
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
        self._check_positive()
        for option, value, least in (
            ("--ranks", self.ranks, _LEAST_RANKS),
            ("--vocabulary", self.vocabulary, _LEAST_VOCABULARY),
            ("--sequence", self.sequence, _LEAST_SEQUENCE),
            ("--warmups", self.warmups, 0),
            ("--compressor-warmup", self.compressor_warmup, 0),
            ("--seed", self.seed, 0),
        ):
            if value < least:
                raise ConfigError(option, value, "it is too small", f"Give {least} or more")
        if self.ratio > 1:
            raise ConfigError("--ratio", self.ratio, "it is a share", "Give 1 or less")
        if self.hidden % self.heads:
            reason = f"{self.heads} heads cannot share it equally"
            raise ConfigError("--hidden", self.hidden, reason, "Give a multiple of --heads")
        if not self.systems:
            remedy = f"Name some of {', '.join(SYSTEMS)}"
            raise ConfigError("--systems", "", "there is nothing to measure", remedy)
        for name in self.systems:
            if name not in SYSTEMS:
                remedy = did_you_mean(name, SYSTEMS)
                raise ConfigError("--systems", name, "there is no such system", remedy)
        if self.quality_steps is not None:
            self._check_quality()

    def _check_positive(self) -> None:
        values: Sequence[tuple[str, float | None]] = (
            ("--mbit", self.mbit),
            ("--rounds", self.rounds),
            ("--steps-per-round", self.steps_per_round),
            ("--hidden", self.hidden),
            ("--layers", self.layers),
            ("--heads", self.heads),
            ("--batch", self.batch),
            ("--ratio", self.ratio),
            ("--block", self.block),
            ("--quality-steps", self.quality_steps),
            ("--learning-rate", self.learning_rate),
        )
        for option, value in values:
            if value is not None and not value > 0:
                raise ConfigError(option, value, "it is not positive", "Give more than 0")

    def _check_quality(self) -> None:
        if BASELINE not in self.systems:
            reason = f"{BASELINE} is missing, to which losses are compared"
            raise ConfigError("--systems", ",".join(self.systems), reason, "Name it as well")
        if BOUND in self.systems:
            reason = "its ranks train different models"
            raise ConfigError("--systems", BOUND, reason, "Leave it out, or --quality-steps")

    def to_json(self) -> str:
        """Return the text that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> TrainingRequest:
        """Read what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "systems": tuple(values["systems"])})
