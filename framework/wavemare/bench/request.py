# SPDX-License-Identifier: Apache-2.0
"""What shall be measured, as the command line gives it to the ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wavemare.bench.options import Request, check_heads, check_least, check_names
from wavemare.bench.systems import DEFAULT_SYSTEMS, SYSTEMS, System
from wavemare.errors import ConfigError

__all__ = ["PipelineRequest"]

_ROUND_MICRO_BATCHES = 8
_LEAST_STAGES = 2


@dataclass(frozen=True, kw_only=True)
class PipelineRequest(Request):
    """A measurement of pipelines.

    Args:
        stages: Pipeline ranks, one process each.
        micro_batches: The numbers of micro-batches per optimizer step to measure.
        rounds: Timed rounds; one more before them warms up.
        steps_per_round: Optimizer steps of one system in one round; None chooses for each number of
            micro-batches.
        systems: Names.
        forward_ms: Milliseconds of a stage's forward pass if layers are timed waits, else None.
        backward_ms: The same for its backward pass.
        layers: Transformer blocks of the GPT.
        hidden: Its width.
        heads: Its attention heads.
        vocabulary: Its number of tokens.
        sequence: Tokens per sequence.
        batch: Sequences per micro-batch.
        trace: Folder for the timelines of the last round; None for none.
    """

    stages: int = 2
    micro_batches: tuple[int, ...] = (1, 2, 4, 8)
    rounds: int = 7
    steps_per_round: int | None = None
    systems: tuple[str, ...] = DEFAULT_SYSTEMS
    forward_ms: float | None = None
    backward_ms: float | None = None
    layers: int = 8
    hidden: int = 256
    heads: int = 4
    vocabulary: int = 256
    sequence: int = 128
    batch: int = 2
    trace: str | None = None

    @property
    def synthetic(self) -> bool:
        """Whether layers are timed waits."""
        return self.forward_ms is not None

    @property
    def stage_seconds(self) -> float | None:
        """Seconds of a stage's forward and backward pass if layers are timed waits."""
        if self.forward_ms is None or self.backward_ms is None:
            return None
        return (self.forward_ms + self.backward_ms) / 1000

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigError: One cannot be; the message names its option.
        """
        if self.stages < _LEAST_STAGES:
            reason = "a pipeline has at least two stages"
            raise ConfigError("--stages", self.stages, reason, "Give 2 or more")
        if not self.micro_batches or min(self.micro_batches) < 1:
            reason = "a step has at least one micro-batch"
            remedy = "Give numbers of 1 or more, such as 1,2,4,8"
            raise ConfigError("--micro-batches", list(self.micro_batches), reason, remedy)
        check_names("--systems", self.systems, SYSTEMS)
        self._check_sizes()
        self._check_waits()
        if not any(
            self.obstacle(name, count) is None
            for name in self.systems
            for count in self.micro_batches
        ):
            reasons = {name: self.obstacle(name, max(self.micro_batches)) for name in self.systems}
            raise ConfigError(
                "--micro-batches",
                list(self.micro_batches),
                "; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
                "Give more micro-batches or other systems",
            )

    def _check_sizes(self) -> None:
        sizes = ("rounds", "layers", "hidden", "heads", "vocabulary", "sequence", "batch")
        check_least(1, self.options(*sizes))
        if self.steps_per_round is not None and self.steps_per_round < 1:
            reason = "a round has at least one step"
            raise ConfigError("--steps-per-round", self.steps_per_round, reason, "Give 1 or more")
        check_heads(self.hidden, self.heads)
        most_parts = max(SYSTEMS[name].parts_per_stage for name in self.systems) * self.stages
        if not self.synthetic and self.layers < most_parts:
            raise ConfigError(
                "--layers",
                self.layers,
                f"{self.stages} stages of these systems need {most_parts} blocks",
                f"Give {most_parts} or more",
            )

    def _check_waits(self) -> None:
        waits = {"--forward-ms": self.forward_ms, "--backward-ms": self.backward_ms}
        given = {option: wait for option, wait in waits.items() if wait is not None}
        if len(given) == 1:
            (option,) = waits.keys() - given.keys()
            raise ConfigError(option, None, "the other one is given", "Give both or neither")
        for option, wait in given.items():
            if not (math.isfinite(wait) and wait > 0):
                reason = "a wait takes more than no time"
                raise ConfigError(option, wait, reason, "Give milliseconds")

    def obstacle(self, system: str, micro_batches: int) -> str | None:
        """Return why a system cannot be measured at a number of micro-batches; None if it can."""
        return SYSTEMS[system].obstacle(self.stages, micro_batches, synthetic=self.synthetic)

    def steps(self, micro_batches: int) -> int:
        """Return the timed optimizer steps of a round."""
        if self.steps_per_round is not None:
            return self.steps_per_round
        return max(2, math.ceil(_ROUND_MICRO_BATCHES / micro_batches))

    def lead(self, system: System, micro_batches: int) -> int:
        """Return the steps before the timed ones: caches get warm, and the pipeline fills."""
        return 1 + math.ceil(self.stages / micro_batches) if system.steady else 1

    def tail(self, system: System, micro_batches: int) -> int:
        """Return the steps after the timed ones, which keep the other ranks busy meanwhile."""
        return math.ceil(self.stages / micro_batches) if system.steady else 0
