# SPDX-License-Identifier: Apache-2.0
"""Error feedback of updates against its formula, on a delayed problem, and in states."""

import math

import pytest
import torch
from torch.nn import Parameter

from wavemare.pipeline.optim.feedback import UpdateFeedback
from wavemare.pipeline.optim.soap_muon import SOAP, Muon

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
    "muon": lambda p: Muon(p, lr=0.1, weight_decay=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, betas=(0.99, 0.999), momentum_decay=0.0),
}
makers = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


def gradients(steps, shape=(3,)):
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(shape, generator=generator) for _ in range(steps)]


def trained(make, delay, steps=6, shape=(3,)):
    weight = Parameter(torch.ones(shape))
    optimizer = make([weight])
    if delay is not None:
        UpdateFeedback(optimizer, lambda: delay)
    path = [weight.detach().clone()]
    for gradient in gradients(steps, shape):
        weight.grad = gradient
        optimizer.step()
        path.append(weight.detach().clone())
    return path


@makers
def test_no_delay_changes_no_bit(make):
    assert all(map(torch.equal, trained(make, 0.0), trained(make, None)))


@pytest.mark.parametrize("delay", [0.5, 1.0, 3.0])
def test_each_update_is_extended_by_its_difference_to_the_one_before(delay):
    # Momentum, by hand: its updates do not depend on the weights.
    velocity, updates = torch.zeros(3), []
    for gradient in gradients(6):
        velocity = 0.5 * velocity + gradient
        updates.append(-0.1 * velocity)
    wanted = torch.ones(3) + updates[0]
    path = trained(MAKERS["sgd"], delay)
    for step, update in enumerate(updates[1:], start=2):
        extent = delay if delay <= 1 else math.sqrt(delay)
        wanted = wanted + update + extent * (update - updates[step - 2])
        assert torch.allclose(path[step], wanted, atol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_which_corrects_while_it_writes_does_what_the_formula_says(adjust):
    """The twin takes plain steps, from the same weights, and corrects them itself."""
    shapes = ((6, 4), (5,), (4, 6), (6, 4))
    settings = {"lr": 0.05, "weight_decay": 0.3, "adjust_lr_fn": adjust}
    delays = iter((0.0, 0.5, 4.0, 4.0, 0.0, 1.0))
    own = [Parameter(torch.ones(s, dtype=torch.float64)) for s in shapes]
    twin = [Parameter(w.detach().clone()) for w in own]
    fed, plain = Muon(own, **settings), Muon(twin, **settings)
    now = []
    UpdateFeedback(fed, lambda: now[-1])
    former = None
    generator = torch.Generator().manual_seed(5)
    for delay in delays:
        now.append(delay)
        for a, b in zip(own, twin, strict=True):
            a.grad = torch.randn(a.shape, generator=generator, dtype=torch.float64)
            b.grad = a.grad.clone()
        before = [w.detach().clone() for w in twin]
        fed.step()
        plain.step()
        updates = [w.detach() - b for w, b in zip(twin, before, strict=True)]
        for w, u, old in zip(twin, updates, former or updates, strict=True):
            w.data.add_(min(delay, math.sqrt(delay)) * (u - old))
        former = updates
        for a, b in zip(own, twin, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("delay", [1.0, 4.0])
def test_a_step_that_was_not_taken_is_no_update_to_go_on_from(delay):
    # SOAP only looks at its first gradient; its first step is then as long as without feedback.
    path, plain = (
        trained(lambda p: SOAP(p, lr=0.1), d, steps=3, shape=(3, 4)) for d in (delay, None)
    )
    assert torch.equal(path[1], path[0])
    assert torch.equal(path[2], plain[2])
    assert not torch.equal(path[2], path[1])
    assert not torch.equal(path[3], plain[3])


@makers
def test_the_update_before_is_in_the_optimizers_state(make):
    def run(steps, state=None, weight=None):
        weight = Parameter(torch.ones(3) if weight is None else weight.clone())
        optimizer = make([weight])
        UpdateFeedback(optimizer, lambda: 1.0)
        if state is not None:
            optimizer.load_state_dict(state)
        for gradient in gradients(6)[steps]:
            weight.grad = gradient
            optimizer.step()
        return optimizer.state_dict(), weight.detach()

    state, weight = run(slice(0, 3))
    _, resumed = run(slice(3, 6), state, weight)
    assert torch.equal(resumed, run(slice(0, 6))[1])


def test_parameters_without_a_gradient_are_left_alone():
    used, idle = Parameter(torch.ones(2)), Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([used, idle], lr=0.1)
    UpdateFeedback(optimizer, lambda: 1.0)
    for _ in range(3):
        used.grad = torch.ones(2)
        optimizer.step()
    assert idle.tolist() == [1.0, 1.0]
    assert idle not in optimizer.state
