# SPDX-License-Identifier: Apache-2.0
"""The second pass names the module that makes a number that is not finite, and changes nothing."""

import math
from collections import namedtuple

import pytest
import torch
from torch import nn

from wavemare.engine.health.nonfinite_trace import (
    Finding,
    loss_of,
    trace,
)


class Forward(nn.Module):
    """Divides by zero on the way forward, where it is told to."""

    def __init__(self, on=False):
        super().__init__()
        self.on = on

    def forward(self, x):
        return x / 0 if self.on else x * 1


class Backward(nn.Module):
    """Is 0 at 0, where its derivative is infinite."""

    def __init__(self, on=False):
        super().__init__()
        self.on = on

    def forward(self, x):
        return x + (x * 0).abs().sqrt() if self.on else x * 1


class Block(nn.Module):
    def __init__(self, **on):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.forward_fault = Forward(on.get("forward", False))
        self.backward_fault = Backward(on.get("backward", False))
        self.drop = nn.Dropout(0.5)
        self.own = on.get("own", False)

    def forward(self, x, mask=None):
        y = self.drop(self.backward_fault(self.forward_fault(self.first(x))))
        return x + (y + (y * 0).abs().sqrt() if self.own else y)


class Model(nn.Module):
    def __init__(self, at=1, loss=None, **on):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(**(on if index == at else {})) for index in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.loss = loss or (lambda y: y.square().mean())

    def forward(self, x):
        for block in self.blocks:
            x = block(x, mask=torch.tensor(-math.inf))
        return {"loss": self.loss(self.norm(x)), "logits": x}


def find(model):
    x = torch.randn(3, 4)
    return trace(model, lambda: model(x), lambda out: [out["loss"]])


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize(("way", "what"), [("forward", "activation"), ("backward", "gradient")])
def test_the_innermost_module_is_named(at, way, what):
    assert find(Model(at, **{way: True})) == Finding(what, f"blocks.{at}.{way}_fault")


def test_a_sound_model_is_found_sound():
    assert find(Model()) is None


def test_code_between_modules_is_named_by_the_module_around_it():
    assert find(Model(1, own=True)) == Finding("gradient", "blocks.1", "behind 'blocks.1.drop'")


def test_a_loss_that_is_not_finite_is_the_models_own():
    assert find(Model(loss=lambda y: y.mean() / 0)) == Finding("loss", "Model")


def test_a_loss_functions_derivative_is_the_models_own():
    found = find(Model(loss=lambda y: (y * 0).abs().sqrt().mean()))
    assert found == Finding("gradient", "Model", "behind 'norm'")


def test_a_parameter_that_is_not_finite_is_told():
    model = Model()
    with torch.no_grad():
        model.blocks[2].first.weight[1, 2] = math.nan
    found = find(model)
    assert found.module == "blocks.2.first"
    assert "'weight'" in found.detail


def test_a_parameters_gradient_alone():
    layer = nn.Linear(2, 1, bias=False)
    x = torch.full((2, 2), 3e38)
    with torch.no_grad():
        layer.weight.zero_()
    found = trace(layer, lambda: layer(x), lambda out: [out.sum()])
    assert found == Finding("gradient", "Linear", "of its parameter 'weight'")


def test_nothing_is_changed():
    model = Model(1, backward=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = torch.randn(3, 4)
    state = torch.get_rng_state()
    trace(model, lambda: model(x), lambda out: [out["loss"]])
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_loss_of_what_models_return():
    loss = torch.ones((), requires_grad=True) * 1
    assert loss_of(loss) is loss
    assert loss_of((loss, torch.ones(2))) is loss
    assert loss_of(torch.ones(3, requires_grad=True)) is None
    assert loss_of(None) is None
    # As `train_batch` takes it: by its name, wherever it stands.
    named = namedtuple("Output", ["logits", "loss"])(torch.ones(2), loss)
    assert loss_of(named) is loss
