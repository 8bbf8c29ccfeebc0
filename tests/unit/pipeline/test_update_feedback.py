# SPDX-License-Identifier: Apache-2.0
"""Error feedback of updates against its formula, on a delayed problem, and in states."""

import math

import pytest
import torch
from torch.nn import Parameter

from wavemare.pipeline.soap import SOAP
from wavemare.pipeline.update_feedback import UpdateFeedback

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1),
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


def test_a_telescoping_sum_applies_each_fresh_update_once_and_the_last_error():
    # At a delay of one, the sum of what is applied is the sum of the updates plus the last one less
    # the first: each error has been made good.
    path, plain = trained(MAKERS["sgd"], 1.0), trained(MAKERS["sgd"], None)
    last, first = plain[-1] - plain[-2], plain[1] - plain[0]
    assert torch.allclose(path[-1], plain[-1] + last - first, atol=1e-5)


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


def descended(rate, feedback, delay, steps):
    """Return where gradient descent on w^2 / 2 with stale gradients comes to from 1."""
    weight = Parameter(torch.ones(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=rate)
    if feedback:
        UpdateFeedback(optimizer, lambda: float(delay))
    history = [weight.detach().clone()] * (delay + 1)
    for _ in range(steps):
        weight.grad = history[-1 - delay].clone()
        optimizer.step()
        history.append(weight.detach().clone())
    return weight.item()


def test_the_stable_rates_are_those_of_the_characteristic_polynomial():
    # w_{t+1} = w_t - a (2 w_{t-1} - w_{t-2}), so z^3 - z^2 + 2 a z - a.
    def radius(rate):
        companion = torch.tensor(
            [[1.0, -2 * rate, rate], [1.0, 0, 0], [0, 1.0, 0]], dtype=torch.float64
        )
        return float(torch.linalg.eigvals(companion).abs().max())

    low, high = 0.0, 1.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if radius(middle) < 1 else (low, middle)
    assert abs(descended(0.97 * low, feedback=True, delay=1, steps=400)) < 1
    assert abs(descended(1.03 * low, feedback=True, delay=1, steps=400)) > 1


def test_stale_descent_follows_the_fresh_path_more_closely():
    def final(feedback, delay):
        return math.log(descended(0.05, feedback, delay, steps=20))

    fresh = final(False, 0)
    for delay in (1, 2, 3):
        assert abs(final(True, delay) - fresh) < 0.6 * abs(final(False, delay) - fresh)


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
