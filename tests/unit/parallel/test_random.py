# SPDX-License-Identifier: Apache-2.0
"""Random numbers inside and outside a region of a rank's own."""

import pytest
import torch
from torch import nn

from wavemare.parallel.tensor.layers import RowParallelLinear, SplitRandom

CPU = torch.device("cpu")


def draw(rank, seed=5):
    """Numbers before, inside and after a region."""
    torch.manual_seed(seed)
    random = SplitRandom(rank)
    before = torch.rand(4)
    random.enter(CPU)
    random.enter(CPU)  # a region that is open stays the same one
    inside = torch.rand(4)
    random.leave()
    random.leave()
    return before, inside, torch.rand(4)


def test_ranks_draw_their_own_numbers_inside_and_common_ones_outside():
    draws = [draw(rank) for rank in range(8)]
    for before, _, after in draws:
        assert torch.equal(before, draws[0][0])
        assert torch.equal(after, draws[0][2])
    assert len({tuple(inside.tolist()) for _, inside, _ in draws}) == 8


class Failing(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.weight, self.drop = nn.Parameter(torch.ones(1)), nn.Dropout(p)

    def forward(self, value):
        torch.rand(3)
        raise ValueError("no")


@pytest.mark.parametrize(
    ("training", "p", "is_region"), [(True, 0.1, True), (False, 0.1, False), (True, 0.0, False)]
)
def test_a_region_ends_with_an_error_and_is_none_without_dropout(training, p, is_region):
    module = Failing(p).train(training)
    SplitRandom(0).surround(module, "drop")
    torch.manual_seed(5)
    with pytest.raises(ValueError, match="no"):
        module(torch.ones(1))
    after = torch.get_rng_state()
    torch.manual_seed(5)
    if is_region:
        torch.randint(2**32, ())  # the number from which the region's follow, and no other
    else:
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), after)


def test_dropout_after_a_sum_draws_common_numbers(alone):
    results = []
    for rank in range(2):
        torch.manual_seed(5)
        random = SplitRandom(rank)
        random.enter(CPU)
        torch.rand(3)
        layer = RowParallelLinear(
            nn.Parameter(torch.eye(64)), None, alone, transposed=False, random=random
        )
        results.append(nn.Dropout(0.5)(layer(torch.ones(64))))
    assert torch.equal(*results)
    assert set(results[0].tolist()) == {0.0, 2.0}
