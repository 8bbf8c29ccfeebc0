# SPDX-License-Identifier: Apache-2.0
"""Rows, models, losses and batches of ``benchmarks local-steps``; the table and picture."""

from itertools import islice

import pytest

from benchmarks.curve import first_at
from benchmarks.local_steps.measure import add_losses, batches, build_result
from benchmarks.local_steps.request import (
    BASELINE,
    BOUND,
    OURS,
    PIPELINE_BASELINE,
    LocalStepsRequest,
)
from benchmarks.result import draw, result_table
from benchmarks.sparse.step import StepSample

# Of two replicas an exchange moves the weights once: 25 MB at 200 Mbit/s take a second.
PARAMETERS = 6_250_000
BLOCKING, STREAMING = OURS
REQUEST = LocalStepsRequest(every=8, quality=20)


def rounds(*seconds, link=4.0):
    return [StepSample(s, 1.0, link, {}) for s in seconds]


@pytest.fixture
def result():
    samples = {
        BASELINE: rounds(1.0, 90.0, 1.2),
        "ddp-powersgd-4": rounds(0.5, 0.5, 0.5),
        BLOCKING: [*rounds(0.2, 0.25), *rounds(0.3, link=90.0)],
        STREAMING: rounds(0.1, 0.1, 0.1),
        BOUND: rounds(0.1, 0.1, 0.1),
    }
    return build_result(REQUEST, samples, PARAMETERS)


@pytest.fixture
def rows(result):
    return {row["system"]: row for row in result["rows"]}


def test_ratios_are_of_medians_and_models_follow_from_the_measured_computation(result, rows):
    assert (result["compute_s"], result["r"]) == (0.1, 10.0)
    blocking = rows[BLOCKING]
    assert (blocking["median_s"], blocking["ratio"], blocking["bytes"]) == (0.25, 4.8, 4.0)
    # An exchange takes a second: of each dense step, but for the part behind a backward pass, and
    # half a second more to gather weights with ZeRO; of each eighth step; and of streaming, whose
    # link is always busy, an eighth of a second per step.
    assert rows[BASELINE]["model_s"] == pytest.approx(0.1 * (1 + 10 - 2 / 3 + 5))
    assert blocking["model_s"] == pytest.approx(0.1 + 1 / 8)
    assert rows[STREAMING]["model_s"] == pytest.approx(1 / 8)
    assert rows[BOUND]["model_s"] == pytest.approx(0.1)
    assert rows["ddp-powersgd-4"]["model"] is rows["ddp-powersgd-4"]["model_s"] is None
    for name in (BASELINE, BLOCKING, STREAMING, BOUND):
        faster = rows[BASELINE]["model_s"] / rows[name]["model_s"]
        assert rows[name]["model"] == pytest.approx(faster)


def test_with_stages_ratios_are_to_the_stock_pipeline_which_gathers_no_weights():
    request = LocalStepsRequest.of(every=8, ranks=4, ranks_per_host=2, stages=2, micro_batches=4)
    samples = {
        PIPELINE_BASELINE: rounds(1.0, 1.2, 1.4),
        BLOCKING: rounds(0.3, 0.3, 0.3),
        BOUND: rounds(0.1, 0.1, 0.1),
    }
    result = build_result(request, samples, PARAMETERS)
    rows = {row["system"]: row for row in result["rows"]}
    assert (result["baseline"], result["r"]) == (PIPELINE_BASELINE, 10.0)
    # A link carries both stages' messages, and the last of four backward passes hides some of it.
    assert rows[PIPELINE_BASELINE]["model_s"] == pytest.approx(0.1 * (1 + 10 - 2 / 3 / 4))
    ours = rows[BLOCKING]
    assert ours["ratio"] == pytest.approx(4.0)
    assert ours["model_s"] == pytest.approx(0.1 + 1 / 8)
    assert ours["model"] == pytest.approx(rows[PIPELINE_BASELINE]["model_s"] / ours["model_s"])
    assert {(row["stages"], row["micro_batches"]) for row in rows.values()} == {(2, 4)}
    assert "replicas of 2 stages" in request.title(result)
    assert not result["skipped"]


def test_time_to_the_baselines_loss_is_of_steps_and_seconds(result, rows):
    curves = {
        BASELINE: [[10, 4.0], [20, 2.0]],
        BLOCKING: [[10, 5.0], [20, 3.0], [30, 1.0]],
        STREAMING: [[10, 5.0], [20, 2.5], [40, 2.1]],
    }
    add_losses(REQUEST, result, curves)
    assert (rows[BASELINE]["steps_to_loss"], rows[BASELINE]["loss_gap"]) == (20, 0)
    ours = rows[BLOCKING]
    assert (ours["eval_loss"], ours["loss_gap"], ours["steps_to_loss"]) == (3.0, 0.5, 25)
    assert ours["time_to_loss_s"] == pytest.approx(16 * 1.2 + 9 * 0.25)
    assert rows[STREAMING]["steps_to_loss"] is rows[STREAMING]["time_to_loss_s"] is None
    assert "eval_loss" not in rows[BOUND]
    assert first_at([[8, 3.0], [16, 1.0]], 3.0) == 8


def test_tables_and_pictures_show_each_system(result, rows, shown, check_picture):
    text = shown(result_table(REQUEST, result))
    assert "r = 10.00" in text
    assert all(name in text for name in rows)
    check_picture(lambda file: draw(REQUEST, result, file))


def test_all_systems_get_the_same_batches():
    def tokens(rank=0, seed=7, **options):
        found = batches(LocalStepsRequest(), rank, seed=seed, **options)
        return [tuple(batch["input_ids"].flatten().tolist()) for batch in islice(found, 3)]

    own = tokens()
    assert own == tokens()
    assert len(tokens(rows=4)[0]) == 4 * len(own[0])
    others = [*tokens(rank=1), *tokens(seed=8), *tokens(held_out=True)]
    assert len({*own, *others}) == 12
    assert 32 <= sum(own[0]) / len(own[0]) < 128  # a text
