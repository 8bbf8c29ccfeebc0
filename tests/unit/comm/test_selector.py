# SPDX-License-Identifier: Apache-2.0
"""The selector: pure and steady."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.comm.config import HALVES
from wavemare.comm.cost import (
    DENSE,
    EXECUTORS,
    HYSTERESIS,
    Constants,
    Selector,
    choose_executor,
    predict,
    traffic,
)
from wavemare.comm.masks import BlockCounts, Masks

SPARSE_MODES = ("ordered", "pushpull", "allgather")
SLOW_WIRE = Constants(message_s=1e-6, exchange_s=8e-9, plan_s=0.0)


def masks_of(density, ranks=4, blocks=4000, seed=0):
    return Masks.of(np.random.default_rng(seed).random((ranks, blocks)) < density)


FULL, THIN = masks_of(1.1), masks_of(0.01)


@given(
    density=st.floats(0, 1),
    ranks=st.integers(1, 6),
    last=st.sampled_from([None, *SPARSE_MODES]),
    factor=st.floats(0.3, 3),
)
def test_the_same_masks_make_the_same_plan(density, ranks, last, factor):
    settings = {"last": last, "corrections": {"pushpull": factor}}
    one, two = (
        choose_executor(masks_of(density, ranks, 50), 1024, SLOW_WIRE, order, **settings)
        for order in (SPARSE_MODES, SPARSE_MODES[::-1])
    )
    assert one.executor == two.executor
    assert one.predicted_s == two.predicted_s


def test_full_masks_are_dense_and_thin_ones_sparse():
    assert choose_executor(FULL, 1024, SLOW_WIRE, SPARSE_MODES).executor == "ordered"
    assert choose_executor(THIN, 1024, SLOW_WIRE, SPARSE_MODES).executor in {
        "pushpull",
        "allgather",
    }
    # Two ranks need no owners.
    thin = choose_executor(masks_of(0.01, 2), 1024, SLOW_WIRE, SPARSE_MODES)
    assert thin.executor == "allgather"
    # Many ranks with the same blocks would all get all copies.
    same = Masks.of(np.repeat(np.random.default_rng(0).random((1, 4000)) < 0.1, 8, axis=0))
    assert choose_executor(same, 1024, SLOW_WIRE, SPARSE_MODES).executor == "pushpull"


def test_a_plan_says_what_it_is_made_of():
    plan = choose_executor(THIN, 1024, SLOW_WIRE, SPARSE_MODES)
    expected = predict(THIN, 1024, SLOW_WIRE)
    assert dict(plan.predicted_s) == {name: expected[name] for name in SPARSE_MODES}
    assert plan.executor == min(plan.predicted_s, key=plan.predicted_s.__getitem__)
    lines = str(plan).splitlines()
    assert len(lines) == 1 + len(SPARSE_MODES)
    assert lines[1].startswith(f"> {plan.executor} ")


def test_the_last_choice_stays_unless_another_is_clearly_faster():
    masks = masks_of(0.3)
    base = predict(masks, 1024, SLOW_WIRE)
    best = min(base, key=base.__getitem__)
    other = next(name for name in SPARSE_MODES if name != best)
    within = base[best] / base[other] * (1 + HYSTERESIS)
    for factor, expected in ((0.99 * within, other), (1.01 * within, best)):
        corrections = {other: factor}
        plan = choose_executor(
            masks, 1024, SLOW_WIRE, EXECUTORS, last=other, corrections=corrections
        )
        assert plan.executor == expected
    assert choose_executor(masks, 1024, SLOW_WIRE, EXECUTORS, last="unknown").executor == best


def test_a_sample_that_is_dense_makes_no_other_choice_than_dense():
    selector = Selector(SLOW_WIRE, EXECUTORS)
    full, thin = (BlockCounts(4000, np.full(4, count), count) for count in (4000, 40))
    assert selector.choose("key", full, 1024, tentative=True).executor in DENSE
    assert selector.choose("key", thin, 1024, tentative=True).executor not in DENSE
    for counts in (full, thin):  # without masks nothing else can run
        assert selector.choose("key", counts, 1024).executor in DENSE
    # With lists of blocks there is no search, so that thinner sums pay.
    reading = Constants(mask_s=1.0, plan_s=0.0)
    assert choose_executor(THIN, 1024, reading, SPARSE_MODES).executor == "ordered"
    found = choose_executor(THIN, 1024, reading, SPARSE_MODES, searched=False).executor
    assert found in {"pushpull", "allgather"}


def test_corrections_are_bounded_and_come_back():
    selector = Selector(SLOW_WIRE, SPARSE_MODES)
    before = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
    for _ in range(50):
        selector.learn("key", "pushpull", 1000.0)
    worst = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
    assert worst == pytest.approx(4 * before, rel=1e-6)
    for _ in range(50):
        selector.learn("key", "pushpull", 1e-6)
    best = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
    assert best == pytest.approx(before / 4, rel=1e-6)


def test_a_correction_settles_at_what_is_measured():
    selector = Selector(SLOW_WIRE, SPARSE_MODES)
    plain = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
    for _ in range(60):
        # It always takes twice what the plain model says; predictions are corrected already.
        predicted = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
        selector.learn("key", "pushpull", 2 * plain / predicted)
    predicted = selector.choose("key", THIN, 1024).predicted_s["pushpull"]
    assert predicted == pytest.approx(2 * plain, rel=1e-6)


def test_what_is_not_used_any_more_is_tried_again():
    selector = Selector(SLOW_WIRE, SPARSE_MODES)
    before = selector.choose("key", THIN, 1024)
    for _ in range(30):
        selector.learn("key", before.executor, 50.0)
    other = selector.choose("key", THIN, 1024)
    assert other.executor != before.executor
    assert selector.choose("other", THIN, 1024).predicted_s == before.predicted_s
    assert other.predicted_s[before.executor] > 3 * before.predicted_s[before.executor]
    for _ in range(400):
        selector.learn("key", other.executor, 1.0)
    after = selector.choose("key", THIN, 1024).predicted_s[before.executor]
    assert after == pytest.approx(before.predicted_s[before.executor], rel=0.01)


def test_a_reduce_scatter_is_half_of_it():
    whole = choose_executor(THIN, 1024, SLOW_WIRE, SPARSE_MODES)
    half = choose_executor(THIN, 1024, SLOW_WIRE, HALVES, halves=True)
    assert half.predicted_s.keys() == {"ordered", "pushpull"}
    moved, moved_whole = (traffic(THIN, 1024, halves=halves) for halves in (True, False))
    for name in HALVES:
        assert moved[name].up < moved_whole[name].up
        assert half.predicted_s[name] < whole.predicted_s[name]
    assert moved["ordered"].up == moved_whole["ordered"].up / 2
