# SPDX-License-Identifier: Apache-2.0
"""The models that are measured."""

import pytest
import torch
from torch import nn

from benchmarks import device_like
from benchmarks.pipeline import workloads
from benchmarks.pipeline.request import PipelineRequest
from benchmarks.pipeline.systems import build_optimizer
from benchmarks.pipeline.workloads import GPTWorkload, SyntheticWorkload, TimedWait
from benchmarks.ranks import build_gpt
from benchmarks.request import Waits
from wavemare.engine.pipe.split_backward import SplitBackward

SMALL = PipelineRequest(layers=4, hidden=16, heads=2, vocabulary=11, sequence=6, batch=3)


@pytest.fixture
def gpt(monkeypatch):
    # Timing the layers takes several processes.
    monkeypatch.setattr(workloads, "layer_times", lambda model, chain, inputs: [1.0] * len(chain))
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


@pytest.fixture
def slept(monkeypatch):
    """Note the waits instead of sleeping."""
    log = []
    for module in (device_like, workloads):
        monkeypatch.setattr(module, "sleep", log.append)
    return log


def whole(wait, inputs, outputs):
    outputs.sum().backward()
    yield
    yield


def ours(wait, inputs, outputs):
    with (splitter := SplitBackward(wait)).step():
        outputs = wait(inputs)
        with splitter.input_pass(0):
            outputs.sum().backward()
        yield
        splitter.backward_weight(0)
        yield


@pytest.mark.parametrize(
    ("backward", "in_input", "in_weight"),
    [(whole, [3.0, 2.0], []), (ours, [1.0, 2.0], [3.0])],
)
def test_a_wait_is_a_linear_layer_that_sleeps_in_each_pass(slept, backward, in_input, in_weight):
    torch.manual_seed(0)
    wait = TimedWait(Waits(1.0, 2.0, 3.0))
    plain = nn.Linear(64, 64)
    plain.load_state_dict(wait.linear.state_dict())
    inputs = torch.randn(2, 64, requires_grad=True)
    twin = inputs.detach().clone().requires_grad_()
    expected = plain(twin)
    expected.sum().backward()
    outputs = wait(inputs)
    torch.testing.assert_close(outputs, expected)
    assert slept == [1.0]
    slept.clear()
    passes = backward(wait, inputs, outputs)
    next(passes)
    assert slept == in_input
    slept.clear()
    next(passes)
    assert slept == in_weight
    torch.testing.assert_close(inputs.grad, twin.grad)
    torch.testing.assert_close(wait.linear.weight.grad, plain.weight.grad)


def test_the_first_stage_sleeps_for_its_input_too(slept):
    TimedWait(Waits(1.0, 2.0, 3.0))(torch.randn(2, 64)).sum().backward()
    assert sorted(slept) == [1.0, 2.0, 3.0]


def test_a_step_of_an_optimizer_sleeps_as_long_as_asked_for_its_kind(slept):
    request = PipelineRequest(synthetic=True, adamw_ms=3.0, muon_ms=5.0, soap_ms=7.0)
    synthetic = SyntheticWorkload(request)
    for kind, seconds in (("AdamW", 0.003), ("Muon", 0.005), ("SOAP", 0.007)):
        (part,) = synthetic.parts(1)
        optimizer = build_optimizer(synthetic, kind, part)
        synthetic.prepare(optimizer)
        assert slept == []
        optimizer.step()
        assert slept == [seconds]
        slept.clear()


def test_waits_add_up_to_the_same_whole():
    request = PipelineRequest(stages=4, synthetic=True, forward_ms=6.0, backward_ms=10.0)
    synthetic = SyntheticWorkload(request)
    for count in (4, 8):
        waits = torch.tensor([part.waits for part in synthetic.parts(count)])
        assert waits.sum(0).tolist() == pytest.approx([4 * 0.006, 4 * 0.005, 4 * 0.005])
