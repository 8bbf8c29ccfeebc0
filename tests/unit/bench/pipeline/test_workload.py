# SPDX-License-Identifier: Apache-2.0
"""The models that are measured."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from wavemare.bench.pipeline import workload
from wavemare.bench.pipeline.request import PipelineRequest
from wavemare.bench.pipeline.workload import GPTWorkload, SyntheticWorkload, TimedWait
from wavemare.bench.ranks import build_gpt

SMALL = PipelineRequest(layers=4, hidden=16, heads=2, vocabulary=11, sequence=6, batch=3)


@pytest.fixture
def gpt(monkeypatch):
    # Timing the layers takes several processes.
    monkeypatch.setattr(workload, "layer_times", lambda model, chain, inputs: [1.0] * len(chain))
    return GPTWorkload(SMALL)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_parts_compute_what_the_model_computes(gpt, count):
    inputs, labels = gpt.batches[2]
    hidden = inputs
    parts = gpt.parts(count)
    assert len(parts) == count
    shapes = []
    for part in parts:
        hidden = part(hidden)
        shapes.append(tuple(hidden.shape))
    assert shapes == [*[gpt.activation_shape] * (count - 1), (3, 6, 11)]
    expected = build_gpt(SMALL)(input_ids=inputs, labels=labels).loss
    torch.testing.assert_close(gpt.loss(hidden, labels), expected)


def test_every_system_gets_new_modules_with_the_same_weights(gpt):
    weights = [
        [weight for part in gpt.parts(count) for weight in part.parameters()] for count in (1, 2, 4)
    ]
    for one, other in pairwise(weights):
        assert len(one) == len(other)
        assert all(torch.equal(a, b) and a is not b for a, b in zip(one, other, strict=True))


def test_batches_differ_and_are_the_same_for_all(gpt):
    assert not torch.equal(gpt.batches[0][0], gpt.batches[1][0])
    again = GPTWorkload(SMALL)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(gpt.batches, again.batches, strict=True))


def test_a_wait_is_a_linear_layer_to_autograd():
    torch.manual_seed(0)
    wait = TimedWait(1e-3, 1e-3)
    plain = nn.Linear(64, 64)
    plain.load_state_dict(wait.linear.state_dict())
    first = torch.randn(2, 64)
    inputs = [first.clone().requires_grad_(), first.clone().requires_grad_()]
    outputs = [wait(inputs[0]), plain(inputs[1])]
    for output in outputs:
        output.square().sum().backward()
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(wait.linear.weight.grad, plain.weight.grad)


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_waits_last_as_long_as_asked(needs_gradient):
    wait = TimedWait(0.01, 0.02)
    started = time.perf_counter()
    output = wait(torch.randn(2, 64, requires_grad=needs_gradient))
    between = time.perf_counter()
    output.sum().backward()
    # They last longer on a busy machine, and never shorter.
    assert between - started >= 0.01
    assert time.perf_counter() - between >= 0.02


def test_waits_add_up_to_the_same_whole():
    request = PipelineRequest(stages=4, synthetic=True, forward_ms=6.0, backward_ms=10.0)
    synthetic = SyntheticWorkload(request)
    for count in (4, 8):
        parts = synthetic.parts(count)
        assert sum(part.forward_s for part in parts) == pytest.approx(4 * 0.006)
        assert sum(part.backward_s for part in parts) == pytest.approx(4 * 0.010)
