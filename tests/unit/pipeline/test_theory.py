# SPDX-License-Identifier: Apache-2.0
"""PipeMare's stability theory: published numbers, from roots of polynomials and from our code.

``w`` is a weight, ``lam`` the curvature of a quadratic loss, ``a`` the learning rate, ``tau`` the
delay in optimizer steps. Where our code trains, its path is that of a recursion written out here.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from wavemare.pipeline.correction import EmaCorrection
from wavemare.pipeline.replay import Replay
from wavemare.pipeline.staleness import ema_decay, ema_decay_from, lr_factor, max_staleness

LEMMA_1 = {
    0: 2.000000,
    1: 1.000000,
    2: 0.618034,
    3: 0.445042,
    4: 0.347296,
    5: 0.284630,
    8: 0.184537,
    10: 0.149460,
    16: 0.095164,
    20: 0.076605,
    32: 0.048327,
    50: 0.031104,
}


def radius(polynomial):
    return float(np.abs(np.roots(polynomial)).max())


def largest_stable(polynomial, low=1e-4, high=2.5, points=200):
    """Return the largest learning rate below which all are stable: the first crossing."""

    def is_stable(a):
        return radius(polynomial(a)) <= 1 + 1e-10

    stable = 0.0
    for a in np.geomspace(low, high, points):
        if not is_stable(a):
            break
        stable = a
    unstable = a
    for _ in range(45):
        middle = (stable + unstable) / 2
        stable, unstable = (middle, unstable) if is_stable(middle) else (stable, middle)
    return stable


def polynomial(*terms):
    """Return coefficients, the highest power first, of the sum of (power, coefficient)."""
    result = np.zeros(max(power for power, _ in terms) + 1)
    for power, coefficient in terms:
        result[len(result) - 1 - power] += coefficient
    return result


def delayed(a, tau, lam=1.0):
    return polynomial((tau + 1, 1), (tau, -1), (0, a * lam))


def heavy_ball(a, tau, beta):
    return polynomial((tau + 1, 1), (tau, -1 - beta), (tau - 1, beta), (0, a))


def nesterov(a, tau, g):
    past = ((1, a * (1 - g) * (1 + g)), (0, -a * (1 - g) * g))
    return polynomial((tau + 2, 1), (tau + 1, -1 - g), (tau, g), *past)


def discrepancy(a, tf, tb, lack):
    return polynomial((tf + 1, 1), (tf, -1), (tf - tb, -a * lack), (0, a * (1 + lack)))


def corrected(a, tf, tb, lack, decay):
    """T2: the backward weight is w[t - tb] - d * delta, with d = tf - tb."""
    d = tf - tb
    mean = a * lack * d * (1 - decay)
    return polynomial(
        *((tf + 2, 1), (tf + 1, -1 - decay), (tf, decay)),
        *((1, a * (1 + lack)), (0, -a * (1 + lack) * decay)),
        *((d + 1, -a * lack), (d, a * lack * decay)),
        *((d + 1, mean), (d, -mean)),
    )


class Weight(nn.Module):
    """The first stage: gives the weight, and half its square as autograd keeps it for later.

    The gradient of the first output comes with the forward pass's weight, as the loss squares it;
    that of the second with the weight in place at the backward pass.
    """

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x):
        return self.w * x, (self.w * self.w) / 2


def pipeline(tau, a, lack=0.0, **options):
    """Return the weight, and the replay of a pipeline whose first stage alone has one."""
    first = Weight()
    stages = [first, *(nn.Identity() for _ in range(tau))]

    def loss(outputs, _):
        return 0.5 * (1 + lack) * outputs[0].square() - lack * outputs[1]

    return first.w, Replay(stages, loss, partial(torch.optim.SGD, lr=a), 1, **options)


def path(tau, a, steps, lack=0.0, **options):
    w, replay = pipeline(tau, a, lack, **options)
    result = [w.item()]
    for _ in range(steps):
        replay.step([(torch.ones((), dtype=torch.float64), None)])
        result.append(w.item())
    return np.array(result)


def written_out(tau, a, steps, lack=0.0, decay=None):
    """Return the path of w' = w - a ((1 + lack) w[t - tau] - lack u), where u is w or T2's."""
    w, delta = [1.0], 0.0
    for t in range(steps):
        age = min(t, tau)
        u = w[t] if decay is None else w[t] - age * delta
        w.append(w[t] - a * ((1 + lack) * w[t - age] - lack * u))
        delta = delta if decay is None else decay * delta + (1 - decay) * (w[t + 1] - w[t])
    return np.array(w)


def grows(values, tau):
    """Whether the envelope grows, measured over some of the slowest oscillation's periods."""
    period = 2 * (2 * tau + 1)
    middle, end = np.abs(values[4 * period : 8 * period]), np.abs(values[-4 * period :])
    return end.max() > middle.max()


