# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a plan must have in common."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wavemare.errors import PlanError, did_you_mean
from wavemare.pipeline.config import TRAINED

if TYPE_CHECKING:
    from wavemare.parallel.layout.layout import Layout

__all__ = ["check_layout", "check_seconds"]

_ZERO_STAGES = (0, 1, 2, 3)
_ZERO_WEIGHTS = 3
_LARGEST = sys.float_info.max


def check_layout(plan: Layout) -> None:
    """Check a plan.

    Raises:
        PlanError: Naming the number that cannot be, the reason and the remedy.
    """
    for name in ("global_batch", "stages", "tensor_parallel", "data_parallel", "micro_steps"):
        _check_whole(name, getattr(plan, name), 1)
    for name in ("wavelet", "recompute"):
        if not isinstance(getattr(plan, name), bool):
            raise _refuse(plan, name, "it is neither true nor false", "Give one of the two")
    if plan.schedule not in TRAINED:
        remedy = did_you_mean(str(plan.schedule), TRAINED)
        raise _refuse(plan, "schedule", "there is no such schedule", remedy)
    _check_batch(plan)
    _check_cuts(plan)
    _check_memory(plan)
    _check_order(plan)


def check_seconds(key: str, value: Any, *, several: bool) -> None:
    """Check a predicted number, or a tuple of them.

    Args:
        key: Its place.
        value: It.
        several: Whether it must be a tuple.

    Raises:
        PlanError: One of them is negative or not finite, or no number.
    """
    if isinstance(value, tuple) != several:
        reason = "it is no list of numbers" if several else "it is a list"
        raise PlanError(key, value, reason, "Make the plan again")
    for number in value if isinstance(value, tuple) else (value,):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not 0 <= number <= _LARGEST:
            reason = f"{number!r} is not a finite number of at least 0"
            raise PlanError(key, value, reason, "Make the plan again")


def _check_batch(plan: Layout) -> None:
    shares, replicas = plan.shares, plan.data_parallel
    _check_numbers(plan, "shares", shares, 1)
    if len(shares) != replicas:
        reason = f"there are {len(shares)} of them for {replicas} replicas"
        raise _refuse(plan, "shares", reason, f"Give {replicas}")
    samples = sum(shares)
    if samples * plan.micro_steps != plan.global_batch:
        reason = f"{plan.micro_steps} micro-steps of {samples} samples are not {plan.global_batch}"
        raise _refuse(plan, "shares", reason, "Make the products equal")
    if samples % replicas:
        reason = f"the mean share, {samples} / {replicas}, which DeepSpeed is told, is not whole"
        raise _refuse(plan, "shares", reason, f"Give shares whose sum is a multiple of {replicas}")


def _check_cuts(plan: Layout) -> None:
    cuts, stages = plan.cuts, plan.stages
    if plan.num_layers is not None:
        _check_whole("num_layers", plan.num_layers, 1)
    if cuts is None:
        if stages > 1:
            reason = f"{stages} stages need it"
            raise _refuse(plan, "cuts", reason, f"Give {stages + 1} bounds")
        return
    if stages == 1:
        raise _refuse(plan, "cuts", "one stage is not cut", "Leave it out")
    _check_numbers(plan, "cuts", cuts, 0)
    if len(cuts) != stages + 1:
        reason = f"there are {len(cuts)} bounds for {stages} stages"
        raise _refuse(plan, "cuts", reason, f"Give {stages + 1}")
    if cuts[0] != 0 or cuts[-1] != plan.num_layers:
        reason = f"they do not lead from 0 to num_layers ({plan.num_layers})"
        raise _refuse(plan, "cuts", reason, "Begin with 0 and end with the number of layers")
    if any(right <= left for left, right in pairwise(cuts)):
        raise _refuse(plan, "cuts", "a stage is empty", "Give bounds that increase")


def _check_memory(plan: Layout) -> None:
    zero, pipeline = plan.zero_stage, plan.stages > 1 or plan.schedule == "pipemare"
    if zero not in _ZERO_STAGES or not isinstance(zero, int) or isinstance(zero, bool):
        raise _refuse(plan, "zero_stage", "there is no such stage of ZeRO", "Give 0, 1, 2 or 3")
    if pipeline and zero > 1:
        reason = "gradients or weights that ZeRO partitions cannot stay for a pipeline"
        raise _refuse(plan, "zero_stage", reason, "Give 0 or 1")
    if plan.tensor_parallel > 1 and zero == _ZERO_WEIGHTS:
        reason = "ZeRO 3 would cut the parts of split weights further"
        raise _refuse(plan, "zero_stage", reason, "Give 0, 1 or 2")
    if plan.wavelet and plan.stages > 1 and plan.tensor_parallel == 1:
        reason = "the stages have no tensor-parallel sums that waves could hide"
        raise _refuse(plan, "wavelet", reason, "Give false")
    if plan.wavelet and plan.stages == 1 and not plan.balanced:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        raise _refuse(plan, "wavelet", reason, "Give false, or equal shares")


def _check_order(plan: Layout) -> None:
    order = plan.order
    if order is None:
        return
    _check_numbers(plan, "order", order, 0)
    if len(order) != plan.world_size:
        reason = f"it names {len(order)} devices for {plan.world_size} ranks"
        raise _refuse(plan, "order", reason, "Name one device for each rank")
    if len(set(order)) != len(order):
        raise _refuse(plan, "order", "a device runs two ranks", "Name each device once")


def _check_numbers(plan: Layout, name: str, numbers: object, least: int) -> None:
    if not isinstance(numbers, tuple):
        raise _refuse(plan, name, "it is no tuple of whole numbers", "Give a tuple")
    _check_each(name, numbers, least)


def _check_each(name: str, numbers: Iterable[object], least: int) -> None:
    for place, number in enumerate(numbers):
        _check_whole(f"{name}[{place}]", number, least)


def _check_whole(key: str, number: object, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < least:
        reason = f"it is no whole number of at least {least}"
        raise PlanError(key, number, reason, f"Give {least} or more")


def _refuse(plan: Layout, name: str, reason: str, remedy: str) -> PlanError:
    return PlanError(name, getattr(plan, name), reason, remedy)
