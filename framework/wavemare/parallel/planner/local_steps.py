# SPDX-License-Identifier: Apache-2.0
"""Whether replicas that meet every so many steps pay over a link, and how often they should.

What that costs is read from `local_steps.json`, which has what was measured and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import fmean

from wavemare.engine.local_steps.codec import Code
from wavemare.errors import PlanError, check_number

_FRAGMENTS = 4
_LEAST = 8
_MOST = 64
"""Steps between exchanges from which on messages of fewer bits are tried before a longer period."""
_EXACT = Code(32)
_FEWER = (Code(8), Code(4), Code(2))
_POINT = 0.01
"""How much more of the loss than 32 bits messages of fewer bits may cost."""
_SAME = 1.5
"""How different from the advised period one may be whose loss is taken for that of the advice."""


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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a setting of local steps was measured to cost.

    Args:
        optimizer: The inner one.
        every: H.
        message: Bits of a number; ``64of4096x2`` stands for the 64 largest of 4,096, in 2 bits.
        fragments: F; 1 stands for exchanges of all weights, for which training waits.
        outer: Learning rate and momentum of the outer optimizer, as ``1/0.5``.
        replicas: N, of one rank each.
        parameters: Of the model.
        training: Steps.
        gaps: Of each seed: the loss beside that of synchronous training with the same inner
            optimizer and as many steps, less 1.
        losses: The same losses.
        steps: Of each seed: how many times as many steps the loss of synchronous training takes;
            empty if not measured.
    """

    optimizer: str
    every: int
    message: str
    fragments: int
    outer: str
    replicas: int
    parameters: int
    training: int
    gaps: tuple[float, ...]
    losses: tuple[float, ...]
    steps: tuple[float, ...] = ()

    def __str__(self) -> str:
        bits = f"{self.message} bits" if self.message.isdigit() else self.message
        parts = f"in {self.fragments} fragments" if self.fragments > 1 else "whole"
        low, high = min(self.gaps), max(self.gaps)
        gaps = f"{low:+.1%}" if len(self.gaps) == 1 else f"{low:+.1%} to {high:+.1%}"
        more = f", {max(self.steps):.2f}x the steps to the same loss" if self.steps else ""
        seeds = f"{len(self.gaps)} seed{'s' * (len(self.gaps) > 1)}"
        return (
            f"{self.optimizer}, every {self.every} steps, {bits}, {parts}: {gaps}{more} ({seeds}, "
            f"{self.parameters / 1e6:.2f} M weights, {self.training} steps, {self.replicas} "
            "replicas of a rank)"
        )


@cache
def measured() -> tuple[Measured, ...]:
    """Return all that was measured; ``make reference`` writes it from docs/results."""
    text = Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    lists = ("gaps", "losses", "steps")
    rows = json.loads(text)
    return tuple(Measured(**{**row, **{name: tuple(row[name]) for name in lists}}) for row in rows)


def best(rows: Iterable[Measured]) -> Iterator[Measured]:
    """Yield of each setting and series of runs the row of the outer optimizer with least loss."""

    def setting(row: Measured) -> tuple[str | int, ...]:
        series = row.parameters, row.training, row.replicas
        return (row.optimizer, *series, row.fragments, row.message, row.every)

    for _, same in groupby(sorted(rows, key=setting), key=setting):
        yield min(same, key=lambda row: fmean(row.gaps))


def penalty(message: str, rows: Iterable[Measured]) -> float | None:
    """Return the most that messages cost beside those of 32 bits; None if that was not measured.

    In each series of runs, each has its best outer optimizer.
    """
    found: dict[tuple[object, ...], Measured] = {
        (row.optimizer, row.every, row.fragments, row.parameters, row.training, row.message): row
        for row in best(rows)
    }
    pairs = [
        (row, exact)
        for (*setting, written), row in found.items()
        if written == message and (exact := found.get((*setting, "32"))) is not None
    ]
    return max((fmean(few.gaps) - fmean(exact.gaps) for few, exact in pairs), default=None)


