# SPDX-License-Identifier: Apache-2.0
"""Shares of unlike devices: their samples, their checks."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import SequentialSampler

from support.refusals import refuses
from wavemare.engine.balance import Balance, ShareSampler, WeightedLoss
from wavemare.engine.base import EngineMixin
from wavemare.engine.config.refusals import check_shares
from wavemare.engine.config.sections import BalanceConfig
from wavemare.errors import ConfigError, DataError

SIZES = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(20, 60), st.booleans())
def test_ranks_read_every_sample_of_whole_micro_batches_once(shares, size, shuffle):
    stride = sum(shares)
    samplers = [
        ShareSampler(
            range(size), first=sum(shares[:rank]), count=share, stride=stride, shuffle=shuffle
        )
        for rank, share in enumerate(shares)
    ]
    own = [list(sampler) for sampler in samplers]
    assert [len(indices) for indices in own] == [len(sampler) for sampler in samplers]
    rounds = size // stride
    together = [
        index
        for turn in range(rounds)
        for indices, share in zip(own, shares, strict=True)
        for index in indices[turn * share : (turn + 1) * share]
    ]
    assert len(set(together)) == len(together) == rounds * stride
    if not shuffle:
        assert together == list(range(rounds * stride))
    assert list(samplers[0]) == own[0]


def test_the_order_is_that_of_equal_shares():
    with refuses(DataError, "training_data", 15):
        ShareSampler(range(15), first=0, count=8, stride=16, shuffle=True)
    equal = ShareSampler(range(32), first=0, count=8, stride=16, shuffle=True)
    whole = ShareSampler(range(32), first=0, count=16, stride=16, shuffle=True)
    unequal = ShareSampler(range(32), first=0, count=10, stride=16, shuffle=True)
    assert list(equal) == [*list(whole)[:8], *list(whole)[16:24]]
    assert list(unequal) == [*list(whole)[:10], *list(whole)[16:26]]


@pytest.mark.parametrize("shares", [[20, 11], [16], [32, 0]])
def test_numbers_that_do_not_fit_are_refused(shares):
    with refuses(ConfigError, "wavemare.balance.shares", shares):
        check_shares(BalanceConfig.parse({"shares": shares}), SIZES, 2)


@pytest.mark.parametrize("section", [{}, {"shares": [20, 12]}])
def test_numbers_that_fit_pass(section):
    check_shares(BalanceConfig.parse(section), SIZES, 2)


def test_tokens_cannot_be_counted_without_labels(monkeypatch):
    monkeypatch.setattr("wavemare.engine.balance.dist.get_rank", lambda group: 0)
    engine = SimpleNamespace(
        data_parallel_group=None, dp_world_size=1, train_micro_batch_size_per_gpu=lambda: 4
    )
    balance = Balance(BalanceConfig(mean="tokens"), engine)
    with refuses(DataError, "labels", None):
        balance.before_backward(torch.ones(()))


def test_shares_keep_the_size_of_micro_batches_and_draw_the_samples():
    engine = SimpleNamespace(settings=SimpleNamespace(balance=BalanceConfig(shares=[3, 5])))
    with refuses(ConfigError, "train_micro_batch_size_per_gpu", 8):
        EngineMixin.set_train_micro_batch_size(engine, 8)
    with refuses(ConfigError, "data_sampler", "SequentialSampler"):
        EngineMixin.deepspeed_io(engine, [1, 2], data_sampler=SequentialSampler([1, 2]))


def test_a_loss_alone_asks_no_other_rank_and_counts_nothing_without_tokens():
    loss = WeightedLoss(SimpleNamespace(counts_tokens=True), F.cross_entropy, nn.Identity())
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
    torch.testing.assert_close(loss.alone(logits, labels), F.cross_entropy(logits, labels))
    assert loss.alone(logits, torch.full((4,), -100)) == 0
