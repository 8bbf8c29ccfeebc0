# SPDX-License-Identifier: Apache-2.0
"""Plans of waves on one rank: one micro-batch goes forward while another goes backward.

The stages of such a plan are the segments of a model, all on rank 0. The last one, the head, has
the loss and goes backward right after its forward pass. No engine runs these plans: they predict
and show what `wavemare.engine.waves` does. Tick-tock pairs the backward passes of one wave with the
forward passes of the next (Wavelet, MLSys 2021; here in its synchronous form, which adds up the
gradients of plain accumulation in the same order):

    F_1 | B_1 with F_2 | B_2 with F_3 | ... | B_M | reduce | step

Collectives are no actions of a plan. A segment that sums its output over ranks starts to do so
after its forward pass, and the micro-batch's next forward pass waits for it; one that sums the
gradient of its input starts after its backward pass, and the next backward pass waits. Waves
therefore alternate by groups of segments that end where a collective starts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.plan.orders import passes_to_plan
from wavemare.pipeline.plan.plan import Action, Kind, Plan, check_numbers

Group = tuple[int, ...]
"""Segments in the order of their passes."""


class Groups(NamedTuple):
    """Segments between two places where waves may alternate.

    Args:
        forward: All segments but the head, upwards.
        backward: Downwards from the head; the first group begins with it.
    """

    forward: tuple[Group, ...]
    backward: tuple[Group, ...]

    @property
    def below_head(self) -> tuple[Group, ...]:
        """The backward groups without the head, so that the first one may be empty."""
        first, *others = self.backward
        return (first[1:], *others)


def group_segments(
    num_segments: int, sums_output: Sequence[bool] = (), sums_gradient: Sequence[bool] = ()
) -> Groups:
    """Return the groups by which waves alternate.

    A forward group ends at each segment that sums its output, a backward group at each that sums
    its gradient. A direction without sums takes the groups of the other one, and without any sums
    each segment is a group, the head together with the segment before it: as soon as the head is
    done, bytes must be freed before the other wave keeps new ones.

    Args:
        num_segments: With the head.
        sums_output: For each segment, whether it sums its output; empty for none.
        sums_gradient: The same of its input's gradient.

    Raises:
        PlanError: There are flags for another number of segments, or the head sums its loss.
    """
    check_numbers(num_segments, 1, 0)
    for key, flags in {"sums_output": sums_output, "sums_gradient": sums_gradient}.items():
        if len(flags) not in {0, num_segments}:
            reason = f"these are {len(flags)} flags for {num_segments} segments"
            raise PlanError(key, tuple(flags), reason, "Give one for each segment, or none")
    head = num_segments - 1
    ends_up = {segment for segment, sums in enumerate(sums_output) if sums}
    ends_down = {segment for segment, sums in enumerate(sums_gradient) if sums}
    if head in ends_up:
        reason = "the head's output is the loss, for which nothing waits"
        raise PlanError("sums_output", tuple(sums_output), reason, "Give False for the head")
    if not ends_up and not ends_down:
        ends_up = set(range(head))
    ends_up = ends_up or {segment - 1 for segment in ends_down}
    ends_down = ends_down or {segment + 1 for segment in ends_up if segment + 1 < head}
    return Groups(_cut(range(head), ends_up), _cut(range(head, -1, -1), ends_down))


def _cut(segments: Iterable[int], ends: Container[int]) -> tuple[Group, ...]:
    """Return a row of segments cut behind each end."""
    groups: list[Group] = []
    group: Group = ()
    for segment in segments:
        group = (*group, segment)
        if segment in ends:
            groups.append(group)
            group = ()
    return tuple([*groups, group] if group else groups)


def accumulation(num_segments: int, micro_batches: int, num_steps: int = 1) -> Plan:
    """Return plain gradient accumulation: one micro-batch after the other.

    Raises:
        PlanError: A number is out of range.
    """
    check_numbers(num_segments, micro_batches, num_steps)
    segments = range(num_segments)
    passes = (
        action
        for micro_batch in range(micro_batches)
        for action in (*_forward(segments, micro_batch), *_backward(segments[::-1], micro_batch))
    )
    return _plan("accumulation", passes, num_segments, micro_batches, num_steps)


def in_phase(
    num_segments: int,
    micro_batches: int,
    num_steps: int = 1,
    *,
    sums_output: Sequence[bool] = (),
    sums_gradient: Sequence[bool] = (),
) -> Plan:
    """Return micro-batches in pairs that go forward together and then backward together.

    With halves of micro-batches this is Domino's order of passes, without its input-gradient
    all-reduce ahead of the weight gradient. It keeps the activations of two micro-batches.

    Args:
        num_segments: With the head.
        micro_batches: Per optimizer step; an odd last one runs alone.
        num_steps: Optimizer steps.
        sums_output: See `group_segments`.
        sums_gradient: See `group_segments`.

    Raises:
        PlanError: A number is out of range, or see `group_segments`.
    """
    check_numbers(num_segments, micro_batches, num_steps)
    groups = group_segments(num_segments, sums_output, sums_gradient)

    def passes() -> Iterator[Action]:
        for tick in range(0, micro_batches, 2):
            waves = range(tick, min(tick + 2, micro_batches))
            for group, micro_batch in product(groups.forward, waves):
                yield from _forward(group, micro_batch)
            for micro_batch in waves:
                yield from _head(num_segments, micro_batch)
            for group, micro_batch in product(groups.below_head, waves):
                yield from _backward(group, micro_batch)

    return _plan("in-phase", passes(), num_segments, micro_batches, num_steps)


def tick_tock(
    num_segments: int,
    micro_batches: int,
    num_steps: int = 1,
    *,
    sums_output: Sequence[bool] = (),
    sums_gradient: Sequence[bool] = (),
) -> Plan:
    """Return two waves half a cycle apart: one goes backward while the other goes forward.

    After each backward group comes the other wave's next forward group; the rest of the longer
    row comes last. The head comes when the other wave is done: backward passes of two micro-batches
    never mix. This order keeps the memory of one wave.

    Args:
        num_segments: With the head.
        micro_batches: Per optimizer step; each step starts and ends drained.
        num_steps: Optimizer steps.
        sums_output: See `group_segments`.
        sums_gradient: See `group_segments`.

    Raises:
        PlanError: A number is out of range, or see `group_segments`.
    """
    check_numbers(num_segments, micro_batches, num_steps)
    phase = _phase(group_segments(num_segments, sums_output, sums_gradient))
    below_head, last = range(num_segments - 1), micro_batches - 1

    def passes() -> Iterator[Action]:
        yield from _forward(below_head, 0)
        for micro_batch in range(last):
            yield from _head(num_segments, micro_batch)
            for kind, group in phase:
                if kind is Kind.BACKWARD:
                    yield from _backward(group, micro_batch)
                else:
                    yield from _forward(group, micro_batch + 1)
        yield from _head(num_segments, last)
        yield from _backward(below_head[::-1], last)

    return _plan("tick-tock", passes(), num_segments, micro_batches, num_steps)


def _phase(groups: Groups) -> list[tuple[Kind, Group]]:
    """Return the order of one wave's groups below the head and all of the next one's before it."""
    phase: list[tuple[Kind, Group]] = []
    for down, up in zip_longest(groups.below_head, groups.forward):
        if down is not None:
            phase.append((Kind.BACKWARD, down))
        if up is not None:
            phase.append((Kind.FORWARD, up))
    return phase


def _forward(segments: Iterable[int], micro_batch: int) -> Iterator[Action]:
    return (Action(Kind.FORWARD, segment, micro_batch) for segment in segments)


def _backward(segments: Iterable[int], micro_batch: int) -> Iterator[Action]:
    return (Action(Kind.BACKWARD, segment, micro_batch) for segment in segments)


def _head(num_segments: int, micro_batch: int) -> tuple[Action, ...]:
    head = (num_segments - 1,)
    return (*_forward(head, micro_batch), *_backward(head, micro_batch))


def _plan(
    schedule: str,
    passes: Iterable[Action],
    num_segments: int,
    micro_batches: int,
    num_steps: int,
) -> Plan:
    return passes_to_plan(schedule, (0,) * num_segments, [passes], micro_batches, num_steps)
