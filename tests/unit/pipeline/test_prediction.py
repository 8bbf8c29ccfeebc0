# SPDX-License-Identifier: Apache-2.0
"""Predicted weights against PipeOptim's formula, from the optimizers' own states."""

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from wavemare.errors import CheckpointError, ModelError, PlanError
from wavemare.pipeline.staleness.correction import WeightPrediction

LR = 0.01


def sgd_step(optimizer, parameter):
    return optimizer.state[parameter]["momentum_buffer"]


def adam_step(optimizer, parameter):
    state = optimizer.state[parameter]
    (first, second), t = optimizer.param_groups[0]["betas"], float(state["step"])
    mean = state["exp_avg"] / (1 - first**t)
    return mean / (
        (state["exp_avg_sq"] / (1 - second**t)).sqrt() + optimizer.param_groups[0]["eps"]
    )


def muon_step(optimizer, parameter):
    # Five Newton-Schulz steps on the gradient plus the momentum, which Muon calls Nesterov's.
    group = optimizer.param_groups[0]
    buffer = optimizer.state[parameter]["momentum_buffer"]
    x = parameter.grad.lerp(buffer, group["momentum"]).bfloat16()
    x = x / x.norm().clamp(min=group["eps"])
    a, b, c = group["ns_coefficients"]
    for _ in range(group["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()


def move(prediction, weight):
    """Add one to a weight in an optimizer step."""
    prediction.before_step()
    weight.data.add_(1.0)
    prediction.after_step()


CASES = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9), sgd_step, 1e-6),
    "adamw": (lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.0), adam_step, 1e-6),
    "muon": (lambda p: torch.optim.Muon(p, lr=LR, weight_decay=0.0), muon_step, 1e-5),
}


@pytest.mark.parametrize(("make", "direction", "tolerance"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("staleness", [1, 3])
def test_prediction_is_what_the_optimizer_would_step_by_again(
    make, direction, tolerance, staleness
):
    torch.manual_seed(2)
    weight = Parameter(torch.randn(4, 6))
    optimizer, prediction = make([weight]), WeightPrediction([weight])
    for _ in range(5):
        weight.grad = torch.randn(4, 6)
        prediction.before_step()
        optimizer.step()
        prediction.after_step()
        wanted = weight.detach() - staleness * LR * direction(optimizer, weight)
        newest = weight.detach().clone()
        with prediction.forward(staleness):
            assert (weight.detach() - wanted).abs().max() < tolerance
            assert (weight.detach() - newest).abs().max() > 100 * tolerance
        assert torch.equal(weight, newest)


def test_backward_passes_use_the_newest_weights():
    first = nn.Linear(3, 3, bias=False)
    norm = nn.LayerNorm(3)
    parameters = [*first.parameters(), *norm.parameters()]
    prediction = WeightPrediction(parameters)
    prediction.before_step()
    for parameter in parameters:
        parameter.data.add_(torch.randn_like(parameter))
    prediction.after_step()
    x = torch.randn(2, 3, requires_grad=True)
    with prediction.forward(1):
        out = first(x)
    out.sum().backward()
    assert torch.allclose(x.grad, torch.ones(2, 3) @ first.weight.detach())
    with prediction.forward(2):
        out = norm(x.detach().requires_grad_())
    assert out.grad_fn is not None
    out.sum().backward()  # autograd has not noticed the writes


def test_the_newest_weights_come_back_after_an_error():
    weight = Parameter(torch.zeros(2))
    prediction = WeightPrediction([weight])
    move(prediction, weight)
    with pytest.raises(IndexError), prediction.forward(1):
        weight.data[5] += 1.0
    assert weight.tolist() == [1.0, 1.0]


def test_nothing_is_predicted_without_staleness_or_before_the_first_step():
    weight = Parameter(torch.ones(2))
    prediction = WeightPrediction([weight])
    with prediction.forward(3):
        assert weight.tolist() == [1.0, 1.0]
    move(prediction, weight)
    with prediction.forward(0):
        assert weight.tolist() == [2.0, 2.0]
    with pytest.raises(PlanError):
        prediction.correct(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state(dtype):
    weight, other = (Parameter(torch.ones(4, dtype=dtype)) for _ in range(2))
    prediction, resumed = WeightPrediction([weight]), WeightPrediction([other])
    move(prediction, weight)
    other.data.copy_(weight)
    resumed.load_state_dict(prediction.state_dict())
    with resumed.forward(2):
        assert other.tolist() == [4.0] * 4
    with pytest.raises(CheckpointError):
        resumed.load_state_dict({"mode": "predict", "changes": []})


def test_tied_parameters_are_written_once_and_overlapping_ones_refused():
    weight = Parameter(torch.zeros(4))
    prediction = WeightPrediction([weight, weight])
    move(prediction, weight)
    with prediction.forward(1):
        assert weight.tolist() == [2.0] * 4
    buffer = torch.zeros(6)
    with pytest.raises(ModelError):
        WeightPrediction([Parameter(buffer[:4]), Parameter(buffer[2:])])
