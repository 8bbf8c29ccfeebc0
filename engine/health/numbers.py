# SPDX-License-Identifier: Apache-2.0
"""Stops or skips optimizer steps with numbers that are not finite, and says where they came from.

The guard asks whether the norm of the reduced gradients is finite, which clipping and reports need
at any rate. Before the backward pass a loss that is not finite is given gradients that are not, so
that the reduction spreads the news. Without stages, a bad step costs a second pass over its
micro-batches (`trace`).

In a pipeline whose stages do not add up their norms before the step, each stage decides alone: a
bad one leaves the step out, and the others learn it later, when all stop at the same step.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.torch_autocast import autocast_if_enabled
from torch import Tensor

from wavemare.engine.checkpoint.random_state import random_state, restore_random_state
from wavemare.engine.config.sections import GuardConfig
from wavemare.engine.feature import Feature
from wavemare.engine.health.nonfinite_trace import Finding, explained, loss_of, trace
from wavemare.engine.launch.group import gather
from wavemare.engine.optim.adapter import adapt
from wavemare.engine.optim.gradients import is_tied_copy, squared_norm
from wavemare.engine.optim.norm import scales_losses
from wavemare.engine.seams import replaced
from wavemare.errors import NumericsError

if TYPE_CHECKING:
    from wavemare.engine.base import EngineMixin

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


def consensus_of(engine: EngineMixin, *, stage: bool = False) -> StepConsensus:
    """Return the ranks that make an engine's optimizer steps together.

    These are all ranks, or those of one replica with local steps.

    Args:
        engine: Complete.
        stage: In a pipeline, return only the ranks that share a stage's optimizer: its replicas
            and slices. They have equal gradients unless a machine is at fault.
    """
    if not (stage and engine.pipeline_parallelism):
        if engine.num_replicas == 1 or engine.is_elastic:
            return StepConsensus([None] if dist.get_world_size() > 1 else [])
        # All ranks would wait for the slow links; the others learn it from the next message.
        own = engine.data_parallel_group if engine.dp_world_size > 1 else None
        return StepConsensus(filter(None, (own, engine.ranks.model_group)))
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
        finding: None if nothing was found.
        arrived: Whether it is a later stage's.
    """

    rank: int
    stage: int | None
    micro_batch: int | None = None
    finding: Finding | None = None
    arrived: bool = False

    @property
    def place(self) -> tuple[bool, bool, bool, float, int, int]:
        """Sorts faults such that the one that explains the others is the first."""
        # Reduced gradients tell no micro-batch, and may be bad by another replica's. Backward
        # passes bring bad numbers from later stages to earlier ones.
        reduced = self.micro_batch is None
        number = self.micro_batch or math.inf
        stage = self.stage or 0
        return reduced, self.arrived, self.finding is None, number, -stage, self.rank

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
        engine: Complete, with its `GradientNorm`.
        config: The section, with another ``nonfinite`` than ``off``.
    """

    def __init__(self, engine: EngineMixin, config: GuardConfig) -> None:
        self._engine = engine
        self._config = config
        self._stage: int | None = engine.stage_id if engine.pipeline_parallelism else None
        self._all = consensus_of(engine)
        self._mates = consensus_of(engine, stage=True)
        self._records: deque[_Record] = deque()
        self._losses: list[tuple[int, Tensor, Any]] = []
        self._faults: dict[int, Fault] = {}  # by step, those that other stages have not heard of
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
        """Make the gradients nan if the loss is not finite; otherwise return it unchanged."""
        value = loss.detach()
        if self._records:
            self._records[-1].loss = value
        return loss * (1 + 0 * value)

    def note_loss(self, micro_batch: int, loss: Tensor, labels: Any = None) -> None:
        """Note a loss of the present step, on a pipeline's last stage. The host waits for nothing.

        Args:
            micro_batch: Within the optimizer step, counted from 1.
            loss: Scalar, of the same shape and type in the whole step.
            labels: Those that the loss was computed with, to explain it.
        """
        self._losses.append((micro_batch, loss.detach(), labels))

    def reset(self) -> None:
        """Discard the steps before: other weights have been loaded."""
        self._forget_step()
        self._faults.clear()
        self._skips = 0

    def _forget_step(self) -> None:
        self._records.clear()
        self._losses.clear()

    # --- the decision -----------------------------------------------------------------------------

    def before_step(self) -> bool:
        """Return whether this rank may make the step; all ranks must call it.

        Raises:
            NumericsError: No stage may make it, or a stage has left an earlier one out, and the
                policy or the number of skipped steps ends the run. All ranks raise the same error
                at the same step.
        """
        try:
            # By then each stage has made that step, however far it may be ahead.
            self._stop_for_earlier(self._engine.global_steps - self._engine.stage_lead)
            if not self._is_bad():
                self._skips = 0
                return True
            faults = self._told.gather(list(self._search()))
            self._refuse_step(min(faults, key=lambda fault: fault.place))
            return False
        finally:
            self._forget_step()

    def settle(self) -> None:
        """Wait until it is known that each stage has made all steps so far; all ranks must call it.

        Raises:
            NumericsError: A stage has left one out; the same on all ranks.
        """
        self._stop_for_earlier()

    @property
    def _waits(self) -> bool:
        """Whether the stages of a pipeline have to wait for each other's decision."""
        if self._engine.norm.is_total:
            return False
        skips = self._config.nonfinite == "skip"
        synchronous = not self._engine.settings.pipeline.is_asynchronous
        return (skips and synchronous) or self._engine.norm.stages is None

    @property
    def _told(self) -> StepConsensus:
        """The ranks that know at once whether the step is bad."""
        return self._all if self._engine.norm.is_total or self._waits else self._mates

    def _is_bad(self) -> bool:
        norm, device = self._engine.norm, self._engine.device
        losses = torch.tensor(True, device=device)
        if self._losses:
            values = torch.stack([loss for _, loss, _ in self._losses])
            losses = values.isfinite().all().to(device)
            if norm.stages is None:  # else this rank's own word goes round with the norms
                self._spoil_gradient(losses)
        bad = (~norm.is_finite()).to(device)
        if norm.is_agreed:
            return bool(bad)
        if not norm.is_total:
            bad |= ~losses
        # A norm of all stages needs to be compared only with those of other replicas.
        return (self._all if self._waits else self._mates).agree(bad)

    def _spoil_gradient(self, losses: Tensor) -> None:
        """Make a gradient NaN unless the losses are finite, () bool: the norm spreads the news.

        The gradients of such a loss may be finite: they are zero if all labels are to be ignored.
        """
        for parameter, gradient in adapt(self._engine).gradients_by_parameter():
            if gradient is None or is_tied_copy(parameter):  # which counts on another stage
                continue
            values = gradient._values() if gradient.is_sparse else gradient
            if values.numel():
                first = values[(0,) * values.ndim]
                first.copy_(torch.where(losses, first, math.nan))
                return

    def _refuse_step(self, fault: Fault) -> None:
        """Raise an error, or note that the step is left out."""
        step = self._engine.global_steps + 1
        told, mend = _say(step, fault)
        if self._config.nonfinite == "stop":
            if self._told is self._mates and self._engine.norm.stages is not None:
                self._faults[step] = fault
                return
            raise NumericsError(_KEY, "stop", told, f'{mend}; "skip" leaves such steps out')
        self._skips += 1
        if self._skips >= self._config.max_skips:
            raise NumericsError(
                "wavemare.guard.max_skips",
                self._config.max_skips,
                f"{self._skips} optimizer steps one after the other were skipped; {told}",
                mend,
            )
        if self._told.speaks:
            logging.getLogger("wavemare").warning("guard: step skipped: %s", told)

    def _stop_for_earlier(self, until: float = math.inf) -> None:
        """Raise an error if a stage has left out a step that the others may have made."""
        norm = self._engine.norm
        if self._config.nonfinite != "stop" or norm.stages is None:
            return
        step = norm.first_left_out(until)
        if step is None:
            return
        found = [fault for fault in gather(self._faults.get(step), norm.stages) if fault]
        told, mend = _say(step, min(found, key=lambda fault: fault.place))
        told += (
            ". The stages with finite gradients have made that step, and no checkpoint was written "
            "since"
        )
        raise NumericsError(_KEY, "stop", told, f'{mend}; "skip" leaves such steps out')

    # --- the cause --------------------------------------------------------------------------------

    def _search(self) -> Iterator[Fault]:
        """Look for what is not finite; all micro-batches where passes meet in collectives."""
        if self._stage is not None:
            yield self._of_stage(self._stage)
            return
        here = Fault(dist.get_rank(), None)
        yield here
        engine = self._engine
        meets = engine.zero_optimization_partition_weights() or engine.mp_world_size > 1
        meets = meets or engine.has_moe_layers or engine.settings.expert_parallel.size > 1
        records = list(self._records)
        if not meets:  # those whose loss is known to be bad are the first to look at
            records.sort(key=lambda r: r.loss is None or bool(r.loss.isfinite()))
        for record in records:
            finding = self._repeat(record, together=meets)
            if finding is not None:
                yield replace(here, micro_batch=record.micro_batch, finding=finding)
                if not meets:
                    return

    def _of_stage(self, stage: int) -> Fault:
        """Return what a rank with stages knows: its losses and gradients."""
        engine = self._engine
        name, parameter = _first_bad_parameter(engine)
        for number, loss, labels in self._losses:
            if not bool(loss.isfinite().all()):
                detail = f"and then the gradient of the parameter {name!r}" if name else ""
                finding = explained(Finding("loss", "", detail), labels)
                return Fault(dist.get_rank(), _last_stage(engine), number, finding)
        here = Fault(
            dist.get_rank(), getattr(engine.module, "stage_of", lambda _: stage)(parameter)
        )
        if parameter is not None:
            detail = f"of its parameter {name!r}"
            return replace(here, finding=Finding("gradient", name.rpartition(".")[0], detail))
        if not bool(squared_norm(adapt(engine).gradients(), engine.device).isfinite()):
            return replace(here, finding=Finding("gradient", ""))
        if bool(engine.norm.is_finite()):
            return here
        finding = Finding("gradient", "", "of a later stage, whose norm alone it knows")
        return replace(here, finding=finding, arrived=True)

    def _repeat(self, record: _Record, *, together: bool) -> Finding | None:
        engine = self._engine

        def run() -> Any:
            restore_random_state(record.random)
            with autocast_if_enabled(engine):
                return engine.module(*record.inputs, **record.keywords)

        def roots(output: Any) -> list[Tensor]:
            loss = loss_of(output)
            return [] if loss is None else [loss]

        found = trace(engine.module, run, roots, together=together)
        return explained(found, (record.inputs, record.keywords))


