# SPDX-License-Identifier: Apache-2.0
"""Shares of unlike devices against full enumeration, and the numbers of the design."""

import random

import pytest

from wavemare.parallel.stages import balanced_shares


def linear(speeds, fixed_s=None):
    """Return the finish times of devices that take ``fixed_s + samples / speed``."""
    fixed = fixed_s or [0.0] * len(speeds)
    return lambda device, samples: fixed[device] + samples / speeds[device]


def enumerate_shares(samples, caps, least):
    """Yield all ways to share samples out."""
    if len(caps) == 1:
        if least <= samples <= caps[0]:
            yield (samples,)
        return
    for first in range(least, min(samples, caps[0]) + 1):
        for rest in enumerate_shares(samples - first, caps[1:], least):
            yield (first, *rest)


def latest(shares, speeds, fixed):
    return max((f + b / s for b, s, f in zip(shares, speeds, fixed, strict=True) if b), default=0)


@pytest.mark.parametrize("least", [0, 1])
def test_greedy_equals_enumeration_for_300_seeds(least):
    infeasible = 0
    for seed in range(300):
        draw = random.Random(seed)
        count, samples = draw.randint(2, 4), draw.randint(1, 14)
        speeds = [draw.uniform(0.5, 3) for _ in range(count)]
        fixed = [draw.choice([0, 0.3]) for _ in range(count)]
        caps = [draw.randint(0, 9) for _ in range(count)]
        found = balanced_shares(samples, linear(speeds, fixed), caps, least=least)
        times = [latest(s, speeds, fixed) for s in enumerate_shares(samples, caps, least)]
        assert (found is None) == (not times), seed
        if found is None:
            infeasible += 1
            continue
        assert sum(found) == samples
        assert all(least <= b <= cap for b, cap in zip(found, caps, strict=True))
        assert latest(found, speeds, fixed) == pytest.approx(min(times), abs=1e-12), seed
    assert 10 < infeasible < 200


def test_finish_times_may_be_bent():
    # Roofline: no time for the first three samples of the first device, much for the others.
    table = [[0, 1, 1, 1, 9, 10, 11], [0, 2, 4, 6, 8, 10, 12]]
    shares = balanced_shares(6, lambda device, samples: table[device][samples], [6, 6])
    assert shares == (3, 3)
