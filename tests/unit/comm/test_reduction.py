# SPDX-License-Identifier: Apache-2.0
"""What a reduction learns from its own times: once, and from the fastest rank."""

import numpy as np
import pytest
import torch

from wavemare.comm.agreement import Agreement, Reported
from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors import Scratch
from wavemare.comm.reduction import Bucket, Reduction
from wavemare.comm.selection.cost import Constants
from wavemare.comm.statistics import Statistics


class Calls:
    """Calls of one bucket, which take twice as long as predicted on the fastest rank."""

    def __init__(self, transport):
        self.transport = transport
        self.reduction = Reduction(
            transport,
            None,
            block=64,
            mode="auto",
            constants=Constants(),
            allowed=("ordered",),
            compressor=None,
            scratch=Scratch(),
        )

    def make(self, *took_ns):
        """Make a call before which the ranks report how long the previous one took."""
        stats = Statistics()
        bucket = Bucket(torch.ones(1000), "key", 1.0)
        agreement = Agreement(self.transport, "allreduce_", block=64)
        agreement.wait = lambda: [Reported(took) for took in took_ns]
        self.reduction.all_reduce(bucket, agreement, stats)
        return round(2e9 * stats.predicted_s)

    def predicted(self):
        masks = Masks.of(np.ones((1, 16), dtype=bool))
        return self.reduction.selector.choose("key", masks, 256).predicted_s["ordered"]


@pytest.fixture
def calls(alone):
    return Calls(alone)


def test_a_call_is_learned_from_by_the_fastest_rank(calls):
    before = calls.predicted()
    took_ns = calls.make(0)
    calls.make(took_ns, 1)  # the first call teaches nothing
    assert calls.predicted() == before
    calls.make(0, took_ns)  # unknown on a rank
    assert calls.predicted() == before
    calls.make(2 * took_ns, took_ns, 3 * took_ns)
    assert calls.predicted() == pytest.approx(1.3 * before, rel=1e-2)
