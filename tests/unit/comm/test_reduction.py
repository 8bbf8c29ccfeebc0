# SPDX-License-Identifier: Apache-2.0
"""What a reduction learns from its own times: once, and from the fastest rank."""

import pytest
import torch

from wavemare.comm.cost import Constants
from wavemare.comm.executors import Scratch
from wavemare.comm.reduction import Reduction
from wavemare.comm.statistics import Statistics


class Alone:
    """A transport of one rank."""

    rank, size = 0, 1
    message_device = torch.device("cpu")

    def peers(self):
        return []

    def begin(self):
        return self

    def wait(self):
        pass

    def all_gather(self, mine, table):
        table[0] = mine


@pytest.fixture
def reduction(monkeypatch):
    reduction = Reduction(
        Alone(),
        None,
        block=64,
        mode="auto",
        constants=Constants(),
        allowed=("ordered",),
        compressor=None,
        scratch=Scratch(),
    )
    learned = []
    monkeypatch.setattr(reduction.selector, "learn", lambda *told: learned.append(told))
    reduction.learned = learned
    return reduction


def test_a_call_is_learned_from_once_and_by_the_fastest_rank(reduction):
    stats = Statistics()
    reduction.all_reduce(torch.ones(1000), "key", 1.0, None, stats)
    own = reduction.took_ns("key")
    assert own > 0
    assert reduction.took_ns("other") == 0
    reduction.learn("key", [own, own // 2, 3 * own])
    ratio = 1e-9 * (own // 2) / stats.predicted_s
    assert reduction.learned == [("key", "ordered", pytest.approx(ratio))]
    reduction.learn("key", [own, own, own])
    assert len(reduction.learned) == 1


def test_nothing_is_learned_while_a_rank_has_nothing_to_tell(reduction):
    reduction.all_reduce(torch.ones(1000), "key", 1.0, None, Statistics())
    reduction.learn("key", [reduction.took_ns("key"), 0])
    reduction.learn("other", [5, 5])
    assert reduction.learned == []
