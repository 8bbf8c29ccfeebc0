# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does when weights change between a forward pass and its backward pass.

The corrections rest on these facts; a new version of PyTorch that changes one shows here.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from wavemare.pipeline.correction import EmaCorrection

OUTPUT_GRAD = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(3))
INPUT = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(4))


class Net(nn.Module):
    """Linear, LayerNorm, Linear."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        for p in self.parameters():
            p.grad = torch.randn_like(p)

    def forward(self, x):
        return self.layers(x)


def input_grad(forward, change=lambda: None):
    """Return the gradient of the inputs when the weights change after the forward pass."""
    x = INPUT.clone().requires_grad_()
    out = forward(x)
    change()
    out.float().backward(OUTPUT_GRAD)
    return x.grad


def last_linear(net):
    return net.layers[2]


def stepped(net, kind, **options):
    return kind(net.parameters(), lr=0.1, **options).step


def expected_mix(net_at_forward, net_after):
    """Return the inputs' gradient by hand: activations of the forward pass, weights of now."""
    first, norm, last = net_after.layers
    hidden = net_at_forward.layers[0](INPUT)
    centred = hidden - hidden.mean(-1, keepdim=True)
    scale = (centred.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    unit = centred * scale
    grad = (OUTPUT_GRAD @ last.weight) * norm.weight
    along = (grad * unit).mean(-1, keepdim=True)
    grad = (grad - grad.mean(-1, keepdim=True) - unit * along) * scale
    return (grad @ first.weight).detach()


def check_new_weights(net, change):
    found = input_grad(net, change)
    wanted = expected_mix(Net(), net)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    # The mix is neither the gradient at the old weights nor that at the new ones.
    assert not torch.allclose(found, input_grad(Net()), atol=1e-2)
    assert not torch.allclose(found, input_grad(net), atol=1e-2)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_step_breaks_the_backward_pass(kind, foreach):
    net = Net()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_grad(net, stepped(net, kind, foreach=foreach))


def test_a_fused_step_is_not_noticed_by_autograd():
    net = Net()
    check_new_weights(net, stepped(net, torch.optim.AdamW, fused=True))


def test_a_step_that_preserves_version_counters_gives_new_weights():
    net = Net()

    def change():
        with torch.autograd._unsafe_preserve_version_counter(tuple(net.parameters())):
            stepped(net, torch.optim.AdamW, foreach=True)()

    check_new_weights(net, change)


def test_an_optimizer_over_data_aliases_gives_new_weights():
    net = Net()
    aliases = []
    for p in net.parameters():
        alias = p.data
        alias.grad = p.grad
        aliases.append(alias)
    check_new_weights(net, torch.optim.AdamW(aliases, lr=0.1).step)


def test_an_optimizer_over_detached_aliases_breaks_the_backward_pass():
    net = Net()
    aliases = []
    for p in net.parameters():
        alias = p.detach()
        alias.grad = p.grad
        aliases.append(alias)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        input_grad(net, torch.optim.AdamW(aliases, lr=0.1).step)


@pytest.mark.parametrize("method", ["copy_", "add_"])
def test_writing_through_data_gives_new_weights(method):
    net = Net()

    def change():
        for p in net.parameters():
            value = -0.1 * p.grad if method == "add_" else p.data - 0.1 * p.grad
            getattr(p.data, method)(value)

    check_new_weights(net, change)


def test_other_storage_gives_some_layers_old_weights_and_others_new_ones():
    net, before = Net(), Net()

    def change():
        for p in net.parameters():
            p.data = (p.data - 0.1 * p.grad).clone()

    found = input_grad(net, change)
    # Linear layers kept the tensor they had saved, LayerNorm looks the parameter up.
    before.layers[1] = net.layers[1]
    wanted = expected_mix(Net(), before)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, input_grad(Net()), atol=1e-2)


def test_autocast_keeps_the_weights_of_the_forward_pass():
    net = last_linear(Net())
    old = net.weight.detach().clone()

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return net(x)

    found = input_grad(forward, lambda: net.weight.data.add_(1.0))
    torch.testing.assert_close(found, OUTPUT_GRAD @ old, rtol=0.02, atol=0.02)
    assert not torch.allclose(found, OUTPUT_GRAD @ (old + 1.0), atol=0.5)


@pytest.mark.parametrize("how", ["data", "optimizer"])
def test_recomputation_takes_the_new_weights_for_both_passes(how):
    net = Net()

    def write():
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-0.1)

    change = write if how == "data" else stepped(net, torch.optim.AdamW)
    found = input_grad(lambda x: checkpoint(net, x, use_reentrant=False), change)
    assert torch.equal(found, input_grad(net))


def test_a_correction_is_what_the_backward_pass_sees():
    layer = nn.Linear(4, 4)
    correction = EmaCorrection(layer.parameters(), 0.0)
    old = layer.weight.detach().clone()

    def forward(x):
        with correction.forward(1):
            return layer(x)

    def change():
        correction.before_step()
        layer.weight.data.add_(0.01)
        correction.after_step()
        correction.correct(3)

    found = input_grad(forward, change)
    wanted = OUTPUT_GRAD @ (old - 2 * 0.01)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_adding_a_difference_back_does_not_restore_bfloat16():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 256, generator=generator).bfloat16()
    delta = (torch.randn(256, 256, generator=generator) * 1e-3).bfloat16()
    changed = weight.clone().add_(delta, alpha=-3).add_(delta, alpha=3)
    assert 0.001 < float((changed != weight).float().mean()) < 0.05
