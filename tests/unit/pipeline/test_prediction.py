# SPDX-License-Identifier: Apache-2.0
"""Predicted weights against PipeOptim's formula, from the optimizers' own states."""

import peft
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
    optimizer, prediction = make([weight]), WeightPrediction([weight], staleness)
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


@pytest.mark.parametrize("depth", [1, 2])
def test_backward_passes_use_the_newest_weights(depth):
    first = nn.Linear(3, 3, bias=False)
    norm = nn.LayerNorm(3)
    parameters = [*first.parameters(), *norm.parameters()]
    prediction = WeightPrediction(parameters, depth)
    prediction.before_step()
    for parameter in parameters:
        parameter.data.add_(torch.randn_like(parameter))
    prediction.after_step()
    x = torch.randn(2, 3, requires_grad=True)
    with prediction.forward(1):
        out = first(x)
    out.sum().backward()
    assert torch.allclose(x.grad, torch.ones(2, 3) @ first.weight.detach())
    with prediction.forward(depth):
        out = norm(x.detach().requires_grad_())
    assert out.grad_fn is not None
    out.sum().backward()  # autograd has not noticed the writes


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_weights_come_back_after_an_error(depth):
    weight = Parameter(torch.zeros(2))
    prediction = WeightPrediction([weight], depth)
    move(prediction, weight)
    with pytest.raises(IndexError), prediction.forward(1):
        weight.data[5] += 1.0
    assert weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("depth", [1, 3])
def test_nothing_is_predicted_without_staleness_or_before_the_first_step(depth):
    weight = Parameter(torch.ones(2))
    prediction = WeightPrediction([weight], depth)
    weight.data.sub_(1.0).add_(1.0)
    with prediction.forward(depth):
        assert weight.tolist() == [1.0, 1.0]
    move(prediction, weight)
    with prediction.forward(0):
        assert weight.tolist() == [2.0, 2.0]
    with pytest.raises(PlanError):
        prediction.correct(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depths", [(1, 1), (2, 2), (1, 2), (2, 1)])
def test_state(dtype, depths):
    weight, other = (Parameter(torch.ones(4, dtype=dtype)) for _ in range(2))
    prediction, resumed = (
        WeightPrediction([weight], depths[0]),
        WeightPrediction([other], depths[1]),
    )
    resumed.load_state_dict(prediction.state_dict())
    with resumed.forward(1):
        assert other.tolist() == [1.0] * 4
    move(prediction, weight)
    other.data.copy_(weight)
    resumed.load_state_dict(prediction.state_dict())
    with resumed.forward(depths[1]):
        assert other.tolist() == [2.0 + depths[1]] * 4
    with pytest.raises(CheckpointError):
        resumed.load_state_dict({"mode": "predict", "changes": []})


def copied_data(module):
    module.weight.data.copy_(torch.randn(3, 3))


def copied(module):
    with torch.no_grad():
        module.weight.copy_(torch.randn(3, 3))


def pointed(module):
    module.weight.data = torch.randn(3, 3)


def loaded(module):
    module.load_state_dict({**module.state_dict(), "weight": torch.randn(3, 3)})


def clipped(module):
    module.weight.data.clamp_(-0.1, 0.1)


def averaged(module):
    module.weight.data.lerp_(torch.randn(3, 3), 0.5)


def put_back(module):
    held = module.weight.detach().clone()
    averaged(module)
    module.weight.data.copy_(held)


def one_element(module):
    module.weight.data[1, 2] += 1e-3


def by_its_tie(module):
    module.tied.data.mul_(-1.0)


def merged(module):
    layers = peft.inject_adapter_in_model(
        peft.LoraConfig(target_modules=["layer"], init_lora_weights=False),
        nn.ModuleDict({"layer": module}),
    )
    layers["layer"].merge()
    assert module.weight is layers["layer"].base_layer.weight


CHANGES = [copied_data, copied, pointed, loaded, clipped, averaged, put_back, one_element]
CHANGES += [by_its_tie, merged]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("drains", ["before", "after", "never"])
@pytest.mark.parametrize("depth", [1, 2])
def test_weights_that_a_caller_changes_between_steps_are_predicted_from_themselves(
    depth, drains, change
):
    torch.manual_seed(4)
    module = nn.Linear(3, 3)
    module.tied = module.weight
    prediction = WeightPrediction(module.parameters(), depth)
    last_change = torch.randn(3, 3)
    for _ in range(2):
        with prediction.forward(1):
            pass
        prediction.before_step()
        module.weight.data.add_(last_change)
        prediction.after_step()
    if drains == "before":
        prediction.discard_versions()
    change(module)
    if drains == "after":
        prediction.discard_versions()
    newest = module.weight.detach().clone()
    for _ in range(2):
        with prediction.forward(1):
            assert torch.allclose(module.weight, newest + last_change, atol=1e-6)
        assert torch.equal(module.weight, newest)


def test_a_prediction_that_an_older_version_saved_goes_on():
    weight = Parameter(torch.ones(4))
    prediction = WeightPrediction([weight], 1)
    prediction.load_state_dict({"mode": "predict", "predicted": [torch.full((4,), 1.5)]})
    with prediction.forward(1):
        assert weight.tolist() == [1.5] * 4
    prediction.load_state_dict({"mode": "predict"})  # before its first step it saved none
    move(prediction, weight)
    with prediction.forward(1):
        assert weight.tolist() == [3.0] * 4


SHAPES = {
    "vector": torch.empty(500),
    "large": torch.empty(3, 2**19),
    "transposed": torch.empty(30, 20).T,
    "channels last": torch.empty(4, 3, 5, 5).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("like", SHAPES.values(), ids=SHAPES.keys())
def test_one_step_ahead_has_the_bits_of_many(like):
    torch.manual_seed(3)
    weight, other = (Parameter(torch.zeros_like(like)) for _ in range(2))
    near, far = WeightPrediction([weight], 1), WeightPrediction([other], 2)
    for number in range(4):
        change = torch.randn_like(like)
        for parameter, prediction in ((weight, near), (other, far)):
            if number == 3:  # another memory format, with the same contents
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            prediction.before_step()
            parameter.data.add_(change)
            prediction.after_step()
        newest = weight.detach().clone()
        with near.forward(1), far.forward(1):
            assert torch.equal(weight, other)
            assert not torch.equal(weight, newest)
        assert torch.equal(weight, newest)
    with pytest.raises(PlanError):
        near.forward(2).__enter__()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prediction_goes_on_with_other_parameters(depth):
    old, kept, new = (Parameter(torch.zeros(2)) for _ in range(3))
    former = WeightPrediction([old, kept], depth)
    former.before_step()
    kept.data.add_(1.0)
    former.after_step()
    following = WeightPrediction([kept, new], depth)
    following.go_on_from(former)
    with following.forward(depth):
        assert kept.tolist() == [1.0 + depth] * 2
        assert new.tolist() == [0.0] * 2


def test_tied_parameters_are_written_once_and_overlapping_ones_refused():
    weight = Parameter(torch.zeros(4))
    prediction = WeightPrediction([weight, weight], 1)
    move(prediction, weight)
    with prediction.forward(1):
        assert weight.tolist() == [2.0] * 4
    buffer = torch.zeros(6)
    with pytest.raises(ModelError):
        WeightPrediction([Parameter(buffer[:4]), Parameter(buffer[2:])], 1)
