# SPDX-License-Identifier: Apache-2.0
"""Accuracy and F1 against counting, and which validation samples recipes evaluate on."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from support.refusals import refuses
from wavemare.data.classification import scores
from wavemare.data.indexed import IndexedWriter
from wavemare.data.tokenizer import train_tokenizer
from wavemare.errors import ConfigError, DataError
from wavemare.recipes.gpt.pretrain import PretrainArguments
from wavemare.training.arguments import parse_arguments
from wavemare.training.evaluation import (
    count_samples,
    evaluate,
    evaluation_loader,
    keep_best,
    read_best,
)
from wavemare.training.setup import Setup
from wavemare.training.text import find_data, read_text


def test_samples_are_those_of_the_engines_ranks():
    def batches(rank, ranks):
        engine = SimpleNamespace(
            data_rank=rank, data_world_size=ranks, train_micro_batch_size_per_gpu=lambda: 4
        )
        return evaluation_loader(engine, torch.arange(100), 8)

    assert [batch.tolist() for batch in batches(1, 2)] == [[50, 62, 75, 87]]
    with refuses(DataError, "--data", 100):
        batches(0, 101)


def test_validation_samples_are_read_one_batch_after_the_other():
    read = []

    class Samples:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            read.append(index)
            return index

    def eval_batch(batches, num_micro_batches):
        return [(len(read), next(batches)) for _ in range(num_micro_batches)][-1][0]

    engine = SimpleNamespace(
        data_rank=0,
        data_world_size=1,
        train_micro_batch_size_per_gpu=lambda: 2,
        eval_batch=eval_batch,
    )
    loader = evaluation_loader(engine, Samples())
    for _ in range(2):  # a loader is used again
        read.clear()
        assert evaluate(engine, loader) == 4  # of 6 before the last batch is asked for
        assert read == [0, 1, 2, 3, 4, 5]
    for limit in (None, 0, 3, 4, 99):
        read.clear()
        loader = evaluation_loader(engine, Samples(), limit)
        evaluate(engine, loader)
        counts = {"eval samples": len(read), "held-out samples": 6}
        assert count_samples(engine, loader, Samples()) == counts


def test_the_best_evaluation_is_that_of_rank_0_in_a_run_that_resumes(tmp_path, monkeypatch):
    best = {"eval_loss": 1.5, "step": 6}

    def gather(found, own, group=None):  # another host has another file
        found[:] = [own, {"eval_loss": 1.0, "step": 2}]

    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    model = tmp_path / "model"
    model.mkdir()
    first = SimpleNamespace(folder=tmp_path, resume=False, rank=0)
    assert read_best(first) == {}
    assert keep_best(first, **best) == best
    assert keep_best(SimpleNamespace(folder=tmp_path, rank=1), 2, 1.0)["step"] == 2
    assert read_best(first) == {}
    again = SimpleNamespace(folder=tmp_path, model_folder=model, resume=True, rank=0)
    assert read_best(again) == best
    model.rmdir()  # by hand: it has to be exported again
    assert read_best(again) == {}


@pytest.mark.parametrize(
    ("words", "samples"),
    [
        ("", 8192),
        ("--final_eval_samples 40", 40),
        ("--final-eval-samples all", None),
        ("--eval-iters 3", 48),
    ],
)
def test_the_last_evaluation_is_bounded_unless_all_is_asked_for(words, samples):
    arguments = parse_arguments(PretrainArguments, ["--deepspeed_config=x", *words.split()])
    known = {"config": {}, "layout": None, "section": None, "batch": {"train_batch_size": 16}}
    setup = Setup(arguments, **known, resume=False, rank=0, world_size=1)
    assert setup.final_samples == samples


@pytest.mark.parametrize("word", ["0", "-3", "every", "1e3", "½"])
def test_no_number_of_samples_is_refused(word):
    with pytest.raises(ConfigError) as caught:
        parse_arguments(PretrainArguments, ["--deepspeed_config=x", f"--final_eval_samples={word}"])
    assert caught.value.key == "--final_eval_samples"


def test_data_without_validation_documents_is_refused(tmp_path):
    with IndexedWriter(tmp_path / "few", "u2") as writer:
        for _ in range(10):
            writer.add_sequence([1, 2, 3, 4])
            writer.end_document()
    train_tokenizer(["few"], 300, kind="gpt").save_pretrained(tmp_path / "tokenizer")
    options = {"data": str(tmp_path / "few"), "tokenizer": str(tmp_path / "tokenizer")}
    arguments = PretrainArguments(**options, split="969,30,1")
    text = read_text(find_data(arguments), arguments, special_tokens="gpt")
    with refuses(DataError, "--split", "969,30,1") as caught:
        text.causal_samples(sequence_length=2, num_samples=4, seed=0)
    assert (caught.value.key, caught.value.value) == ("--split", "969,30,1")
    arguments = PretrainArguments(**options, data_path=[str(tmp_path / "few")])
    again = read_text(find_data(arguments), arguments, special_tokens="gpt")
    assert again.split == "969,30,1"  # Megatron's default
    assert text.baselines(sequence_length=2) == ({}, {})


def test_a_sample_text_continues_the_beginning_of_a_validation_text(tmp_path):
    (tmp_path / "tales.txt").write_text("Once upon a time there was a sea.\n" * 40)
    options = {"data": str(tmp_path / "tales.txt"), "cache": str(tmp_path / "cache")}
    arguments = PretrainArguments(**options, vocab_size=300)
    text = read_text(find_data(arguments), arguments, special_tokens="gpt")
    whole = text.tokenizer.decode(text.validation[0].tokens.tolist())
    beginnings = [text.beginning(positions) for positions in (64, 3)]
    assert all(whole.startswith(one) for one in beginnings)
    assert [len(text.tokenizer(one)["input_ids"]) for one in beginnings] == [8, 2]


def read_lines(tmp_path):
    options = {"data": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")}
    arguments = PretrainArguments(**options, vocab_size=300)
    return read_text(find_data(arguments), arguments, special_tokens="gpt")


def tokens_of(text):
    return [store.tokens.tolist() for store in (*text.train, *text.validation)]


def test_text_is_read_once_for_the_same_files(tmp_path):
    """Whoever comes later looks at name, size and time alone, unless the cache lacks something."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "sea {i} wave"}}\n' for i in range(60)))
    first, status = tokens_of(read_lines(tmp_path)), file.stat()
    content = file.read_text()
    file.write_text("x" * len(content))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert tokens_of(read_lines(tmp_path)) == first
    file.write_text(content.replace("wave", "mare"))
    again = tokens_of(read_lines(tmp_path))
    assert again != first
    for kind in ("tokenizer", "tokens"):
        for folder in (tmp_path / "cache").glob(f"{kind}-*"):
            if folder.is_dir():
                shutil.rmtree(folder)
        assert tokens_of(read_lines(tmp_path)) == again


def test_tokens_are_within_the_model_or_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "sea"}\n{"text": "wave"}\n' * 20)
    text = read_lines(tmp_path)
    size = len(text.tokenizer)
    text.check_fits(8, SimpleNamespace(vocab_size=size, max_position_embeddings=8))
    with pytest.raises(ConfigError):
        text.check_fits(9, SimpleNamespace(vocab_size=size, max_position_embeddings=8))
    largest = max(max(part) for part in tokens_of(text))
    text.check_fits(8, SimpleNamespace(vocab_size=largest + 1, max_position_embeddings=8))
    with refuses(DataError, "--data", str(tmp_path / "rows.jsonl")):
        text.check_fits(8, SimpleNamespace(vocab_size=largest, max_position_embeddings=8))


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
