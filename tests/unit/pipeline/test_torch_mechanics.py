# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does when weights change between a forward pass and its backward pass.

The engines rest on these facts; a new version of PyTorch that changes one shows here.
"""

import pytest
import torch
from torch import nn

OUTPUT_GRAD = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))
INPUT = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(4))


def net():
    torch.manual_seed(1)
    made = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    for p in made.parameters():
        p.grad = torch.randn_like(p)
    return made


def input_grad(forward, change=lambda: None):
    """Return the gradient of the inputs when the weights change after the forward pass."""
    x = INPUT.clone().requires_grad_()
    out = forward(x)
    change()
    out.float().backward(OUTPUT_GRAD)
    return x.grad


def expected_mix(net_at_forward, net_after):
    """Return the inputs' gradient by hand: activations of the forward pass, weights of now."""
    first, norm, last = net_after
    hidden = net_at_forward[0](INPUT)
    centred = hidden - hidden.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    unit = centred * scale
    grad = (OUTPUT_GRAD @ last.weight) * norm.weight
    along = (grad * unit).mean(-1, keepdim=True)
    grad = (grad - grad.mean(-1, keepdim=True) - unit * along) * scale
    return (grad @ first.weight).detach()


def step(parameters, **options):
    torch.optim.AdamW(parameters, lr=0.1, **options).step()


def step_aliases(parameters, alias_of):
    aliases = []
    for p in parameters:
        aliases.append(alias_of(p))
        aliases[-1].grad = p.grad
    step(aliases)


def step_quietly(parameters):
    # The engine's optimizer step does the same: torch has no public name for it.
    with torch.autograd._unsafe_preserve_version_counter(tuple(parameters)):
        step(parameters, foreach=True)


def write_through_data(parameters):
    for p in parameters:
        p.data.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize(
    "change",
    [
        lambda parameters: step(parameters, foreach=False),
        lambda parameters: step(parameters, foreach=True),
        lambda parameters: step_aliases(parameters, torch.Tensor.detach),
    ],
)
def test_a_step_that_autograd_sees_breaks_the_backward_pass(change):
    model = net()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_grad(model, lambda: change(list(model.parameters())))


@pytest.mark.parametrize(
    "change",
    [
        lambda parameters: step(parameters, fused=True),
        lambda parameters: step_aliases(parameters, lambda p: p.data),
        step_quietly,
        write_through_data,
    ],
)
def test_a_step_that_autograd_does_not_see_gives_new_weights(change):
    model = net()
    found = input_grad(model, lambda: change(list(model.parameters())))
    torch.testing.assert_close(found, expected_mix(net(), model), rtol=1e-5, atol=1e-5)
    # The mix is neither the gradient at the old weights nor that at the new ones.
    assert not torch.allclose(found, input_grad(net()), atol=1e-2)
    assert not torch.allclose(found, input_grad(model), atol=1e-2)
