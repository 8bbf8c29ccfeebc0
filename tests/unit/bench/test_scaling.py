# SPDX-License-Identifier: Apache-2.0
"""Curves for many processes: those of the simulator and the selector, from what few measured."""

import numpy as np
import pytest

from wavemare.bench.scaling import collectives, picture, pipelines
from wavemare.bench.scaling.pipelines import StageCosts, calibrate, predict, step_s
from wavemare.bench.scaling.study import PIPELINE_KEYS, collective_rows, pipeline_rows, read_results
from wavemare.bench.sparse.request import Case
from wavemare.comm import cost
from wavemare.comm.masks import Masks
from wavemare.errors import DataError

COSTS = StageCosts(compute_s=0.02, step_s=0.001, message_s=0.0007)


def pipeline_row(system, stages, costs=COSTS):
    return {
        "system": system,
        "stages": stages,
        "micro_batches": stages,
        "median_s": step_s(system, stages, costs),
        "ranks": [{"compute_s": costs.compute_s * stages, "step_s": costs.step_s}] * stages,
    }


def sparse_result(ranks, *, mbit=1000.0, pattern="zipf", density=0.1):
    case = {"ranks": ranks, "mbit": mbit, "pattern": pattern, "density": density}
    medians = {"mpi-dense": 0.5, "gloo-dense": 0.4, "wavemare-auto": 0.1, "wavemare-auto-gloo": 0.2}
    rows = [{"system": name, **case, "median_s": seconds} for name, seconds in medians.items()]
    constants = {"mpi": cost.Constants().__dict__}
    return {"mebibytes": 1, "block": 256, "constants": constants, "rows": rows}


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("system", pipelines.SYSTEMS)
def test_costs_are_found_again(system, stages):
    found = calibrate(system, pipeline_row(system, stages))
    assert found.compute_s == pytest.approx(COSTS.compute_s)
    assert found.step_s == COSTS.step_s
    assert found.message_s == pytest.approx(COSTS.message_s, abs=2e-7)


def test_without_messages_theory_holds():
    free = StageCosts(0.02, 0.0, 0.0)
    for stages in (2, 5, 8):
        flushed = step_s("deepspeed-1f1b", stages, free)
        assert flushed == pytest.approx((2 * stages - 1) * 0.02)
        assert step_s("wavemare-pipemare", stages, free) == pytest.approx(stages * 0.02)


@pytest.mark.parametrize("system", pipelines.SYSTEMS)
def test_long_pipelines_follow_the_line(system):
    points = predict(system, [4, 16, 24], COSTS, most_simulated=8)
    assert [point.processes for point in points] == [4, 16, 24]
    for point in points:
        assert point.seconds == pytest.approx(step_s(system, point.processes, COSTS), rel=1e-9)


def test_a_step_shorter_than_its_passes_is_refused():
    row = pipeline_row("deepspeed-1f1b", 2) | {"median_s": 0.03}
    with pytest.raises(DataError, match="own passes"):
        calibrate("deepspeed-1f1b", row)


def test_rates_of_other_numbers_of_ranks():
    known = cost.Constants()
    assert collectives.constants_for(known, 4, 4) == known
    other = collectives.constants_for(known, 2, 4)
    assert other.message_s == pytest.approx(3 * known.message_s)
    # A ring of two moves the whole tensor once, one of four one and a half times.
    assert other.dense_s == pytest.approx(1.5 * known.dense_s)
    assert other.exchange_s == known.exchange_s


