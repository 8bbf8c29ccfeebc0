# SPDX-License-Identifier: Apache-2.0
"""One stage's part of a plan, followed action by action: what may come, and after what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import (
    COMPUTE,
    INPUT_GRADIENTS,
    RECEIVES,
    SENDS,
    WEIGHT_GRADIENTS,
    Action,
    Kind,
    Plan,
)

OF_A_STEP = frozenset(
    {
        Kind.REDUCE,
        Kind.NORM,
        Kind.SEND_NORM,
        Kind.RECV_NORM,
        Kind.SEND_TOTAL,
        Kind.RECV_TOTAL,
        Kind.STEP,
    }
)
_OF_A_CORRECTION = frozenset({Kind.RECV_GRAD, *INPUT_GRADIENTS, Kind.SEND_GRAD, Kind.RESTORE})
_SPLIT = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
_OPTIONAL = frozenset({Kind.CORRECT, Kind.RESTORE, *_SPLIT})


class PlanCursor:
    """Checks one stage's actions in their order, and measures staleness and activations.

    Args:
        stage: Counted from 0.
        plan: The whole plan, for its numbers.

    Attributes:
        sent: The stage's sends, to the next stage (1) and to the one before (-1).
        received: Its receives, of messages that go to the next stage (1) or to the one before (-1).
        loads: Its loads.
        staleness: By micro-batch, the optimizer steps between forward and backward pass.
        peak: The most micro-batches that were forwarded and whose gradients of the weights were not
            yet there.
    """

    def __init__(self, stage: int, plan: Plan) -> None:
        self.sent: dict[int, list[Action]] = {1: [], -1: []}
        self.received: dict[int, list[Action]] = {1: [], -1: []}
        self.loads: list[Action] = []
        self.staleness: dict[int, int] = {}
        self.peak = 0
        self._stage = stage
        self._plan = plan
        self._needs = _requirements(stage, plan)
        self._logs = {Kind.LOAD: self.loads}
        self._logs |= {kind: self.sent[step] for kind, (_, step) in SENDS.items()}
        self._logs |= {kind: self.received[-step] for kind, (_, step) in RECEIVES.items()}
        self._done: defaultdict[int, set[Kind]] = defaultdict(set)
        self._done_for_step: set[Kind] = set()
        self._forward_version: dict[int, int] = {}
        self._steps = 0
        self._reduced = 0  # optimizer steps whose gradients are complete
        self._complete = 0  # micro-batches whose gradients are
        self._corrected: Action | None = None

    def follow(self, actions: Iterable[Action]) -> None:
        """Check the stage's actions, all of them in their order.

        Raises:
            PlanError: An action may not come where it is, or one is missing.
        """
        for action in actions:
            kind, _, key, version = action
            if kind not in self._needs:
                raise _refusal(action, "this stage has nothing of this kind to do", "Leave it out")
            done = self._done_for_step if kind in OF_A_STEP else self._done[key]
            if kind in done:
                raise _refusal(action, "it is done a second time", "Leave it out")
            if missing := self._needs[kind] - done:
                needed = action._replace(kind=self._first(missing), version=-1)
                raise _refusal(
                    action, f"{needed} does not come before it", f"Put {needed} before it"
                )
            if self._corrected is not None or kind is Kind.CORRECT:
                self._meet_correction(action, done)
            expected = self._forward_version[key] if kind is Kind.CORRECT else self._steps
            if -1 != version != expected:
                reason = f"the weights' version is {expected} here"
                raise _refusal(action, reason, f"Write @{expected}, or leave the version out")
            if kind in OF_A_STEP:
                self._meet_step(action)
            done.add(kind)
            if kind is Kind.STEP:
                done.clear()
            if kind in COMPUTE:
                self._meet_pass(action)
            if kind in self._logs:
                self._logs[kind].append(action)
        self._finish()

    def _first(self, kinds: Iterable[Kind]) -> Kind:
        """Return the first of some missing kinds, in the order of `Kind`."""
        kind = min(kinds, key=list(Kind).index)
        split = kind is Kind.BACKWARD and self._plan.is_split
        return Kind.BACKWARD_INPUT if split else kind

    def _meet_pass(self, action: Action) -> None:
        """Check that a pass is between the right optimizer steps, and count it."""
        kind, micro_batch, plan = action.kind, action.micro_batch, self._plan
        step = micro_batch // plan.micro_batches
        misplaced = kind is Kind.FORWARD and plan.flushes and step != self._steps
        if kind in INPUT_GRADIENTS:
            misplaced = not step == self._steps == self._reduced
        if misplaced:
            reason = f"it belongs to optimizer step {step}, but {self._steps} steps come before it"
            raise _refusal(action, reason, "Put it between the steps to which it belongs")
        if kind is Kind.FORWARD:
            self._forward_version[micro_batch] = self._steps
            self.peak = max(self.peak, len(self._forward_version) - self._complete)
        if kind in INPUT_GRADIENTS:
            # I counts as the backward pass for later actions; after B neither part is left to do.
            self._done[micro_batch] |= {Kind.BACKWARD} if kind is Kind.BACKWARD_INPUT else _SPLIT
            self.staleness[micro_batch] = self._steps - self._forward_version[micro_batch]
        if kind in WEIGHT_GRADIENTS:
            if micro_batch != self._complete:
                reason = f"the stage's next gradients of the weights are those of {self._complete}"
                remedy = "Add them up in the order of micro-batches, for the same bits each time"
                raise _refusal(action, reason, remedy)
            self._complete += 1

    def _meet_step(self, action: Action) -> None:
        """Check what is done once per optimizer step, and count the steps."""
        size = self._plan.micro_batches
        end = ((self._reduced if action.kind is Kind.REDUCE else self._steps) + 1) * size
        if action.micro_batch != end - 1:
            reason = f"the next optimizer step is that of micro-batch {end - 1}"
            raise _refusal(action, reason, f"Put a step after every {size} micro-batches")
        if action.kind is Kind.REDUCE and self._complete < end:
            begun = self._complete in self.staleness
            kind = Kind.BACKWARD_WEIGHT if begun else self._first({Kind.BACKWARD})
            missing = Action(kind, self._stage, self._complete)
            raise _refusal(action, f"{missing} does not come before it", f"Put {missing} before it")
        if action.kind is Kind.REDUCE:
            self._reduced += 1
        elif action.kind is Kind.STEP:
            self._steps += 1

    def _meet_correction(self, action: Action, done: set[Kind]) -> None:
        """Check that nothing but the backward pass sees corrected weights."""
        if self._corrected is None:
            if Kind.BACKWARD in done:
                reason = "the backward pass comes before it"
                raise _refusal(action, reason, "Put it before the backward pass")
            self._corrected = action
            return
        if action.kind not in _OF_A_CORRECTION or action.micro_batch != self._corrected.micro_batch:
            reason = f"it would see the weights that {self._corrected} has put in place"
            raise _refusal(action, reason, "Put the newest weights back before it")
        if action.kind is Kind.RESTORE:
            self._corrected = None

    def _finish(self) -> None:
        """Check that nothing is missing at the end."""
        if self._corrected is not None:
            reason = "the newest weights are not put back after it"
            raise _refusal(self._corrected, reason, "Add the action that does so")
        plan, stage = self._plan, self._stage
        total = plan.micro_batches * max(1, plan.num_steps)
        # What a micro-batch lacks says more than the steps that do not come after it.
        self._find_missing(sorted(number for number in self._done if number < total))
        if self._steps != plan.num_steps:
            reason = f"stage {stage} does {self._steps} optimizer steps"
            raise PlanError("steps", plan.num_steps, reason, "Give each stage all steps")
        if extra := [micro_batch for micro_batch in self._done if micro_batch >= total]:
            reason = f"the plan has {total} micro-batches"
            raise _refusal(Action(Kind.FORWARD, stage, extra[0]), reason, "Leave it out")
        self._find_missing(range(total))

    def _find_missing(self, micro_batches: Iterable[int]) -> None:
        """Check that the stage has done all that these micro-batches need."""
        needed = self._needs.keys() - OF_A_STEP - _OPTIONAL
        for micro_batch in micro_batches:
            done = self._done.get(micro_batch, set())
            # A whole backward pass counts as both parts.
            parts = _SPLIT if Kind.BACKWARD_INPUT in done else frozenset()
            if missing := (needed | parts) - done:
                action = Action(self._first(missing), self._stage, micro_batch)
                raise _refusal(action, "it is missing", "Add it")


def _requirements(stage: int, plan: Plan) -> dict[Kind, frozenset[Kind]]:
    """Return the kinds of actions that a stage has to do, each with those that come before it."""
    homes, head = plan.rank_of, plan.num_stages - 1
    # Neighbours on one rank exchange no messages.
    before = stage > 0 and homes[stage - 1] != homes[stage]
    after = stage < head and homes[stage + 1] != homes[stage]
    loads = stage == 0 or (stage == head and homes[0] != homes[head])
    trains = plan.num_steps > 0
    overlaps = trains and not plan.flushes
    rules: list[tuple[Kind, bool, tuple[Kind, ...]]] = [
        (Kind.LOAD, loads, ()),
        (Kind.RECV_ACTIVATION, before, ()),
        (Kind.FORWARD, True, (Kind.LOAD, Kind.RECV_ACTIVATION)),
        (Kind.SEND_ACTIVATION, after, (Kind.FORWARD,)),
        (Kind.RECV_GRAD, trains and after, ()),
        (Kind.CORRECT, overlaps, (Kind.FORWARD,)),
        (Kind.BACKWARD, trains, (Kind.FORWARD, Kind.RECV_GRAD)),
        (Kind.BACKWARD_INPUT, trains, (Kind.FORWARD, Kind.RECV_GRAD)),
        (Kind.BACKWARD_WEIGHT, trains, (Kind.BACKWARD_INPUT,)),
        (Kind.RESTORE, overlaps, (Kind.CORRECT, Kind.BACKWARD)),
        (Kind.SEND_GRAD, trains and before, (Kind.BACKWARD,)),
        (Kind.REDUCE, trains, ()),
        (Kind.NORM, trains and plan.has_norms, (Kind.REDUCE,)),
        (Kind.RECV_NORM, overlaps and after, ()),
        (Kind.SEND_NORM, overlaps and before, (Kind.REDUCE, Kind.RECV_NORM)),
        (Kind.RECV_TOTAL, overlaps and before, ()),
        (
            Kind.SEND_TOTAL,
            overlaps and after,
            (Kind.RECV_TOTAL,) if before else (Kind.REDUCE, Kind.RECV_NORM),
        ),
        (Kind.STEP, trains, (Kind.NORM,) if plan.has_norms else (Kind.REDUCE,)),
    ]
    own = frozenset(kind for kind, is_due, _ in rules if is_due)
    return {kind: own.intersection(needs) for kind, is_due, needs in rules if is_due}


def _refusal(action: Action, reason: str, remedy: str) -> PlanError:
    return PlanError("action", str(action), reason, remedy)
