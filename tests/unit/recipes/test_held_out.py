# SPDX-License-Identifier: Apache-2.0
"""Accuracy and F1 against counting, and which held-out samples recipes evaluate on."""

from types import SimpleNamespace

import pytest
import torch

from wavemare.data import resolve
from wavemare.data.indexed_writer import IndexedWriter
from wavemare.errors import DataError
from wavemare.recipes.bert.finetune import scores
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.recipes.job import Job
from wavemare.recipes.megatron_parts import MegatronParts
from wavemare.recipes.text import TextData


def held_out(rank, ranks, num_samples):
    job = SimpleNamespace(
        engine=SimpleNamespace(data_rank=rank, data_world_size=ranks),
        batch={"train_micro_batch_size_per_gpu": 4},
    )
    samples = torch.arange(100)
    batches = Job.held_out_batches(job, samples, num_samples)
    return [int(sample) for batch in batches for sample in batch]


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_fewer_samples_than_ranks_are_one_for_each(asked):
    assert [len(held_out(rank, 3, asked)) for rank in range(3)] == [1, 1, 1]


def test_samples_are_spread_over_the_whole_set():
    assert held_out(0, 1, 4) == [0, 25, 50, 75]
    assert sorted(held_out(0, 2, 8) + held_out(1, 2, 8)) == [0, 12, 25, 37, 50, 62, 75, 87]


def test_data_of_which_nothing_is_held_out_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "few", "u2") as writer:
        for _ in range(10):
            writer.add_sequence([1, 2, 3, 4])
            writer.end_document()
    parts = MegatronParts(resolve(str(tmp_path / "few")), None, 300)
    with pytest.raises(DataError, match="by these shares no document is held out") as caught:
        parts.samples(sequence_length=2, num_samples=4, seed=0)
    assert (caught.value.key, caught.value.value) == ("--split", "969,30,1")


def test_a_sample_text_goes_on_from_the_beginning_of_a_held_out_text(tmp_path):
    (tmp_path / "tales.txt").write_text("Once upon a time there was a sea.\n" * 40)
    options = {"data": str(tmp_path / "tales.txt"), "cache": str(tmp_path / "cache")}
    text = TextData(PretrainArguments(deepspeed_config="", **options))
    text.read(kind="gpt", vocab_size=300)
    whole = text.tokenizer.decode(text.held_out.tokens.tolist())
    beginnings = [text.beginning(positions) for positions in (64, 3)]
    assert all(whole.startswith(one) for one in beginnings)
    assert [len(text.tokenizer(one)["input_ids"]) for one in beginnings] == [8, 2]


def test_a_constant_answer_scores_as_the_majority_baseline_does():
    confusion = torch.tensor([[6, 0, 0], [3, 0, 0], [1, 0, 0]])
    result = scores(confusion)
    assert result["accuracy"] == pytest.approx(0.6)
    assert result["macro_f1"] == pytest.approx((2 * 6 / (6 + 10)) / 3)


def test_random_answers_are_counted_alike():
    generator = torch.Generator().manual_seed(0)
    labels, answers = (torch.randint(0, 5, (200,), generator=generator) for _ in range(2))
    confusion = torch.zeros(5, 5, dtype=torch.long)
    for label, answer in zip(labels, answers, strict=True):
        confusion[label, answer] += 1
    f1 = []
    for kind in range(5):
        hits = int(((labels == kind) & (answers == kind)).sum())
        precision = hits / max(int((answers == kind).sum()), 1)
        recall = hits / max(int((labels == kind).sum()), 1)
        f1.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    result = scores(confusion)
    assert result["accuracy"] == pytest.approx(float((labels == answers).float().mean()))
    assert result["macro_f1"] == pytest.approx(sum(f1) / 5)
