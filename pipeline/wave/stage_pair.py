# SPDX-License-Identifier: Apache-2.0
"""The passes of one stage of a pipeline by its segments, alone or two of them together.

The stages of these actions are segments of one pipeline stage, as in
:mod:`wavemare.pipeline.wave.schedule`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from wavemare.pipeline.plan.action import Action, Kind
from wavemare.pipeline.wave.groups import Group, cut

__all__ = ["backward_pass", "forward_pass", "pass_pair"]


def forward_pass(num_segments: int, micro_batch: int) -> Iterator[Action]:
    """Return a micro-batch's forward passes of all segments."""
    return _passes(Kind.FORWARD, range(num_segments), micro_batch)


def backward_pass(num_segments: int, micro_batch: int) -> Iterator[Action]:
    """Return a micro-batch's backward passes of all segments."""
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
    up = cut(segments, {segment for segment in segments if sums_output[segment]})
    down = cut(reversed(segments), {segment for segment in segments if sums_gradient[segment]})
    nothing: Group = ()
    for below, above in zip_longest(down, up, fillvalue=nothing):
        yield from _passes(Kind.BACKWARD, below, backward)
        yield from _passes(Kind.FORWARD, above, forward)


def _passes(kind: Kind, segments: Iterable[int], micro_batch: int) -> Iterator[Action]:
    for segment in segments:
        yield Action(kind, segment, micro_batch)