def attach_guard(engine: EngineMixin, config: GuardConfig) -> NumericsGuard | None:
    """Return the guard of an engine; None where it is off, or a loss scaler skips steps itself."""
    without_section = "wavemare" not in engine.config  # all is as in DeepSpeed then
    if config.nonfinite == "off" or without_section or engine.optimizer is None:
        return None
    return None if scales_losses(engine) else NumericsGuard(engine, config)


def _say(step: int, fault: Fault) -> tuple[str, str]:
    """Return what is said of a bad step, and how it is mended."""
    told = f"in optimizer step {step} a number is not finite; first on {fault}"
    mend = Finding.remedy if fault.finding is None else fault.finding.remedy
    return told, f"{mend}, and resume from the last checkpoint"


def _last_stage(engine: EngineMixin) -> int:
    return len(getattr(engine.module, "homes", range(engine.num_stages))) - 1


def _first_bad_parameter(engine: EngineMixin) -> tuple[str, Tensor | None]:
    """Return the last weight that has a bad gradient, and its name: backward passes begin there."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    for parameter, gradient in reversed(list(adapt(engine).gradients_by_parameter())):
        if gradient is None:
            continue
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        if not bool(squared_norm([values], engine.device).isfinite()):
            return names[id(parameter)], parameter
    return "", None


@contextmanager
def skipping(engine: EngineMixin) -> Iterator[None]:
    """Make an engine's optimizer skip its step, as on overflow."""
    with replaced(engine.optimizer, adapt(engine).skip_overrides()):
        yield