@pytest.mark.parametrize("tau", LEMMA_1)
def test_lemma_1_by_root_finding(tau):
    found = largest_stable(partial(delayed, tau=tau), low=0.5 * LEMMA_1[tau], points=20)
    assert found == pytest.approx(LEMMA_1[tau], abs=6e-7)
    assert found == pytest.approx(2 * math.sin(math.pi / (4 * tau + 2)), rel=1e-6)


@pytest.mark.parametrize("tau", [0, 1, 2, 4, 8])
def test_lemma_1_by_training_a_pipeline(tau):
    steps = 14 * 2 * (2 * tau + 1)
    for share in (0.98, 1.02):
        a = share * LEMMA_1[tau]
        values = path(tau, a, steps)
        np.testing.assert_allclose(values, written_out(tau, a, steps), rtol=1e-9, atol=1e-12)
        assert grows(values, tau) == (share > 1)


@pytest.mark.parametrize(
    ("tau", "a", "rate"), [(1, 0.25, 0.5), (5, 0.06698, 0.8333), (10, 0.035049, 0.9091)]
)
def test_the_fastest_learning_rate(tau, a, rate):
    best = tau**tau / (tau + 1) ** (tau + 1)
    assert best == pytest.approx(a, abs=1e-6)
    # The root is double: the numerical one is good to the square root of machine precision.
    assert radius(delayed(best, tau)) == pytest.approx(rate, abs=1e-4)
    for other in (0.9, 1.1):
        assert radius(delayed(other * best, tau)) > rate + 1e-3


@pytest.mark.parametrize(
    ("tau", "expected"),
    [(1, [1.0, 0.5, 0.1, 0.01]), (10, [0.14946, 0.06962, 0.01139, 0.00102])],
)
def test_momentum_does_not_help_against_delay(tau, expected):
    betas = [0.0, 0.5, 0.9, 0.99]
    found = [largest_stable(partial(heavy_ball, tau=tau, beta=b)) for b in betas]
    assert found == pytest.approx(expected, abs=6e-6)
    assert max(found) < 4 * math.sin(math.pi / (4 * tau + 2))


@pytest.mark.parametrize(
    ("tau", "expected"), [(4, [0.34730, 0.32646, 0.33227]), (10, [0.14946, 0.12304, 0.11248])]
)
def test_nesterov_keeps_the_limit(tau, expected):
    found = [largest_stable(partial(nesterov, tau=tau, g=g)) for g in (0.0, 0.9, 0.99)]
    assert found == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize(
    ("tf", "tb", "lack", "expected"),
    [
        (10, 0, 5, [0.14946, 0.01756, 0.09762, 0.09730]),
        (10, 0, 1, [0.14946, 0.05928, 0.13130, 0.13116]),
        (10, 6, 5, [0.14946, 0.03807, 0.11394, 0.11578]),
        (4, 0, 5, [0.34730, 0.04351, 0.18182, 0.18504]),
        (20, 0, 20, [0.07661, 0.00242, 0.03102, 0.03107]),
    ],
)
def test_t2_extends_the_stable_range(tf, tb, lack, expected):
    d = tf - tb
    found = [
        largest_stable(partial(delayed, tau=tf)),
        largest_stable(partial(discrepancy, tf=tf, tb=tb, lack=lack)),
        *(
            largest_stable(partial(corrected, tf=tf, tb=tb, lack=lack, decay=decay))
            for decay in (ema_decay(d), ema_decay_from(0.135, d))
        ),
    ]
    assert found == pytest.approx(expected, abs=6e-6)


