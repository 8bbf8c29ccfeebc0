# SPDX-License-Identifier: Apache-2.0
"""Our Muon is torch's for matrices and torch's AdamW for the rest, on flat partitions too."""

import pytest
import torch

from wavemare.errors import ConfigError
from wavemare.optim import Muon

SHAPES = ((6, 4), (5,), (4, 6))


def grads(steps=8):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield [torch.randn(shape, generator=generator) for shape in SHAPES]


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def step(optimizer, weights, gradients):
    for weight, grad in zip(weights, gradients, strict=True):
        weight.grad = grad.clone()
    optimizer.step()


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_torchs_muon_and_adamw(adjust, nesterov):
    own, expected = parameters(), parameters()
    common = {"lr": 0.02, "weight_decay": 0.1}
    settings = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjust}
    ours = Muon(own, **common, **settings, betas=(0.9, 0.99))
    matrices = torch.optim.Muon([expected[0], expected[2]], **common, **settings)
    rest = torch.optim.AdamW([expected[1]], **common, betas=(0.9, 0.99))
    for gradients in grads():
        step(ours, own, gradients)
        step(matrices, expected, gradients)
        rest.step()
    for a, b in zip(own, expected, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


def test_groups_without_muon_are_stepped_by_adamw():
    own, expected = parameters(), parameters()
    ours = Muon([{"params": own, "use_muon": False}], lr=0.02, betas=(0.9, 0.99))
    adam = torch.optim.AdamW(expected, lr=0.02, betas=(0.9, 0.99), weight_decay=0)
    for gradients in grads():
        step(ours, own, gradients)
        step(adam, expected, gradients)
    for a, b in zip(own, expected, strict=True):
        assert float((a - b).detach().abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 1.0), ("ns_steps", 0), ("ns_steps", 100), ("adjust_lr_fn", "orginal")],
)
def test_wrong_values_are_refused_by_name(key, value):
    with pytest.raises(ConfigError) as error:
        Muon(parameters(), **{key: value})
    assert error.value.key == key
