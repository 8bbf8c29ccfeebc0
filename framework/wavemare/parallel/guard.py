# SPDX-License-Identifier: Apache-2.0
"""Watching a balanced job: whether ranks are as fast as they were measured, and stay so."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

from deepspeed.accelerator import get_accelerator
from torch import distributed as dist
from torch import nn

from wavemare.parallel.balance import shares_for
from wavemare.parallel.speed import Speed

__all__ = ["Guard", "Verdict"]

STEPS = 20
"""Optimizer steps after which a plan is judged."""
_EVERY = 5
_RECENT = 100
_ERROR = 0.2
_DRIFT = 0.15
_WEIGHTS = 3  # ZeRO's stage that cuts weights


class Verdict(NamedTuple):
    """What was measured of a plan.

    Args:
        predicted_s: For each rank the predicted seconds of the forward pass of a micro-batch.
        measured_s: The measured ones, medians.
        shares: New shares; None if the old ones stay.
    """

    predicted_s: tuple[float, ...]
    measured_s: tuple[float, ...]
    shares: tuple[int, ...] | None

    @property
    def factors(self) -> tuple[float, ...]:
        """For each rank measured over predicted seconds."""
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return tuple(measured / predicted for predicted, measured in pairs)

    @property
    def error(self) -> float:
        """The largest relative error of a prediction."""
        return max(abs(factor - 1) for factor in self.factors)

    @property
    def imbalance(self) -> float:
        """How much more one rank is off its prediction than another: what shares depend on."""
        return max(self.factors) / min(self.factors) - 1

    def __str__(self) -> str:
        ranks = ", ".join(
            f"rank {rank}: {measured * 1e3:.3g} ms (predicted {predicted * 1e3:.3g})"
            for rank, (predicted, measured) in enumerate(
                zip(self.predicted_s, self.measured_s, strict=True)
            )
        )
        change = f"; new shares {', '.join(map(str, self.shares))}" if self.shares else ""
        off = f"off by {self.error:.0%} at most, by {self.imbalance:.0%} more than another rank"
        return f"forward pass of a micro-batch, {ranks}; {off}{change}"


class Guard:
    """Measures forward passes, in which ranks do not wait for each other, and shares anew.

    After 20 steps shares are made anew, once, if a rank is off its prediction by 20 % more than
    another: what slows down all of them alike moves no share. At checkpoints they are made anew if
    a rank has drifted from the others by 15 % since: only every fifth pass is timed then, as that
    waits for the device.
    All ranks must call it alike. ZeRO-3 gathers weights within forward passes, where ranks wait for
    each other: what is measured there says nothing of one rank, and moves no share.

    Args:
        engine: Built with shares; no pipeline.
        speeds: What was measured of each rank.
        shares: The engine's.
        share_out: Applies new shares to the data; the engine's are applied here.
    """

    def __init__(
        self,
        engine: Any,
        speeds: Sequence[Speed],
        shares: Sequence[int],
        share_out: Callable[[Sequence[int]], None],
    ) -> None:
        self._engine = engine
        self._speeds = list(speeds)
        self._shares = tuple(shares)
        self._share_out = share_out
        self._watch = _Watch(engine.module)
        self._steps = self._judged_at = 0
        self._settled = False

    @property
    def shares(self) -> tuple[int, ...]:
        """The present ones."""
        return self._shares

    def after_step(self) -> Verdict | None:
        """Count an optimizer step; return the verdict when the plan has just been judged."""
        self._steps += 1
        if self._settled or self._steps < STEPS:
            return None
        self._settled = True
        return self._judge(_ERROR)

    def at_checkpoint(self) -> Verdict | None:
        """Return a verdict if a rank's speed has drifted since it was last judged."""
        # Whether there are enough measurements must be decided alike on all ranks.
        if not self._settled or self._steps - self._judged_at < STEPS * _EVERY:
            return None
        verdict = self._judge(_DRIFT)
        return verdict if verdict.shares is not None else None

    def apply(self, shares: Sequence[int]) -> None:
        """Go on with other shares: of the engine and of the data."""
        self._shares = tuple(shares)
        self._judged_at = self._steps
        self._watch.forget()
        self._engine.share_out(self._shares)
        self._share_out(self._shares)

    def close(self) -> None:
        """Stop watching."""
        self._watch.close()

    def _judge(self, tolerance: float) -> Verdict:
        predicted = tuple(
            speed.forward.seconds(share)
            for speed, share in zip(self._speeds, self._shares, strict=True)
        )
        table: list[Any] = [None] * len(self._shares)
        dist.all_gather_object(
            table, self._watch.median_s(), group=self._engine.data_parallel_group
        )
        measured = tuple(table)
        self._judged_at = self._steps
        self._watch.every = _EVERY
        verdict = Verdict(predicted, measured, None)
        if verdict.imbalance <= tolerance or self._engine.zero_optimization_stage() == _WEIGHTS:
            return verdict
        self._speeds = [
            Speed(speed.forward.scaled(factor), speed.whole.scaled(factor))
            for speed, factor in zip(self._speeds, verdict.factors, strict=True)
        ]
        shares = shares_for([speed.whole for speed in self._speeds], sum(self._shares))
        if shares == self._shares:
            return verdict
        self.apply(shares)
        return verdict._replace(shares=shares)


class _Watch:
    """Times a module's forward passes while it trains: every so many, as it waits for the device.

    Attributes:
        every: One of so many passes is timed.
    """

    def __init__(self, module: nn.Module) -> None:
        self.every = 1
        self._passes = 0
        self._seconds: deque[float] = deque(maxlen=_RECENT)
        self._started: float | None = None
        self._handles = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end),
        ]

    def median_s(self) -> float:
        """Return the median of the last ones since the last call; the first one warms up."""
        seconds = list(self._seconds)
        self.forget()
        return median(seconds[1:] or seconds)

    def forget(self) -> None:
        """Leave out what has been timed so far."""
        self._seconds.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _begin(self, module: nn.Module, _: Any) -> None:
        if not module.training:
            return
        self._passes += 1
        if self._passes % self.every == 0:
            get_accelerator().synchronize()
            self._started = time.perf_counter()

    def _end(self, module: nn.Module, _: Any, __: Any) -> None:
        if module.training and self._started is not None:
            get_accelerator().synchronize()
            self._seconds.append(time.perf_counter() - self._started)
            self._started = None
