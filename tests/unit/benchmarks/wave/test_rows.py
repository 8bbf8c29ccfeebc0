# SPDX-License-Identifier: Apache-2.0
"""Rows, ratios, models and verdicts of ``benchmarks wave``; the table and the picture."""

import pytest

from benchmarks.wave.measure import Sample, Setting, build_result, exposed_share
from benchmarks.wave.request import SYSTEMS, WaveRequest
from wavemare.pipeline.clock.simulate import Costs

SEGMENTS = 25
HEAD = SEGMENTS - 1


def costs(collective_s):
    """Equal segments, each of which sums in both directions, and a head that costs nothing."""
    return Costs(
        forward_s=(*(1.0 for _ in range(HEAD)), 0.0),
        backward_s=(*(2.0 for _ in range(HEAD)), 0.0),
        sum_output_s=(*(collective_s for _ in range(HEAD)), 0.0),
        sum_gradient_s=(0.0, *(collective_s for _ in range(HEAD))),
    )


def rounds(*seconds, waiting=0.0):
    return [Sample(s, s * (1 - waiting), s * waiting) for s in seconds]


REQUEST = WaveRequest(exposed=(0, 25))


def result(split_loss=0.0):
    samples = {
        "accumulation": rounds(4.0, 90.0, 3.0, waiting=0.25),
        "in-phase": rounds(3.0, 3.0, 3.0),
        "domino": rounds(5.0, 5.0, 5.0),
        "tick-tock": rounds(2.5, 2.0, 3.0, waiting=0.125),
    }
    settings = [Setting(0, None, samples, costs(0.0)), Setting(25, 800.0, samples, costs(0.5))]
    return build_result(
        REQUEST,
        settings,
        num_segments=SEGMENTS,
        split_loss=split_loss,
        peaks={"accumulation": 100, "in-phase": 200, "domino": 102, "tick-tock": 101},
        bitwise={name: name != "domino" for name in SYSTEMS},
    )


def rows(of, exposed):
    return {row["system"]: row for row in of["rows"] if row["exposed"] == exposed}


def test_ratios_are_of_medians_to_accumulation():
    found = rows(result(), 0.25)
    assert tuple(found) == SYSTEMS
    assert {name: row["ratio"] for name, row in found.items()} == {
        "accumulation": 1.0,
        "in-phase": pytest.approx(4 / 3),
        "domino": 0.8,
        "tick-tock": 1.6,
    }
    assert found["tick-tock"]["median_s"] == 2.5
    assert found["tick-tock"]["rounds_s"] == [2.5, 2.0, 3.0]
    assert found["tick-tock"]["waiting"] == 0.125
    assert found["tick-tock"]["hidden"] == 1 - (0.125 * 2.5) / (0.25 * 4.0)
    assert all(row["measured_exposed"] == 0.25 for row in found.values())
    assert all((row["mbit"], row["micro_batches"]) == (800.0, 8) for row in found.values())
    shares = [*rounds(1.0, waiting=0.1), *rounds(5.0, 5.0, waiting=0.3)]
    assert exposed_share(shares) == 0.3  # a median


def test_models_are_those_of_the_gain_model():
    found = rows(result(), 0.25)
    # Per segment 3 + 2 c for each of 8 micro-batches. Of tick-tock's, the first forward and the
    # last backward passes have nothing beside them: 1 + c and 2 + c, and 7 pairs of 3.
    assert found["tick-tock"]["model"] == pytest.approx(8 * 4 / (1.5 + 2.5 + 7 * 3), rel=0.01)
    assert found["in-phase"]["model"] == pytest.approx(4 / 3, abs=0.01)
    slower = rows(result(split_loss=0.1), 0.25)
    assert slower["domino"]["model"] < found["domino"]["model"]
    assert slower["tick-tock"]["model"] == found["tick-tock"]["model"]
    assert all(row["model"] == pytest.approx(1) for row in rows(result(), 0.0).values())


def test_auto_is_on_where_communication_is_exposed():
    off, on = result()["auto"]
    assert (off["exposed"], off["on"]) == (0.0, False)
    assert (on["exposed"], on["on"]) == (0.25, True)
    assert "1.2" in on["reason"]
    lines = list(REQUEST.remarks(result()))
    assert lines[1].startswith("auto at 25%: on, a step is predicted")
    assert "domino: autograd keeps" in lines[4]
    assert lines[4].endswith("gradients are not bit-identical")


def test_memory_is_compared_with_one_wave_and_with_two():
    found = {row["system"]: row for row in result()["memory"]}
    assert found["tick-tock"]["of_accumulation"] == 1.01
    assert found["tick-tock"]["of_in_phase"] == 0.505
    assert [name for name, row in found.items() if not row["bitwise"]] == ["domino"]
