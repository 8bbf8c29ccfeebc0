# SPDX-License-Identifier: Apache-2.0
"""Stops or skips optimizer steps with numbers that are not finite, and says where they came from.

A sound step costs one pass over the reduced gradients, and an all-reduce of one number. Before the
backward pass a loss that is not finite is given gradients that are not, so that the reduction
spreads the news. A bad step costs a second pass over its micro-batches (`trace`).
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.engine.config.sections import GuardConfig
from wavemare.engine.context import EngineContext, Feature
from wavemare.engine.health.nonfinite_trace import (
    Finding,
    are_finite,
    explained,
    loss_of,
    trace,
)
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.seams import replaced
from wavemare.errors import NumericsError

_T = TypeVar("_T")


class StepConsensus:
    """Ranks that decide together, and learn the same.

    Args:
        groups: Process groups of this rank, in the same order on all ranks; None stands for all
            ranks. Each group joins what the groups before it have joined, as rows and columns of a
            grid do. A single rank has none.
    """

    def __init__(self, groups: Iterable[Any]) -> None:
        self._groups = tuple(groups)

    @property
    def speaks(self) -> bool:
        """Whether this rank logs a decision for all of them."""
        return all(dist.get_rank(group) == 0 for group in self._groups)

    def agree(self, seen: Tensor) -> bool:
        """Return whether any rank has seen something; () bool of this rank. All must call it."""
        flag = seen.float()
        for group in self._groups:
            dist.all_reduce(flag, group=group)
        return bool(flag)

    def gather(self, own: Sequence[_T]) -> list[_T]:
        """Return the values of all ranks, in the same order everywhere; all must call it."""
        found = list(own)
        for group in self._groups:
            found = [one for part in gather(found, group) for one in part]
        return found


def consensus_of(engine: EngineContext) -> StepConsensus:
    """Return the ranks that make an engine's optimizer steps together.

    These are all ranks, or the ranks of one stage of an asynchronous pipeline. Replicas have equal
    gradients, but each sees its own activations.
    """
    if engine.settings.local_steps.mode != "off":
        # All ranks would wait for the slow links; the others learn it from the next message.
        return StepConsensus([engine.data_parallel_group] if engine.dp_world_size > 1 else [])
    if not engine.settings.pipeline.is_asynchronous:
        return StepConsensus([None] if dist.get_world_size() > 1 else [])
    grid, groups = engine.grid, []
    # DeepSpeed has no group for a single rank.
    if engine.dp_world_size > 1:
        groups.append(grid.get_data_parallel_group())
    if grid.get_slice_parallel_world_size() > 1:
        groups.append(grid.get_slice_parallel_group())
    return StepConsensus(groups)


_KEY = "wavemare.guard.nonfinite"
_UNREPRODUCED = (
    "not found again in a second pass over the micro-batches, so it came from outside of them or "
    "from a fault of the machine"
)


@dataclass(frozen=True)
class Fault:
    """The first number of a step that is not finite, as one rank knows it.

    Args:
        rank: Global.
        stage: In the pipeline; None without one.
        micro_batch: Within the optimizer step, counted from 1; None if it is not known.
        finding: None if a second pass found nothing.
        arrived: Whether it came from a neighbouring stage.
    """

    rank: int
    stage: int | None
    micro_batch: int | None = None
    finding: Finding | None = None
    arrived: bool = False

    @property
    def place(self) -> tuple[bool, bool, bool, float, bool, int, int]:
        """Sorts faults such that the one that explains the others is the first."""
        # Reduced gradients tell no micro-batch, and may be bad by another replica's.
        reduced = self.micro_batch is None
        backward = self.finding is not None and self.finding.what == "gradient"
        depth = (-1 if backward else 1) * (self.stage or 0)
        number = self.micro_batch or math.inf
        return reduced, self.arrived, self.finding is None, number, backward, depth, self.rank

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.stage is not None:
            where += f" (stage {self.stage})"
        if self.micro_batch is not None:
            where += f", micro-batch {self.micro_batch}"
        if self.finding is None:
            return f"{where}: {_UNREPRODUCED}"
        found = self.finding
        told = f"{where}: the {found.what}"
        if found.module:
            told += f" of module {found.module!r}"
        if self.arrived:
            told += " that came from a neighbouring stage"
        return f"{told} ({found.detail})" if found.detail else told


@dataclass
class _Record:
    """A micro-batch of a step that is not decided yet, for a second pass."""

    step: int  # how many were done before its own
    micro_batch: int  # within it, counted from 1
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    random: dict[str, Any]
    loss: Tensor | None = None


class NumericsGuard(Feature):
    """Decides with the other ranks whether each optimizer step is made.

    Args:
        engine: Complete.
        config: The section, with another ``nonfinite`` than ``off``.

    Attributes:
        before_decision: Called first, to note pending faults.
    """

    def __init__(self, engine: EngineContext, config: GuardConfig) -> None:
        self._engine = engine
        self._config = config
        self._stage: int | None = engine.stage_id if engine.pipeline_parallelism else None
        self._consensus = consensus_of(engine)
        staged = engine.pipeline_parallelism
        self._slices = (
            engine.grid.get_slice_parallel_world_size() if staged else engine.mp_world_size
        )
        self._records: deque[_Record] = deque()
        self._faults: list[tuple[int, Fault]] = []
        self.before_decision: Callable[[], None] = lambda: None
        self._others = self._reads = True
        self._end: float = math.inf
        self._skips = 0

    # --- called by engines ------------------------------------------------------------------------

    def before_forward(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Keep what a forward pass of the whole model gets, until the step is decided.

        Of a step with more passes than it has micro-batches, the last ones are kept.
        """
        if not torch.is_grad_enabled():
            return
        step, records = self._engine.global_steps, self._records
        if records and records[-1].step < step:
            records.clear()
        micro_batch = records[-1].micro_batch + 1 if records else 1
        if len(records) >= self._engine.gradient_accumulation_steps():
            records.popleft()
        records.append(_Record(step, micro_batch, inputs, keywords, random_state()))

    def before_backward(self, loss: Tensor) -> Tensor:
        """Return a loss whose gradients are finite only if it is; a finite value stays."""
        value = loss.detach()
        if self._records:
            self._records[-1].loss = value
        return loss * (1 + 0 * value)

    def discard(self) -> None:
        """Discard faults of micro-batches that will be run again."""
        self._faults.clear()

    def reset(self) -> None:
        """Discard the steps before: other weights have been loaded."""
        self.discard()
        self._records.clear()
        self._skips = 0

    def note(self, number: int, fault: Fault) -> None:
        """Note a fault in a micro-batch of a stage."""
        self._faults.append((number, fault))

    def expect(self, end: int, norm: float | None) -> None:
        """Say what an asynchronous stage's next step is made of.

        Args:
            end: Number of the first micro-batch after it.
            norm: Squared gradient norm of this and the later stages, for which gradients need not
                be read again; None if it is not known.
        """
        self._end = end
        self._others = norm is None or math.isfinite(norm)
        # Of weights that are not split, one of the ranks that split the rest counts for all.
        self._reads = norm is None or self._slices > 1

    # --- the decision -----------------------------------------------------------------------------

    def before_step(self) -> bool:
        """Return whether the step may be made; all ranks that it sums over must call it.

        Raises:
            NumericsError: It may not, and the policy or the number of skipped steps ends the run.
        """
        self.before_decision()
        faults = [fault for number, fault in self._faults if number < self._end]
        try:
            if self._consensus.agree(self._seen(bool(faults) or not self._others)):
                self._report_nonfinite(faults)
                return False
            self._skips = 0
            return True
        finally:
            self._records.clear()
            self._faults = [noted for noted in self._faults if noted[0] >= self._end]
            self._others = self._reads = True

    def _seen(self, bad: bool) -> Tensor:
        """Return whether this rank has seen something bad, here or before; () bool."""
        finite = are_finite(adapt(self._engine).gradients() if self._reads else [])
        return (~finite | bad).to(self._engine.device, non_blocking=True)

    def _report_nonfinite(self, faults: list[Fault]) -> None:
        self._skips += 1
        known = self._consensus.gather([*faults, *self._search(bool(faults))])
        fault = min(known, key=lambda fault: fault.place)
        step = self._engine.global_steps + 1
        told = f"in optimizer step {step} a number is not finite; first on {fault}"
        mend = Finding.remedy if fault.finding is None else fault.finding.remedy
        mend += ", and resume from the last checkpoint"
        if self._config.nonfinite == "stop":
            raise NumericsError(_KEY, "stop", told, f'{mend}; "skip" leaves such steps out')
        if self._skips >= self._config.max_skips:
            raise NumericsError(
                "wavemare.guard.max_skips",
                self._config.max_skips,
                f"{self._skips} optimizer steps one after the other were skipped; {told}",
                mend,
            )
        if self._consensus.speaks:
            logging.getLogger("wavemare").warning("guard: step skipped: %s", told)

    # --- the cause --------------------------------------------------------------------------------

    def _search(self, found: bool) -> Iterator[Fault]:
        """Look for what is not finite; all micro-batches where passes meet in collectives."""
        if self._stage is not None:
            if not found:
                yield self._without_micro_batch()
            return
        here = Fault(dist.get_rank(), None)
        yield here
        engine = self._engine
        meets = engine.zero_optimization_partition_weights() or self._slices > 1
        meets = meets or engine.has_moe_layers or engine.settings.expert_parallel.size > 1
        # Those whose loss is known to be bad are the first to look at.
        records = sorted(self._records, key=lambda r: r.loss is None or bool(r.loss.isfinite()))
        for record in records:
            finding = self._repeat(record, together=meets)
            if finding is not None:
                yield replace(here, micro_batch=record.micro_batch, finding=finding)
                if not meets:
                    return

    def _without_micro_batch(self) -> Fault:
        """Return what a rank with stages knows that has seen nothing but its gradients."""
        engine, finding = self._engine, None
        name, parameter = _first_bad_parameter(engine)
        if parameter is not None:
            finding = Finding("gradient", name.rpartition(".")[0], f"of its parameter {name!r}")
        elif not self._others:
            finding = Finding("gradient", "", "of which it knows the norm alone")
        elif not bool(are_finite(adapt(engine).gradients())):
            finding = Finding("gradient", "")
        stage_of = getattr(engine.module, "stage_of", lambda _: self._stage)
        arrived = parameter is None and not self._others
        return Fault(dist.get_rank(), stage_of(parameter), finding=finding, arrived=arrived)

    def _repeat(self, record: _Record, *, together: bool) -> Finding | None:
        engine = self._engine

        def run() -> Any:
            restore_random_state(record.random)
            with autocast_if_enabled(engine):
                return engine.module(*record.inputs, **record.keywords)

        def roots(output: Any) -> tuple[list[Tensor], None]:
            loss = loss_of(output)
            return ([] if loss is None else [loss]), None

        found = trace(engine.module, run, roots, together=together)
        return explained(found, (record.inputs, record.keywords))


def attach_guard(engine: EngineContext, config: GuardConfig) -> NumericsGuard | None:
    """Return the guard of an engine; None where it is off, or fp16 skips steps itself."""
    skips_itself = engine.fp16_enabled() or engine.torch_autocast_z0_gradscaler
    without_section = "wavemare" not in engine.config  # all is as in DeepSpeed then
    if config.nonfinite == "off" or skips_itself or without_section or engine.optimizer is None:
        return None
    return NumericsGuard(engine, config)


def _first_bad_parameter(engine: EngineContext) -> tuple[str, Tensor | None]:
    """Return the last weight that has a bad gradient, and its name: backward passes begin there."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for parameter, gradient in reversed(list(adapt(engine).gradients_by_parameter())):
        if gradient is not None and not bool(are_finite([gradient])):
            return names[id(parameter)], parameter
    return "", None


@contextmanager
def skipping(engine: EngineContext) -> Iterator[None]:
    """Make an engine's optimizer skip its step, as on overflow."""
    with replaced(engine.optimizer, adapt(engine).skip_overrides()):
        yield
