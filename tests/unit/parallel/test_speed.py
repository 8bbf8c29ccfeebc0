# SPDX-License-Identifier: Apache-2.0
"""Speeds of a rank: two sizes make a line, in the job's own type, and nothing is changed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from wavemare.parallel.balance import Line, example_samples, measure_speeds


class Clocked(nn.Module):
    """Takes 3 and 2 units for each sample, three times as long in its first passes of a size."""

    def __init__(self, clock, unit_s):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.clock, self.unit_s = clock, unit_s
        self.passes = {}
        self.types = set()

    def forward(self, x):
        size = len(x)
        self.passes[size] = self.passes.get(size, 0) + 1
        self.clock[0] += self.unit_s * (3 + 2 * size) * (3 if self.passes[size] <= 4 else 1)
        output = self.layer(x)
        self.types.add(output.dtype)
        return SimpleNamespace(loss=output.float().mean() + torch.rand(()))


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def batch_of(size):
    return {"x": torch.ones(size, 4)}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_two_sizes_make_a_line_once_they_are_warm(clock, alone, dtype):
    model = Clocked(clock, unit_s=2.0**-8).eval()
    state = torch.get_rng_state()
    (found,) = measure_speeds(model, batch_of, (4, 8), dtype=dtype)
    assert found == Line(3.0 / 256, 2.0 / 256)
    assert list(model.passes.items()) == [(8, 4 + 8), (4, 4 + 8)]
    assert model.types == {dtype or torch.float32}
    assert not model.training
    assert model.layer.weight.grad is None
    assert torch.equal(torch.get_rng_state(), state)


def test_slow_passes_are_fewer(clock, alone):
    model = Clocked(clock, unit_s=1.0)
    measure_speeds(model, batch_of, (4, 8))
    assert model.passes == {8: 2, 4: 2}


@pytest.mark.parametrize("head", ["LMHeadModel", "ForSequenceClassification"])
def test_examples_use_the_whole_vocabulary_and_suit_the_head(head):
    model = type(head, (), {"config": SimpleNamespace(vocab_size=60)})()
    batch = example_samples(model, sequence_length=12, samples=5)
    tokens = batch["input_ids"]
    assert tokens.shape == (5, 12)
    assert sorted(tokens.flatten().tolist()) == list(range(60))
    labels = tokens if head == "LMHeadModel" else torch.zeros(5, dtype=torch.long)
    assert torch.equal(batch["labels"], labels)
