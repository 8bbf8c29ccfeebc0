# SPDX-License-Identifier: Apache-2.0
"""From the order of passes to everything that a rank does: loads, messages and optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from wavemare.errors import PlanError
from wavemare.pipeline.clock.clock import fewest_slots
from wavemare.pipeline.plan.check import check_shape, check_stages
from wavemare.pipeline.plan.plan import INPUT_GRADIENTS, WEIGHT_GRADIENTS, Action, Kind, Plan

_FLUSH = Kind.REDUCE, Kind.NORM, Kind.STEP
_Around = Mapping[tuple[Kind, int], tuple[Sequence[Kind], Sequence[Kind]]]
"""By the kind and stage of a pass the messages and loads before it, and those after it."""


def lower(plan: Plan, *, flush: bool = True, norms: bool = False, correct: bool = False) -> Plan:
    """Add everything but passes to a plan that holds nothing else.

    Each rank steps once, after its last gradient of the step. The versions of the weights are
    filled in.

    Args:
        plan: With its homes, unless each rank has the stage of its number.
        flush: Whether all ranks sum their gradient norms before they step. `send_slots`
            becomes the smallest number that cannot deadlock, plus one. Without it each stage steps
            by itself, as in PipeMare; a rank has one stage, and the plan keeps its slots.
        norms: Whether stages that step by themselves exchange gradient norms. Each then knows the
            norm of all later stages for this very step. In a step that begins and ends with an
            empty pipeline the norm of all stages travels back, so that it is exact on every stage.
        correct: Whether to put `CORRECT` and `RESTORE` around the backward passes of micro-batches
            whose forward pass saw older weights.

    Raises:
        PlanError: A pass is missing or not where it should be, or ranks wait for each other with
            any number of slots.
    """
    if flush:
        plan = replace(plan, send_slots=1)
    check_shape(plan)
    passes_done = Counter(action[:3] for passes in plan.ranks for action in passes)
    if twice := next((pass_ for pass_, times in passes_done.items() if times > 1), None):
        raise PlanError("action", str(Action(*twice)), "it is done a second time", "Leave it out")
    completing = [_completing(passes, plan.micro_batches) for passes in plan.ranks]
    drained = set() if flush else _drained(plan, completing)
    around, ranks = _around(plan), []
    for rank, passes in enumerate(plan.ranks):
        stage = min(action.stage for action in passes)
        steps = {}
        for step, action in completing[rank].items():
            synchronous = step in drained and (step == 0 or step - 1 in drained)
            kinds = _FLUSH if flush else _alone(rank, plan, norms=norms, synchronous=synchronous)
            last = (step + 1) * plan.micro_batches - 1
            steps[action] = [Action(kind, stage, last, step) for kind in kinds]
        ranks.append(tuple(_completed(passes, around, steps, correct=correct)))
    plan = replace(plan, ranks=tuple(ranks))
    if flush:
        try:
            plan = replace(plan, send_slots=fewest_slots(plan) + 1)
        except PlanError:
            check_stages(plan)  # a missing pass says more than the ranks that wait for it
            raise
    check_stages(plan)
    return plan


def _completing(passes: Iterable[Action], micro_batches: int) -> dict[int, Action]:
    """Return for each optimizer step the pass of a rank that completes its gradients."""
    gradients = (action for action in passes if action.kind in WEIGHT_GRADIENTS)
    return {action.micro_batch // micro_batches: action for action in gradients}


def _drained(plan: Plan, completing: Sequence[Mapping[int, Action]]) -> set[int]:
    """Return the steps after which the pipeline is empty: no rank has forwarded any further."""
    drained = set(range(plan.num_steps))
    for passes, ends in zip(plan.ranks, completing, strict=True):
        steps = {action: step for step, action in ends.items()}
        forwarded = 0
        for action in passes:
            forwarded += action.kind is Kind.FORWARD
            if action in steps and forwarded > (steps[action] + 1) * plan.micro_batches:
                drained.discard(steps[action])
    return drained


def _alone(stage: int, plan: Plan, *, norms: bool, synchronous: bool) -> list[Kind]:
    """Return what an optimizer step of a stage that steps by itself consists of."""
    first, last = stage == 0, stage == plan.num_stages - 1
    kinds = [Kind.REDUCE]
    if norms:
        kinds += [Kind.RECV_NORM] * (not last) + [Kind.SEND_NORM] * (not first)
    if norms and synchronous:
        kinds += [Kind.RECV_TOTAL] * (not first) + [Kind.SEND_TOTAL] * (not last)
    return [*kinds, Kind.STEP]


def _around(plan: Plan) -> _Around:
    """Return what comes before and after passes; stages on one rank exchange no messages."""
    homes, head = plan.rank_of, plan.num_stages - 1
    around: dict[tuple[Kind, int], tuple[Sequence[Kind], Sequence[Kind]]] = {}
    for stage in range(plan.num_stages):
        before = stage > 0 and homes[stage - 1] != homes[stage]
        after = stage < head and homes[stage + 1] != homes[stage]
        loads = stage == 0 or (stage == head and homes[0] != homes[head])
        inputs = [Kind.RECV_ACTIVATION] * before + [Kind.LOAD] * loads
        around[Kind.FORWARD, stage] = inputs, [Kind.SEND_ACTIVATION] * after
        for kind in INPUT_GRADIENTS:
            around[kind, stage] = [Kind.RECV_GRAD] * after, [Kind.SEND_GRAD] * before
    return around


def _completed(
    passes: Iterable[Action],
    around: _Around,
    steps: Mapping[Action, Sequence[Action]],
    *,
    correct: bool,
) -> Iterator[Action]:
    """Yield all that a rank does.

    Args:
        passes: In their order.
        around: What comes before and after each.
        steps: By the pass that completes an optimizer step, what the step consists of.
        correct: See `lower`.
    """
    newest = 0
    seen: dict[int, int] = {}  # by micro-batch the version of its forward pass
    for action in passes:
        kind, stage, number, _ = action
        if kind is Kind.FORWARD:
            seen[number] = newest
        version = seen.get(number, newest) if kind is Kind.BACKWARD and correct else newest
        if version < newest:
            yield Action(Kind.CORRECT, stage, number, version)
        before, after = around.get((kind, stage), ((), ()))
        for other in before:
            yield Action(other, stage, number, newest)
        yield Action(kind, stage, number, newest)
        for other in after:
            yield Action(other, stage, number, newest)
        if version < newest:
            yield Action(Kind.RESTORE, stage, number, newest)
        if action in steps:
            yield from steps[action]
            newest += 1
