# SPDX-License-Identifier: Apache-2.0
"""What autograd keeps at each moment: counted when it is kept, and until it is dropped."""

import torch
from torch import nn

from benchmarks.wave.saved_bytes import SavedBytes

WIDTH, ROWS = 8, 4
BLOCK = ROWS * WIDTH * 4


def forward(layers):
    return layers(torch.ones(ROWS, WIDTH)).sum()


def model(layers=3):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
    )


def test_a_forward_pass_keeps_what_its_backward_pass_drops():
    layers = model()
    live = SavedBytes(layers)
    with live.hooks():
        loss = forward(layers)
    # The input and the output of each tanh, which is the next layer's input.
    assert live.now == live.peak == 4 * BLOCK
    loss.backward()
    assert live.now == 0
    assert live.peak == 4 * BLOCK


def test_memory_that_two_keep_counts_once_until_both_have_dropped_it():
    live = SavedBytes(nn.Module())
    value = torch.ones(ROWS, WIDTH, requires_grad=True)
    with live.hooks():
        first, second = value * value.detach(), value[0] * value.detach()[1]
        assert live.now == BLOCK
    del first
    assert live.now == BLOCK
    del second
    assert live.now == 0