def test_the_curve_is_the_selectors_own_prediction():
    case, blocks = Case("identical", 0.25), 1024
    points, chosen = collectives.curves(
        case, [2, 4], cost.Constants(), 4, num_blocks=blocks, block=256
    )
    mask = np.zeros((4, blocks), bool)
    mask[:, collectives.active_blocks(case, blocks, 0)] = True
    seconds = cost.predict(Masks.of(mask), 1024, cost.Constants())
    found = {(point.system, point.processes): point.seconds for point in points}
    assert found["dense", 4] == seconds["dense"]
    # The union travels cheaper here, but by a reduction of the library's, in its own order.
    in_order = {name: seconds[name] for name in ("ordered", "pushpull", "allgather")}
    assert seconds["packed"] < min(in_order.values())
    assert found["wavemare-auto", 4] == min(in_order.values()) == in_order[chosen[4]]


def test_rows_compare_with_the_baseline_of_their_case():
    results = [{"rows": [pipeline_row(s, n) for s in pipelines.SYSTEMS for n in (2, 4)]}]
    rows, costs = pipeline_rows(results, counts=(4, 8))
    assert costs["deepspeed-1f1b"]["stages"] == 2
    by_key = {(r["part"], r["system"], r["stages"], r["measured"]): r for r in rows}
    measured = by_key["stages", "wavemare-pipemare", 4, True]
    predicted = by_key["stages", "wavemare-pipemare", 4, False]
    assert predicted["median_s"] == pytest.approx(measured["median_s"], rel=1e-3)
    own, other = (step_s(system, 4, COSTS) for system in reversed(pipelines.SYSTEMS))
    assert measured["ratio"] == pytest.approx(other / own)
    assert by_key["stages", "deepspeed-1f1b", 8, False]["ratio"] == 1


def test_rows_of_collectives():
    results = [sparse_result(4), sparse_result(2)]
    rows, rates = collective_rows(results, "mpi", counts=(2, 4), sizes=(1,))
    assert (rates["ranks"], rates["mbit"]) == (2, 1000.0)
    measured = [row for row in rows if row["measured"]]
    assert {(r["system"], r["ranks"], r["calibrates"], r["ratio"]) for r in measured} == {
        ("dense", 2, True, 1.0),
        ("dense", 4, False, 1.0),
        ("wavemare-auto", 2, True, 4.0),
        ("wavemare-auto", 4, False, 4.0),
    }
    assert {row["ranks"] for row in rows if row["part"] == "size"} == {8}


def test_densities_are_predicted_and_drawn(tmp_path):
    result = sparse_result(2, pattern="random", density=0.5)
    rows, _ = collective_rows([result], "mpi", counts=(2, 4), sizes=(1,))
    found = [row for row in rows if row["part"] == "density" and not row["measured"]]
    ours = [row for row in found if row["system"] == "wavemare-auto" and row["ranks"] == 4]
    assert [row["density"] for row in ours] == [0.02, 0.05, 0.2, 0.5, 1.0]
    assert [row["ratio"] for row in ours] == sorted((r["ratio"] for r in ours), reverse=True)
    assert {row["ratio"] for row in found if row["system"] == "dense"} == {1.0}
    # Measured over the same library's messages.
    (point,) = [row for row in rows if row["measured"] and row["system"] == "wavemare-auto"]
    assert (point["ranks"], point["density"], point["ratio"]) == (2, 0.5, 4.0)
    picture.draw(tmp_path / "scaling.png", rows)
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "text", ["", "[1]", '{"rows": 3}', '{"rows": []}', '{"rows": [{"ranks": 2}]}', '{"rows": [1]}']
)
def test_foreign_files(tmp_path, text):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(DataError, match="--json"):
        read_results("--pipeline", [file], PIPELINE_KEYS)
    with pytest.raises(DataError):
        read_results("--pipeline", [tmp_path / "none.json"], PIPELINE_KEYS)


def test_unlike_and_missing_results():
    with pytest.raises(DataError, match="alike"):
        collective_rows([sparse_result(2), sparse_result(4, mbit=100.0)], "mpi")
    with pytest.raises(DataError, match="has no rates"):
        collective_rows([sparse_result(2)], "gloo")
    with pytest.raises(DataError, match="none of the files"):
        pipeline_rows([{"rows": []}])
