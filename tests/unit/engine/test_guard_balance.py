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
    return made, made.weighted_loss(nn.functional.cross_entropy, nn.Identity()), asked


def test_other_ranks_are_asked_in_the_first_pass_alone(weighing):
    made, loss, asked = weighing
    logits, labels = torch.randn(4, 3), torch.tensor([0, 2, -100, 1])
    plain = nn.functional.cross_entropy(logits, labels)
    with made.alone():
        torch.testing.assert_close(loss(logits, labels), plain * RANKS)
    assert asked == []
    torch.testing.assert_close(loss(logits, labels), plain)
    assert asked == ["replicas"]


def test_a_loss_over_no_token_is_not_blamed(weighing):
    made, loss, _ = weighing
    logits, labels = torch.randn(4, 3, requires_grad=True), torch.full((4,), -100)
    assert nn.functional.cross_entropy(logits, labels).isnan()
    with made.alone():
        value = loss(logits, labels)
    value.backward()
    assert value == 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_an_error_ends_it(weighing):
    made, loss, asked = weighing
    with pytest.raises(RuntimeError, match="of the pass"), made.alone():
        raise RuntimeError("of the pass")
    loss(torch.randn(1, 3), torch.tensor([1]))
    assert asked == ["replicas"]
