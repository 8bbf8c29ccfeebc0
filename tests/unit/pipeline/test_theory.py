# SPDX-License-Identifier: Apache-2.0
"""PipeMare's stability limits, from pipelines that train: published numbers, and recursions.

``w`` is a weight of a quadratic loss of curvature 1, ``a`` the learning rate, ``tau`` the delay in
optimizer steps.
"""

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from wavemare.pipeline.staleness.replay import Replay
from wavemare.pipeline.staleness.staleness import ema_decay


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


def path(tau, a, steps, lack=0.0, **options):
    """Return the path of the weight of a pipeline whose first stage alone has one."""
    first = Weight()
    stages = [first, *(nn.Identity() for _ in range(tau))]

    def loss(outputs, _):
        return 0.5 * (1 + lack) * outputs[0].square() - lack * outputs[1]

    replay = Replay(stages, loss, partial(torch.optim.SGD, lr=a), 1, **options)
    result = [first.w.item()]
    for _ in range(steps):
        replay.step([(torch.ones((), dtype=torch.float64), None)])
        result.append(first.w.item())
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


@pytest.mark.parametrize("tau", [0, 1, 2, 4, 8])
def test_a_delay_bounds_the_learning_rate_as_lemma_1_says(tau):
    period = 2 * (2 * tau + 1)
    limit = 2 * math.sin(math.pi / (4 * tau + 2))
    for share in (0.98, 1.02):
        a = share * limit
        values = path(tau, a, 14 * period)
        np.testing.assert_allclose(values, written_out(tau, a, 14 * period), rtol=1e-9, atol=1e-12)
        # The envelope, over some of the slowest oscillation's periods.
        middle, end = np.abs(values[4 * period : 8 * period]), np.abs(values[-4 * period :])
        assert (end.max() > middle.max()) == (share > 1)


@pytest.mark.parametrize(("mode", "limit"), [("off", 0.01756), ("ema", 0.09762)])
def test_t2_extends_the_stable_learning_rates(mode, limit):
    tau, lack, steps = 10, 5.0, 350
    decay = ema_decay(tau) if mode == "ema" else None
    for share in (0.97, 1.03):
        values = path(tau, share * limit, steps, lack, correction=mode)
        wanted = written_out(tau, share * limit, steps, lack, decay)
        np.testing.assert_allclose(values, wanted, rtol=1e-7, atol=1e-9)
        late = written_out(tau, share * limit, 6000, lack, decay)
        assert (np.abs(late[-100:]).max() > 1) == (share > 1)
