# SPDX-License-Identifier: Apache-2.0
"""Whether replicas that meet every so many steps pay over a link, and how often they should."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wavemare.engine.local_steps.codec import Code
from wavemare.errors import PlanError, check_number

_FRAGMENTS = 4
_LEAST = 8
_MOST = 64
"""Steps between exchanges from which on messages of 4 bits cost less loss than a longer period."""
_EXACT, _FEW = Code(32), Code(4)
# The most that a small model with 31 exchanges lost in percent, and its steps to the same loss.
_LOSS, _STEPS = 16, 1.5


@dataclass(frozen=True, kw_only=True)
class SlowLink:
    """A job and the link between its replicas.

    Args:
        parameters: Weights of the model.
        replicas: N.
        ranks: Of a replica.
        mbit: Mbit/s of a replica in each direction.
        step_s: Seconds of a step's computation, with the reduction inside a replica.
        micro_batches: Of a step; the backward pass of the last one hides a dense reduction.
        bits: Of a gradient that ordinary data parallelism reduces.
        zero: Whether ordinary training uses DeepSpeed's ZeRO 1 or 2, which all-reduces gradients
            and then gathers weights.
    """

    parameters: int
    replicas: int
    ranks: int = 1
    mbit: float
    step_s: float
    micro_batches: int = 1
    bits: int = 32
    zero: bool = True

    def __post_init__(self) -> None:
        for name, least in (("replicas", 2), ("ranks", 1), ("micro_batches", 1)):
            check_number(PlanError, name, getattr(self, name), least, whole=True)
        for name in ("mbit", "step_s"):
            if not 0 < getattr(self, name) < math.inf:
                reason = "it is not a positive number"
                raise PlanError(name, getattr(self, name), reason, "Give one")

    def messages(self, code: Code = _EXACT) -> float:
        """Return how many steps' computation one exchange of all weights takes."""
        volume = 2 * (self.replicas - 1) / self.replicas * code.share
        return volume * 4 * self.parameters / (self.mbit * 125_000 * self.step_s)

    @property
    def dense(self) -> float:
        """Steps' computation that an ordinary step takes: 1, and what the link adds."""
        hidden, message = 2 / (3 * self.micro_batches), self.messages() * self.bits / 32
        return 1 + max(0.0, message - hidden) + self.zero * message / 2

    def local(self, every: int, fragments: int = 1, overlap: int = 0, code: Code = _EXACT) -> float:
        """Return the same of a step with local steps."""
        message = self.messages(code) / fragments
        rate = fragments / every
        return max(1 + rate * max(0.0, message - overlap), rate * message)


@dataclass(frozen=True)
class Advice:
    """What local steps bring; ``str`` of it is for people.

    Args:
        link: The job.
        every: H.
        code: How messages are written.
        gains: Speed beside ordinary data parallelism, of blocking exchanges and of fragments.
    """

    link: SlowLink
    every: int
    code: Code
    gains: tuple[float, float]

    @property
    def pays(self) -> bool:
        """Whether the speed outweighs the steps that the loss costs."""
        return self.gains[1] > _STEPS

    @property
    def memory_bytes(self) -> float:
        """Bytes of a rank for common weights, momentum, residual and what is in flight."""
        own = 4 * self.link.parameters / self.link.ranks
        return own * (2 + (not self.code.is_exact) * (1 + 1 / self.link.replicas) + 2 / _FRAGMENTS)

    def __str__(self) -> str:
        overlap = self.every // _FRAGMENTS
        lines = [
            f"an exchange takes r = {self.link.messages():.2f} times a step's computation; an "
            f"ordinary step takes {self.link.dense:.2f} times its computation"
        ]
        if not self.pays:
            return f"{lines[0]}\nuse ordinary data parallelism: local steps would gain too little"
        keys = f'"every": {self.every}, "fragments": {_FRAGMENTS}, "overlap": {overlap}'
        keys += "" if self.code.is_exact else f', "bits": {self.code.bits}'
        return "\n".join(
            [
                *lines,
                f'"local_steps": {{"mode": "diloco", {keys}}}',
                f"steps per second: {self.gains[0]:.1f}x with blocking exchanges, "
                f"{self.gains[1]:.1f}x with fragments",
                f"memory per rank: {self.memory_bytes / 2**20:.0f} MiB, on the host beside GPUs",
                f"expected price: up to {_LOSS} % of the loss, or {_STEPS}x the steps to the same "
                "loss (a small model, replicas of one rank; docs/results/slow-links.md)",
            ]
        )


def advise(link: SlowLink) -> Advice:
    """Return how often replicas should meet: no more rarely than hides their messages."""
    code = _EXACT if _period(link.messages()) <= _MOST else _FEW
    period = _period(link.messages(code))
    overlap = period // _FRAGMENTS
    gains = (
        link.dense / link.local(period, code=code),
        link.dense / link.local(period, _FRAGMENTS, overlap, code),
    )
    return Advice(link, period, code, gains)


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a job ends, and what that costs; a lost replica ends the job.

    Args:
        per_day: Failures of all replicas together.
        restart_s: Seconds from a failure to the first repeated step.
        checkpoint_s: Seconds of training between two checkpoints.
    """

    per_day: float
    restart_s: float
    checkpoint_s: float

    def __post_init__(self) -> None:
        for name in ("per_day", "restart_s", "checkpoint_s"):
            check_number(PlanError, name, getattr(self, name), 0)

    @property
    def goodput(self) -> float:
        """The share of the time that goes into steps which are kept, if failures are random."""
        rate = self.per_day / 86_400
        lost = rate * self.checkpoint_s
        repeated = lost / math.expm1(lost) if lost else 1.0
        return repeated / (1 + rate * self.restart_s)

    def __str__(self) -> str:
        return (
            f"goodput: {self.goodput:.1%} with {self.per_day:g} failures per day, restarts of "
            f"{self.restart_s:g} s and a checkpoint every {self.checkpoint_s:g} s"
        )


def _period(messages: float) -> int:
    return _FRAGMENTS * math.ceil(max(_LEAST, 2 * messages) / _FRAGMENTS)