@pytest.mark.parametrize("lack", [1.0, 3.0, 5.0, 100.0])
def test_t2_after_one_step_has_no_discrepancy_at_all(lack):
    limits = [
        largest_stable(partial(corrected, tf=1, tb=0, lack=lack, decay=decay))
        for decay in (ema_decay(1), ema_decay_from(0.135, 1))
    ]
    assert limits[0] == pytest.approx(1.0, abs=1e-6)
    assert limits[1] < 0.999
    bare = largest_stable(partial(discrepancy, tf=1, tb=0, lack=lack))
    assert bare == pytest.approx(1 / (1 + lack), abs=1e-6)


def test_the_default_decay_is_not_one_of_the_bad_ones():
    def limit(decay):
        return largest_stable(partial(corrected, tf=10, tb=0, lack=5, decay=decay))

    default, bad = limit(ema_decay(10)), [limit(0.5**0.1), limit(0.0)]
    assert bad == pytest.approx([0.02900, 0.01980], abs=6e-6)
    assert default > 3 * max(bad)


def through_correction(tau, a, lack, steps, decay):
    """Return the path of a weight whose backward pass sees what `EmaCorrection` puts there."""
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    correction = EmaCorrection([w], decay)
    values = [1.0]
    for t in range(steps):
        age = min(t, tau)
        former = values[t - age]
        correction.correct(age)
        u = w.item()
        correction.restore()
        correction.before_step()
        w.data.sub_(a * ((1 + lack) * former - lack * u))
        correction.after_step()
        values.append(w.item())
    return np.array(values)


def test_t2_in_time_through_the_correction():
    tau, lack, steps = 10, 5.0, 1500
    decay = ema_decay(tau)
    limit = 0.09762
    for share in (0.97, 1.03):
        values = through_correction(tau, share * limit, lack, steps, decay)
        wanted = written_out(tau, share * limit, steps, lack, decay)
        # Where the path grows, so do the rounding errors.
        scale = np.maximum.accumulate(np.abs(wanted))
        np.testing.assert_allclose(values / scale, wanted / scale, atol=1e-7)
        assert (np.abs(values[-100:]).max() > 1) == (share > 1)


@pytest.mark.parametrize(("mode", "limit"), [("off", 0.01756), ("ema", 0.09762)])
def test_t2_in_time_through_a_pipeline(mode, limit):
    tau, lack, steps = 10, 5.0, 350
    decay = ema_decay(tau) if mode == "ema" else None
    for share in (0.97, 1.03):
        values = path(tau, share * limit, steps, lack, correction=mode)
        wanted = written_out(tau, share * limit, steps, lack, decay)
        np.testing.assert_allclose(values, wanted, rtol=1e-7, atol=1e-9)
        late = written_out(tau, share * limit, 6000, lack, decay)
        assert (np.abs(late[-100:]).max() > 1) == (share > 1)


def hessian():
    """Return a random matrix with eigenvalues 0.1 to 1 (the seed belongs to the numbers)."""
    rotation, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((8, 8)))
    matrix = rotation @ np.diag(np.linspace(0.1, 1, 8)) @ rotation.T
    return matrix / np.linalg.eigvalsh(matrix).max()


