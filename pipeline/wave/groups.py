# SPDX-License-Identifier: Apache-2.0
"""Groups of segments by which passes alternate, to overlap collectives with passes.

Collectives are no actions of a plan. A segment that sums its output over ranks starts to do so
after its forward pass, and the micro-batch's next forward pass waits for it; one that sums the
gradient of its input starts after its backward pass, and the next backward pass waits. Waves
therefore alternate by groups of segments that end where a collective starts.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from wavemare.errors import PlanError
from wavemare.pipeline.plan.plan import Action, Kind, check_numbers

__all__ = ["Group", "Groups", "backward_pass", "forward_pass", "group_segments", "pass_pair"]

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


def forward_pass(num_segments: int, micro_batch: int) -> Iterator[Action]:
    """Return a micro-batch's forward passes of all segments of a pipeline stage."""
    return _passes(Kind.FORWARD, range(num_segments), micro_batch)


def backward_pass(num_segments: int, micro_batch: int) -> Iterator[Action]:
    """Return a micro-batch's backward passes of all segments of a pipeline stage."""
    return _passes(Kind.BACKWARD, range(num_segments - 1, -1, -1), micro_batch)


def pass_pair(
    sums_output: Sequence[bool], sums_gradient: Sequence[bool], *, backward: int, forward: int
) -> Iterator[Action]:
    """Return a micro-batch's backward passes alternating with another one's forward passes.

    They alternate where a collective starts, which then runs behind the other's passes, and the
    backward group comes first: what it frees, the forward group can keep.

    Args:
        sums_output: For each segment, whether it sums its output.
        sums_gradient: The same of its input's gradient.
        backward: The micro-batch that goes backward.
        forward: The other one.
    """
    segments = range(len(sums_output))
    up = _cut(segments, {segment for segment in segments if sums_output[segment]})
    down = _cut(reversed(segments), {segment for segment in segments if sums_gradient[segment]})
    nothing: Group = ()
    for below, above in zip_longest(down, up, fillvalue=nothing):
        yield from _passes(Kind.BACKWARD, below, backward)
        yield from _passes(Kind.FORWARD, above, forward)


def _passes(kind: Kind, segments: Iterable[int], micro_batch: int) -> Iterator[Action]:
    for segment in segments:
        yield Action(kind, segment, micro_batch)
