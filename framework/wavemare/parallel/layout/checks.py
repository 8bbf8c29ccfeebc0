# SPDX-License-Identifier: Apache-2.0
"""What the numbers of a plan must have in common."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wavemare.errors import PlanError, check_number, did_you_mean
from wavemare.pipeline.config import TRAINED

if TYPE_CHECKING:
    from wavemare.parallel.layout.layout import Layout

_ZERO_STAGES = (0, 1, 2, 3)


def check_layout(plan: Layout) -> None:
    """Check a plan.

    Raises:
        PlanError: Naming the number that cannot be, the reason and the remedy.
    """
    for name in ("global_batch", "stages", "tensor_parallel", "data_parallel", "micro_steps"):
        check_number(PlanError, name, getattr(plan, name), 1, whole=True)
    if plan.num_layers is not None:
        check_number(PlanError, "num_layers", plan.num_layers, 1, whole=True)
    for name, least in (("shares", 1), ("cuts", 0), ("order", 0)):
        numbers = getattr(plan, name)
        if not isinstance(numbers, tuple) and (numbers is not None or name == "shares"):
            raise PlanError(name, numbers, "it is no tuple of whole numbers", "Give a tuple")
        for place, number in enumerate(numbers or ()):
            check_number(PlanError, f"{name}[{place}]", number, least, whole=True)
    for check in (_choices, _batch, _cuts, _memory, _order):
        for name, reason, remedy in check(plan):
            raise PlanError(name, getattr(plan, name), reason, remedy)


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
        check_number(PlanError, key, number)


_Refusals = Iterator[tuple[str, str, str]]
"""Names of values that cannot be, the reasons and the remedies."""


def _choices(plan: Layout) -> _Refusals:
    for name in ("wavelet", "recompute"):
        if not isinstance(getattr(plan, name), bool):
            yield name, "it is neither true nor false", "Give one of the two"
    if plan.schedule not in TRAINED:
        yield "schedule", "there is no such schedule", did_you_mean(str(plan.schedule), TRAINED)
    elif plan.stages > 1 and plan.schedule in ("interleaved", "zbv", "auto"):
        reason = "it puts several stages on each rank, and a layout puts one there"
        remedy = "Use 1f1b, zb-h1 or pipemare, or no annotations, plan or --balance"
        yield "schedule", reason, remedy
    zero = plan.zero_stage
    if zero not in _ZERO_STAGES or not isinstance(zero, int) or isinstance(zero, bool):
        yield "zero_stage", "there is no such stage of ZeRO", "Give 0, 1, 2 or 3"


def _batch(plan: Layout) -> _Refusals:
    count, replicas, samples = len(plan.shares), plan.data_parallel, sum(plan.shares)
    if count != replicas:
        yield "shares", f"there are {count} of them for {replicas} replicas", f"Give {replicas}"
    if samples * plan.micro_steps != plan.global_batch:
        reason = f"{plan.micro_steps} micro-steps of {samples} samples are not {plan.global_batch}"
        yield "shares", reason, "Make the products equal"
    if samples % replicas:
        reason = f"the mean share, {samples} / {replicas}, which DeepSpeed needs, is not whole"
        yield "shares", reason, f"Give shares whose sum is a multiple of {replicas}"


def _cuts(plan: Layout) -> _Refusals:
    cuts, stages = plan.cuts, plan.stages
    if cuts is None:
        if stages > 1:
            yield "cuts", f"{stages} stages need it", f"Give {stages + 1} bounds"
        return
    if stages == 1:
        yield "cuts", "one stage is not cut", "Leave it out"
    if len(cuts) != stages + 1:
        yield "cuts", f"there are {len(cuts)} bounds for {stages} stages", f"Give {stages + 1}"
    if cuts[0] != 0 or cuts[-1] != plan.num_layers:
        reason = f"they do not lead from 0 to num_layers ({plan.num_layers})"
        yield "cuts", reason, "Begin with 0 and end with the number of layers"
    if any(right <= left for left, right in pairwise(cuts)):
        yield "cuts", "a stage is empty", "Give bounds that increase"


def _memory(plan: Layout) -> _Refusals:
    if (plan.stages > 1 or plan.schedule == "pipemare") and plan.zero_stage > 1:
        reason = "gradients or weights that ZeRO partitions cannot stay for a pipeline"
        yield "zero_stage", reason, "Give 0 or 1"
    if plan.wavelet and plan.stages > 1 and plan.tensor_parallel == 1:
        reason = "the stages have no tensor-parallel sums that waves could hide"
        yield "wavelet", reason, "Give false"
    if plan.wavelet and plan.stages == 1 and not plan.balanced:
        reason = "waves scale the losses of micro-batches that are alike on all ranks"
        yield "wavelet", reason, "Give false, or equal shares"


def _order(plan: Layout) -> _Refusals:
    order, ranks = plan.order, plan.world_size
    if order is not None and len(order) != ranks:
        reason = f"it names {len(order)} devices for {ranks} ranks"
        yield "order", reason, "Name one device for each rank"
    if order is not None and len(set(order)) != len(order):
        yield "order", "a device runs two ranks", "Name each device once"