@dataclass(frozen=True)
class Advice:
    """What local steps bring; ``str`` of it is for people.

    Args:
        link: The job.
        every: H.
        code: How messages are written.
        gains: Speed beside ordinary data parallelism, of blocking exchanges and of fragments.
        losses: What was measured with such messages, the period next to H of each optimizer and
            number of fragments.
        optimizer: The inner one that was measured to lose least; None if no two were compared.
    """

    link: SlowLink
    every: int
    code: Code
    gains: tuple[float, float]
    losses: tuple[Measured, ...]
    optimizer: str | None

    @property
    def pays(self) -> bool:
        """Whether the speed outweighs the most steps that the loss was measured to cost."""
        return self.gains[1] > max(each for row in measured() for each in row.steps)

    @property
    def period_s(self) -> float:
        """Seconds between two exchanges of the same fragment."""
        link, overlap = self.link, self.every // _FRAGMENTS
        return self.every * link.step_s * link.local(self.every, _FRAGMENTS, overlap, self.code)

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
                *self._price(),
            ]
        )

    def _price(self) -> Iterator[str]:
        """Yield what is known of the loss, and what is not."""
        yield (
            "measured loss after as many steps, beside synchronous training with the same "
            "optimizer (docs/results/slow-links.md):"
        )
        yield from (f"  {row}" for row in self.losses)
        if not self.losses:
            yield f"  none with messages of {self.code.bits} bits"
        far = [row.every for row in self.losses if not self._is_near(row)]
        if len(far) == len(self.losses):
            yield f'  not measured: "every": {self.every}'
        elif far:
            yield f'  not measured: all of them at "every": {self.every}'
        yield "  not measured: larger models, longer runs, replicas of several ranks"
        name = self.optimizer
        chosen = f"{name}, which lost least" if name else "as you like, no two were compared"
        yield f"inner optimizer: {chosen}"
        sparse = {row.message for row in measured() if not row.message.isdigit()}
        costs = {message: penalty(message, measured()) for message in sorted(sparse)}
        told = [f"{each} cost {100 * cost:.1f} points" for each, cost in costs.items() if cost]
        reason = f"{', '.join(told)} more of the loss" if told else "their loss was not measured"
        yield f"sparse messages: none, {reason}"

    def _is_near(self, row: Measured) -> bool:
        return max(row.every / self.every, self.every / row.every) <= _SAME


def advise(link: SlowLink) -> Advice:
    """Return how often replicas should meet, in how many bits, and what was measured of that.

    They meet so seldom that twice their messages would be hidden. Fewer bits are for links on which
    that would be very rarely, and only if they were measured to cost little.
    """
    costs = {code: penalty(str(code.bits), measured()) for code in _FEWER}
    codes = [_EXACT, *(c for c, cost in costs.items() if cost is not None and cost <= _POINT)]
    code = next((each for each in codes if _period(link.messages(each)) <= _MOST), codes[-1])
    period = _period(link.messages(code))
    overlap = period // _FRAGMENTS
    gains = (
        link.dense / link.local(period, code=code),
        link.dense / link.local(period, _FRAGMENTS, overlap, code),
    )
    rows = nearest(period, code, measured())
    return Advice(link, period, code, gains, rows, _of_least_loss(rows))


def nearest(every: int, code: Code, rows: Iterable[Measured]) -> tuple[Measured, ...]:
    """Return of each optimizer, series and number of fragments the row next to a period."""

    def distance(row: Measured) -> float:
        return abs(math.log(row.every / every))

    found: dict[tuple[str | int, ...], Measured] = {}
    for row in best(row for row in rows if row.message == str(code.bits)):
        key = row.optimizer, row.parameters, row.fragments
        found[key] = min(found.get(key, row), row, key=distance)
    return tuple(found.values())


def _of_least_loss(rows: Iterable[Measured]) -> str | None:
    """Return the optimizer of the least gap in a series that has several; None if none has."""
    series: dict[tuple[int, ...], list[Measured]] = {}
    for row in rows:
        key = row.parameters, row.training, row.fragments, row.every
        series.setdefault(key, []).append(row)
    several = [each for each in series.values() if len(each) > 1]
    if not several:
        return None
    return min(several[-1], key=lambda row: fmean(row.gaps)).optimizer


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a replica is lost, and what that costs.

    Failures are random, and independent of each other.

    Args:
        per_day: Failures of all replicas together.
        restart_s: Seconds from a failure until the processes that were started again can train.
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
        """The share of steps that are kept if a lost replica ends the job, of those without loss.

        All replicas start again, from the last checkpoint.
        """
        rate = self.per_day / 86_400
        lost = rate * self.checkpoint_s
        repeated = lost / math.expm1(lost) if lost else 1.0
        return repeated / (1 + rate * self.restart_s)

    def elastic_goodput(self, replicas: int, period_s: float) -> float:
        """Return the same if the other replicas go on.

        A lost replica gives nothing from its last exchange to the first one at which it is back:
        its restart, and a period, as both ends of that time are exchanges. The others lose nothing.

        Args:
            replicas: Their number.
            period_s: Seconds between two exchanges of the same weights.
        """
        lost = self.per_day / 86_400 / replicas * period_s
        away = 1 + self.restart_s / period_s
        return 1 / (1 + away * math.expm1(lost))

    def told(self, replicas: int, period_s: float) -> str:
        """Return both in words; see `elastic_goodput`."""
        both = self.goodput, self.elastic_goodput(replicas, period_s)
        return (
            f"goodput with {self.per_day:g} random failures per day and restarts of "
            f"{self.restart_s:g} s: {both[0]:.1%} if all replicas go back to a checkpoint of every "
            f"{self.checkpoint_s:g} s; {both[1]:.1%} if replicas come and go and exchange every "
            f"{period_s:.3g} s"
        )


def _period(messages: float) -> int:
    return _FRAGMENTS * math.ceil(max(_LEAST, 2 * messages) / _FRAGMENTS)
