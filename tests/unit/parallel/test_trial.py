# SPDX-License-Identifier: Apache-2.0
"""A plan's shares and equal ones are tried in turn, and the faster stay."""

import pytest

from wavemare.parallel.guard import STEPS
from wavemare.parallel.trial import Trial


class Shared:
    """A guard that says what it was given; a step takes its slowest rank's share of a second."""

    def __init__(self, shares):
        self.shares, self.applied = shares, []

    def apply(self, shares):
        self.shares = shares
        self.applied.append(shares)


def tried(monkeypatch, shares, sample_s, mended=None):
    """Train 60 steps; return the guard, and the steps with verdicts."""
    now = [0.0]

    def gather(found, own):
        found[:] = [own, own / 2]

    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    guard = Shared(shares)
    trial, verdicts, changed = Trial(guard), {}, 0
    for step in range(1, 3 * STEPS + 1):
        changed = changed + 1 if step % STEPS else 0
        warm = 5.0 if changed < 3 else 0.0  # after a change steps take longer
        now[0] += warm + max(n * s for n, s in zip(guard.shares, sample_s, strict=True))
        if step == STEPS and mended:
            guard.apply(mended)
        verdict = trial.after_step()
        if verdict is not None:
            verdicts[step] = verdict
    return guard, verdicts


def test_the_faster_shares_stay(monkeypatch):
    guard, verdicts = tried(monkeypatch, (12, 4), (1.0, 3.0))
    assert list(verdicts) == [2 * STEPS]
    assert verdicts[2 * STEPS][:2] == (12.0, 24.0)
    assert guard.applied == [(8, 8), (12, 4)]
    assert "the plan's stay: 12, 4" in str(verdicts[2 * STEPS])


def test_equal_shares_stay_where_the_plan_was_wrong(monkeypatch):
    guard, verdicts = tried(monkeypatch, (12, 4), (1.0, 1.0))
    assert guard.applied == [(8, 8)]
    assert verdicts[2 * STEPS] == (12.0, 8.0, (8, 8))


def test_what_the_guard_has_mended_comes_back(monkeypatch):
    guard, _ = tried(monkeypatch, (12, 4), (1.0, 3.0), mended=(11, 5))
    assert guard.applied == [(11, 5), (8, 8), (11, 5)]


@pytest.mark.parametrize("shares", [(8, 8), (8, 9)])
def test_there_is_nothing_to_try(monkeypatch, shares):
    guard, verdicts = tried(monkeypatch, shares, (1.0, 1.0))
    assert (guard.applied, verdicts) == ([], {})
