# SPDX-License-Identifier: Apache-2.0
"""Tasks, rows, ratios and gaps of ``wavemare bench training``; the tables and the pictures."""

import pytest
import torch

from wavemare.bench.training.quality import Curve, learning_rate
from wavemare.bench.training.report import Sample, build_quality, build_result
from wavemare.bench.training.request import BASELINE, BOUND, TrainingRequest
from wavemare.bench.training.show import draw, result_table
from wavemare.bench.training.task import make_task

FIGURES = {
    "sparse_bytes_up": 1000.0,
    "sparse_density": 0.25,
    "sparse_union": 0.5,
    "sparse_calls_ordered": 2.0,
    "sparse_calls_allgather": 1.0,
}


def rounds(*seconds, link=None, **figures):
    return [Sample(s, 1.0 + s, link, figures) for s in seconds]


def times(bound=1.0, *, with_bound=True):
    samples = {
        BASELINE: rounds(5.0, 90.0, 4.0, link=100.0),
        "wavemare-auto": rounds(2.0, 1.0, 3.0, link=10.0, **FIGURES),
        BOUND: rounds(bound, bound, bound),
    }
    if not with_bound:
        del samples[BOUND]
    return build_result(TrainingRequest(mbit=8.0), samples, task_name="some texts")


def rows(of):
    return {row["system"]: row for row in of["rows"]}


def quality():
    curves = {
        BASELINE: Curve([1.0, 0.5], [(0, 2.0), (2, 0.5)]),
        "wavemare-auto": Curve([1.0, 0.5], [(0, 2.0), (2, 0.5)], 2**20),
        "torch-ddp": Curve([1.0, 0.5], [(0, 2.0), (2, 0.495)]),
        "wavemare-topk": Curve([1.0, 0.75], [(0, 2.0), (2, 0.5)], 2**18),
    }
    request = TrainingRequest(quality_steps=2, systems=tuple(curves))
    return build_quality(request, curves, task_name="some texts")


def test_ratios_and_communication_are_of_medians():
    found = rows(times())
    dense, ours, bound = found[BASELINE], found["wavemare-auto"], found[BOUND]
    assert (dense["median_s"], dense["ratio"], ours["ratio"], bound["ratio"]) == (5, 1, 2.5, 5)
    assert ours["rounds_s"] == [2.0, 1.0, 3.0]
    # What a step takes beyond the bound.
    assert (dense["communication_s"], ours["communication_s"]) == (4.0, 1.0)
    assert ours["communication_ratio"] == 4.0
    assert bound["communication_s"] is None


def test_no_ratio_is_made_of_noise_or_without_the_bound():
    noisy = rows(times(bound=2.5))["wavemare-auto"]
    assert (noisy["communication_s"], noisy["communication_ratio"]) == (0.0, None)
    alone = rows(times(with_bound=False))["wavemare-auto"]
    assert (alone["communication_s"], alone["communication_ratio"]) == (None, None)
    assert alone["ratio"] == 2.5


def test_the_row_has_the_figures_of_the_collectives():
    row = rows(times())["wavemare-auto"]
    assert row["executor"] == "allgather+ordered"
    assert (row["bytes_up"], row["link_bytes_up"]) == (1000, 10.0)
    assert (row["density"], row["union"]) == (0.25, 0.5)
    stock = rows(times())[BASELINE]
    assert (stock["executor"], stock["bytes_up"], stock["link_bytes_up"]) == (None, None, 100.0)


def test_gaps_are_of_the_last_held_out_losses():
    found = {row["system"]: row for row in quality()["quality"]}
    assert found["torch-ddp"]["gap_percent"] == pytest.approx(-1.0)
    assert found["wavemare-topk"]["gap_percent"] == 0.0
    same = {name for name, row in found.items() if row["same_losses"]}
    assert same == {BASELINE, "wavemare-auto"}


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 20, 1.0) for step in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] == pytest.approx(1 / 18)
    assert learning_rate(0, 1, 1.0) == 1.0


@pytest.mark.parametrize("result", [times(), times(with_bound=False), quality()])
def test_tables_and_pictures_show_each_system(result, shown, check_picture):
    text = shown(result_table(result))
    assert "2 ranks over" in text
    for row in result.get("rows", result.get("quality")):
        assert row["system"] in text
    check_picture(lambda file: draw(result, file))


SMALL = {"vocabulary": 2000, "batch": 4, "sequence": 16}


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_batches_depend_on_step_and_rank_and_seed_alone():
    task = make_task(TrainingRequest(**SMALL))
    batch = task.batch(3, 1)
    assert batch["input_ids"].shape == (4, 16)
    assert same(batch, make_task(TrainingRequest(**SMALL)).batch(3, 1))
    others = [task.batch(3, 0), task.batch(4, 1)]
    others.append(make_task(TrainingRequest(seed=1, **SMALL)).batch(3, 1))
    assert not any(same(batch, other) for other in others)


def test_words_are_as_frequent_as_in_a_language():
    task = make_task(TrainingRequest(vocabulary=30_522, batch=64))
    ids = torch.cat([task.batch(step, 0)["input_ids"].flatten() for step in range(20)])
    counts = ids.bincount(minlength=30_522).sort(descending=True).values
    # By Zipf's law, the first word makes 1 / (ln 30,522 + 0.58) of what is no marker.
    assert counts[0] / len(ids) == pytest.approx(0.9 / 10.9, rel=0.1)
    assert ids.max() < 30_522
    # A small batch has few of the words: that is what makes the gradient sparse.
    assert task.batch(0, 0)["input_ids"][:8].unique().numel() < 0.02 * 30_522


def test_each_pass_over_a_table_gives_each_text_once(tmp_path):
    table = tmp_path / "texts.tsv"
    table.write_text("".join(f"text number {n} of these\t{n % 2}\n" for n in range(50)))
    request = TrainingRequest(data=str(table), batch=3, vocabulary=1000, sequence=16)
    task = make_task(request)
    assert task.num_labels == 2
    held_out = len(task.held_out["labels"])
    texts = 50 - held_out
    batches = [task.batch(step, rank) for step in range(2 * texts) for rank in range(2)]
    rows = [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]
    passes = [sorted(rows[start : start + texts]) for start in range(0, 6 * texts, texts)]
    assert all(one == passes[0] for one in passes)
    assert len(set(passes[0])) == texts
    assert rows[:texts] != rows[texts : 2 * texts]
    assert batches[0]["attention_mask"].sum() < batches[0]["attention_mask"].numel()
