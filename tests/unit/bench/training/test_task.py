# SPDX-License-Identifier: Apache-2.0
"""The texts of ``wavemare bench training``, and the model that learns them."""

import pytest
import torch

from wavemare.bench.training.request import TrainingRequest
from wavemare.bench.training.task import make_task

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