def least_squares_radius(rates, taus, matrix):
    """Return the spectral radius of w_i' = w_i - rate_i sum_j H_ij w_j[t - tau_i]."""
    n, depth = len(taus), max(taus)
    step = np.zeros((n * (depth + 1), n * (depth + 1)))
    step[n:, :-n] = np.eye(n * depth)
    step[:n, :n] = np.eye(n)
    for i, tau in enumerate(taus):
        step[i, n * tau : n * (tau + 1)] -= rates[i] * matrix[i]
    return np.abs(np.linalg.eigvals(step)).max()


@pytest.mark.parametrize(
    ("taus", "naive", "rescheduled"),
    [(range(15, 0, -2), 0.1533, 1.9611), (range(7, -1, -1), 0.3161, 1.9388)],
)
def test_t1_on_stage_partitioned_least_squares(taus, naive, rescheduled):
    matrix = hessian()
    factors = np.array([lr_factor(0, tau, 1) for tau in taus])
    for scale, limit in ((np.ones(8), naive), (factors, rescheduled)):
        for share, stable in ((1 - 5e-4, True), (1 + 5e-4, False)):
            found = least_squares_radius(share * limit * scale, taus, matrix)
            assert (found <= 1 + 1e-9) == stable


class Share(nn.Module):
    """Adds the stage's share ``column * w`` to a running sum."""

    def __init__(self, column):
        super().__init__()
        self.column = torch.from_numpy(column)
        self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, total):
        return total + self.column * self.w


@pytest.mark.parametrize("anneal_steps", [None, 10**9])
def test_least_squares_in_a_pipeline(anneal_steps):
    matrix, steps = hessian(), 120
    values, vectors = np.linalg.eigh(matrix)
    root = vectors @ np.diag(np.sqrt(values)) @ vectors.T
    stages = [Share(root[:, i].copy()) for i in range(8)]
    taus = [max_staleness(s, 8, 1) for s in range(8)]
    a = 0.3 if anneal_steps is None else 1.5
    replay = Replay(
        stages,
        lambda total, _: 0.5 * total.square().sum(),
        partial(torch.optim.SGD, lr=a),
        1,
        anneal_steps=anneal_steps,
    )
    rates = a if anneal_steps is None else a / np.maximum(1.0, taus)
    history = [np.ones(8)]
    for t in range(steps):
        replay.step([(torch.zeros(8, dtype=torch.float64), None)])
        former = np.array([history[max(0, t - tau)][j] for j, tau in enumerate(taus)])
        history.append(history[-1] - rates * (matrix @ former))
    found = [stage.w.item() for stage in stages]
    np.testing.assert_allclose(found, history[-1], rtol=1e-5, atol=1e-8)


def noisy_least_squares(a, tau, anneal_steps, steps=4000):
    """Return the loss after training with T1 and a delay; infinite if it diverges."""
    rng = np.random.default_rng(0)
    x, w_true = rng.standard_normal((256, 12)), rng.standard_normal(12)
    y = x @ w_true + 0.1 * rng.standard_normal(256)
    rate = a / np.linalg.eigvalsh(x.T @ x / 256).max()
    history = [np.zeros(12)] * (tau + 1)
    for step in range(steps):
        rows = rng.integers(0, 256, 16)
        grad = x[rows].T @ (x[rows] @ history[0] - y[rows]) / 16
        factor = lr_factor(step, tau, anneal_steps) if anneal_steps else 1.0
        history = [*history[1:], history[-1] - rate * factor * grad]
        if np.abs(history[-1]).max() > 1e6:
            return math.inf
    return float(((x @ history[-1] - y) ** 2).mean() / 2)


def test_t1_only_puts_off_divergence_if_the_rate_does_not_decay():
    assert noisy_least_squares(0.16, 10, 10**9) == pytest.approx(0.0054, abs=1e-4)
    assert 1e7 < noisy_least_squares(0.16, 10, 1000) < 1e8
    assert noisy_least_squares(0.16, 10, None) == math.inf
