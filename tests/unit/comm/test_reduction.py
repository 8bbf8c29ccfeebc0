# SPDX-License-Identifier: Apache-2.0
"""What a reduction learns from its own times: once, and from the fastest rank."""

import numpy as np
import pytest
import torch

from wavemare.comm.blocks.masks import Masks
from wavemare.comm.executors import Scratch
from wavemare.comm.reduction import Reduction
from wavemare.comm.selection.cost import Constants
from wavemare.comm.statistics import Statistics


class Calls:
    """Calls of one bucket, which take twice as long as predicted on the fastest rank."""

    def __init__(self, transport):
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

    def make(self):
        stats = Statistics()
        self.reduction.all_reduce(torch.ones(1000), "key", 1.0, None, stats)
        return round(2e9 * stats.predicted_s)

    def predicted(self):
        masks = Masks.of(np.ones((1, 16), dtype=bool))
        return self.reduction.selector.choose("key", masks, 256).predicted_s["ordered"]


@pytest.fixture
def calls(alone):
    return Calls(alone)


def test_a_call_is_learned_from_once_and_by_the_fastest_rank(calls):
    before = calls.predicted()
    calls.reduction.learn("key", [calls.make(), 1])  # the first call teaches nothing
    assert calls.predicted() == before
    took_ns = calls.make()
    assert calls.reduction.took_ns("key") > 0
    assert calls.reduction.took_ns("other") == 0
    for _ in range(2):
        calls.reduction.learn("key", [2 * took_ns, took_ns, 3 * took_ns])
        assert calls.predicted() == pytest.approx(1.3 * before, rel=1e-2)
