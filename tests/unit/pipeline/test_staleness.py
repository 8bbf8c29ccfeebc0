# SPDX-License-Identifier: Apache-2.0
"""The learning rate and the correction of stale weights, and the advice on staleness."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.pipeline.staleness.staleness import (
    MEASURED,
    MODES,
    bounding_micro_batches,
    ema_decay,
    largest_staleness,
    lr_factor,
    max_staleness,
    measured,
    policy_optimizer,
    resolve_mode,
    staleness_warning,
)


def test_learning_rate_rises_from_the_divided_to_the_whole():
    assert lr_factor(0, 4.0, 100) == 0.25
    assert lr_factor(50, 4.0, 100) == 0.5
    assert lr_factor(75, 4.0, 100) == pytest.approx(4.0**-0.25, rel=1e-15)
    assert lr_factor(100, 4.0, 100) == lr_factor(10**6, 4.0, 100) == 1.0


@given(tau=st.floats(0, 1), step=st.integers(0, 50), anneal_steps=st.integers(1, 40))
def test_short_delays_do_not_raise_the_learning_rate(tau, step, anneal_steps):
    assert lr_factor(step, tau, anneal_steps) == 1.0


def test_decay_of_the_estimate():
    assert [ema_decay(d) for d in (1, 2, 3, 9)] == [0.0, 1 / 3, 0.5, 0.8]
    # For deep pipelines this is the paper's decay with D = exp(-2).
    assert ema_decay(1000) == pytest.approx(ema_decay(1000, math.exp(-2)), abs=1e-8)
    assert ema_decay(2, 0.25) == 0.5


@pytest.mark.parametrize(
    ("mode", "resolved"),
    [
        ("off", ["off", "off", "off", "off"]),
        ("exact", ["off", "exact", "exact", "exact"]),
        ("ema", ["off", "ema", "ema", "ema"]),
        ("predict", ["off", "predict", "predict", "predict"]),
        ("auto", ["off", "exact", "exact", "ema"]),
    ],
)
def test_modes(mode, resolved):
    assert mode in MODES
    assert [resolve_mode(mode, oldest) for oldest in range(4)] == resolved


RESULTS = Path(__file__).parents[3] / "docs" / "results"
SYSTEM = {
    ("Muon", "predict"): "muon+feedback+prediction",
    ("Muon", "auto"): "muon+feedback",
    ("SOAP", "predict"): "auto",
    ("SOAP", "auto"): "auto",
    ("AdamW", "auto"): "naive",
}


@pytest.mark.parametrize("row", [row for row in MEASURED if row.source], ids=str)
def test_the_table_says_what_the_result_files_say(row):
    rows = json.loads((RESULTS / row.source).read_text())["rows"]
    found = [
        each
        for each in rows
        if each["system"] == SYSTEM[row.optimizer, row.correction]
        and largest_staleness(each["stages"], each["micro_batches"])[0] == row.at
    ]
    assert found
    for each in found:
        assert sum(each["memory"].values()) == pytest.approx(row.memory, abs=0.01)
        assert each["own_gap"] == pytest.approx(row.gap, abs=0.001)


def test_each_optimizer_has_a_row_for_any_staleness():
    for name in ("Muon", "SOAP", "AdamW", "Adam", "FusedAdam", "SGD", "function", ""):
        for worst in range(40):
            row = measured(name, worst)
            assert worst <= row.up_to
            assert row.optimizer in (name, "", "AdamW")
            assert row.correction in MODES
    assert measured("muon", 1) is measured("Muon", 1)
    assert policy_optimizer(1) == "Muon"
    assert policy_optimizer(7) == "SOAP"


@pytest.mark.parametrize("slack", [0, 1])
@pytest.mark.parametrize("stages", [1, 2, 4, 8])
def test_the_bound_is_the_fewest_micro_batches_that_keep_staleness_at_one(stages, slack):
    enough = bounding_micro_batches(stages, slack)
    for micro_batches in range(1, 20):
        stale = [max_staleness(s, stages, micro_batches, slack) for s in range(stages)]
        assert (max(stale) <= 1) == (micro_batches >= enough)
        assert largest_staleness(stages, micro_batches, slack)[0] == max(stale)
        assert (staleness_warning(stages, micro_batches, slack) is None) == (max(stale) <= 1)


def test_the_warning_has_the_numbers():
    warning = staleness_warning(8, 2)
    assert "2 micro-batches" in warning
    assert "8 stages" in warning
    assert "up to 4 steps old (3.50 on average)" in warning
    assert "with 7 or more" in warning
