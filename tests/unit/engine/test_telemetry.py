# SPDX-License-Identifier: Apache-2.0
"""Reports on their way to the first stage, and the bubble that they make up."""

import math

import pytest

from wavemare.engine.observe.recorder import StageReport, Telemetry


def step(chain):
    """Each stage hears its next one, which has told what it knew before."""
    for stage in reversed(range(len(chain) - 1)):
        chain[stage].unpack(chain[stage + 1].pack())


def report(stage, step):
    return 0.1 * stage + 0.01 * step, 0.5


def test_reports_reach_the_first_stage_over_all_others():
    chain = [Telemetry(stage, 4) for stage in range(4)]
    for stage, telemetry in enumerate(chain):
        telemetry.note_staleness(stage)
        telemetry.note_staleness(stage + 1)
        telemetry.end_step(report(stage, 1))
    step(chain)
    for stage, found in enumerate(chain[0].reports):
        assert found == StageReport(*report(stage, 1), stage + 0.5)
    assert math.isnan(chain[2].reports[0].busy)  # nothing travels the other way
    assert chain[2].reports[3] == chain[3].reports[3]


def metrics_of(*busy):
    telemetry = Telemetry(0, len(busy))
    telemetry.reports = [StageReport(share, 1 - share) for share in busy]
    return telemetry.metrics()


def test_the_bubble_is_what_is_not_computed_and_unevenness_explains_a_part():
    found = metrics_of(0.9, 0.45, 0.9)
    assert found["bubble"] == pytest.approx(0.25)
    # In 1 s of work of the slowest, the others compute 0.5 s and 1 s: 0.5 of 3 s are idle.
    assert found["bubble_predicted"] == pytest.approx(0.5 / 3)


def test_no_bubble_is_told_before_all_stages_have_reported_or_when_none_worked():
    assert "bubble" not in metrics_of(0.5, math.nan)
    assert "bubble" not in metrics_of(0.0, 0.0)
    assert "bubble_predicted" not in metrics_of(0.0, 0.0)


def test_what_is_not_known_is_left_out():
    telemetry = Telemetry(0, 2)
    assert telemetry.metrics() == {}
    telemetry.note_staleness(2)
    telemetry.end_step((0.75, 0.125))
    assert telemetry.metrics() == {"staleness_0": 2.0, "waiting_0": 0.125}
    telemetry.unpack([*[0.0] * 3, 0.5, 0.25, 1.0])
    assert telemetry.metrics() == {
        "bubble": 1 - 0.625,
        "bubble_predicted": pytest.approx(1 - 0.625 / 0.75),
        "staleness_0": 2.0,
        "waiting_0": 0.125,
        "staleness_1": 1.0,
        "waiting_1": 0.25,
    }
