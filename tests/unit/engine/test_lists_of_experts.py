# SPDX-License-Identifier: Apache-2.0
"""ZeRO 1 and 2 sum gradients as they come: of the same weights on all ranks, in one order."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "multiproc" / "programs"))
from common import build_moe, token_batches

from wavemare.engine.experts import let_ranks_choose


def order(model, tokens):
    """Return the names of weights in the order in which a backward pass completes gradients."""
    found = []
    handles = [
        weight.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
        for name, weight in model.named_parameters()
    ]
    model.zero_grad()
    model(input_ids=tokens, labels=tokens).loss.backward()
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_gradients_of_all_experts_are_complete_in_one_order(zero_stage):
    model = build_moe(listed=True, num_experts=16, num_experts_per_tok=1)
    ranks = [next(token_batches(rank)) for rank in (0, 1)]
    before = [set(order(model, tokens)) for tokens in ranks]
    assert before[0] != before[1]
    let_ranks_choose(model, 0)
    assert set(order(model, ranks[0])) == before[0]
    let_ranks_choose(model, zero_stage)
    let_ranks_choose(model, zero_stage)  # a second engine
    first, second = (order(model, tokens) for tokens in ranks)
    assert first == second
    assert sorted(first) == sorted(name for name, _ in model.named_parameters())


def test_gradients_of_called_experts_stay_and_those_of_others_are_zero():
    plain, complete = (build_moe(listed=True, num_experts=16, num_experts_per_tok=1) for _ in "ab")
    let_ranks_choose(complete, 2)
    tokens = next(token_batches(0))
    for model in (plain, complete):
        model(input_ids=tokens, labels=tokens).loss.backward()
    named = dict(plain.named_parameters())
    lacking = 0
    for name, weight in complete.named_parameters():
        expected = named[name].grad
        lacking += expected is None
        assert torch.equal(weight.grad, torch.zeros_like(weight) if expected is None else expected)
    assert lacking
