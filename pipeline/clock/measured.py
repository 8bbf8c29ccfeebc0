# SPDX-License-Identifier: Apache-2.0
"""What passes and messages cost, from the times of actions that ran."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

from wavemare.pipeline.clock.simulate import Costs, Event
from wavemare.pipeline.plan.plan import COMPUTE, RECEIVES, SENDS, Kind, Message, message_of

__all__ = ["measured_costs"]


def measured_costs(ranks: Iterable[Iterable[Event]], homes: Sequence[int]) -> Costs:
    """Return the costs of stages whose backward passes are split.

    A pass takes the median of its times. A message takes as long as the fastest one, from the start
    of the send to the end of the receive: later ones may wait for their receiver. It is the mean of
    both directions between two ranks, so the ranks' clocks need not agree.

    Args:
        ranks: For each rank the events of the same optimizer steps, by its own clock.
        homes: For each stage its rank.
    """
    passes: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    sent: dict[Message, list[float]] = defaultdict(list)
    received: dict[Message, list[float]] = defaultdict(list)
    for action, start_s, end_s in (event for events in ranks for event in events):
        if action.kind in COMPUTE:
            passes[action.kind, action.stage].append(end_s - start_s)
        elif action.kind in SENDS:
            sent[message_of(action)].append(start_s)
        elif action.kind in RECEIVES:
            received[message_of(action)].append(end_s)
    fastest: dict[tuple[int, int], float] = defaultdict(lambda: math.inf)
    for message, starts in sent.items():
        kind, stage, *_ = message
        pair = homes[stage], homes[stage + SENDS[kind][1]]
        times = (b - a for a, b in zip(starts, received[message], strict=True))
        fastest[pair] = min(fastest[pair], *times)
    stages = range(len(homes))
    sends = []
    for stage, rank in enumerate(homes):
        others = {homes[s] for s in (stage - 1, stage + 1) if s in stages} - {rank}
        both = [(fastest[rank, other] + fastest[other, rank]) / 2 for other in others]
        sends.append(max([0.0, *both]))
    forward, inputs, weights = (
        tuple(median(passes[kind, stage]) for stage in stages)
        for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    whole = tuple(a + b for a, b in zip(inputs, weights, strict=True))
    return Costs(forward_s=forward, backward_s=whole, weight_s=weights, send_s=tuple(sends))
