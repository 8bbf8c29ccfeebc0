# SPDX-License-Identifier: Apache-2.0
"""What a second pass makes of losses that weigh by tokens, without the ranks that count theirs."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wavemare.engine import balance
from wavemare.engine.balance import Balance
from wavemare.engine.config.sections import BalanceConfig

RANKS = 2


@pytest.fixture
def weighing(monkeypatch):
    """A replica's balance, whose ranks have as many tokens each; and how often they were asked."""
    asked = []

    def all_reduce(total, group):
        asked.append(group)
        total.mul_(RANKS)

    monkeypatch.setattr(balance.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(balance.dist, "all_reduce", all_reduce)
    engine = SimpleNamespace(
        data_parallel_group="replicas",
        dp_world_size=RANKS,
        train_micro_batch_size_per_gpu=lambda: 4,
        gradient_accumulation_steps=lambda: 1,
    )
    made = Balance(BalanceConfig(mean="tokens"), engine)
    return made.weighted_loss(nn.functional.cross_entropy, nn.Identity()), asked


def test_other_ranks_are_asked_in_the_first_pass_alone(weighing):
    loss, asked = weighing
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
    plain = nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(loss.alone(logits, labels), plain)
    assert asked == []
    torch.testing.assert_close(loss(logits, labels), plain)
    assert asked == ["replicas"]


def test_a_loss_over_no_token_is_not_blamed(weighing):
    loss, _ = weighing
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.full((4,), -100)
    assert nn.functional.cross_entropy(logits, labels).isnan()
    value = loss.alone(logits, labels)
    value.backward()
    assert value == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
