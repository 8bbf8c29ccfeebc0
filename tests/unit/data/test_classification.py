# SPDX-License-Identifier: Apache-2.0
import json
import os
from collections import Counter

import datasets
import pytest
import torch

from support.refusals import refuses
from wavemare.data.classification import (
    LabelledCorpus,
    encode_labelled,
    load_classification,
    majority_baseline,
    prepare_classification,
    prepare_encoded,
)
from wavemare.data.sources import resolve
from wavemare.errors import DataError


def labelled_rows(pairs):
    columns = {"text": [text for text, _ in pairs], "label": [label for _, label in pairs]}
    return datasets.Dataset.from_dict(columns)


def pairs(labelled):
    rows = (*labelled.train, *labelled.validation)
    return [(row["text"], labelled.label_names[row["label"]]) for row in rows]


def write_tsv(path, rows, header):
    lines = [f"{text}\t{label}" for text, label in rows]
    path.write_text("\n".join([header, *lines]) + "\n")
    return resolve(str(path))


ROWS = [(f'text "{i}', i % 3 + 8) for i in range(60)]


@pytest.mark.parametrize("header", ["text\tlabel", "sentence\tlabel"])
def test_tsv(tmp_path, header):
    spec = write_tsv(tmp_path / "rows.tsv", ROWS, header)
    labelled = load_classification(spec)
    assert sorted(pairs(labelled)) == sorted((text, str(label)) for text, label in ROWS)
    assert labelled.label_names == ("8", "9", "10")
    assert 0 < len(labelled.validation) < 20


def test_named_columns_and_text_labels(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"body": f"text {i}", "kind": "ab"[i % 2], "n": 1} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = resolve(str(path))
    labelled = load_classification(source, text_column="body", label_column="kind")
    assert labelled.label_names == ("a", "b")
    assert sorted(pairs(labelled)) == sorted((str(r["body"]), str(r["kind"])) for r in rows)


def test_class_labels_of_a_saved_dataset(tmp_path):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    labelled = load_classification(resolve(str(tmp_path / "saved")))
    assert labelled.label_names == ("neg", "pos")
    assert labelled.validation[:] == {"text": ["a", "b"], "label": [1, 0]}


def test_unknown_validation_labels(tmp_path):
    parts = {"train": labelled_rows(ROWS), "test": labelled_rows([("x", 8), ("y", 77)])}
    datasets.DatasetDict(parts).save_to_disk(str(tmp_path / "saved"))
    with refuses(DataError, "--data", str(tmp_path / "saved")):
        load_classification(resolve(str(tmp_path / "saved")))


def test_majority_baseline():
    train, truth = (
        labelled_rows([("", label) for label in labels])
        for labels in ([2, 2, 1, 1, 0], [0, 1, 1, 2, 1])
    )
    labelled = LabelledCorpus("x", train, truth, ("a", "b", "c"))
    # The answer is 1: as frequent as 2, and before it.
    expected = {"accuracy": 3 / 5, "macro_f1": (2 * 3 / (2 * 3 + 2)) / 3}
    assert majority_baseline(labelled) == pytest.approx(expected)


def test_the_default_task():
    labelled = load_classification(resolve(None))
    assert 4 <= len(labelled.label_names) <= 8
    assert 2000 < len(labelled.train) < 10_000
    assert len(labelled.validation) > 150
    for examples in (labelled.train, labelled.validation):
        counts = Counter(examples["label"])
        assert set(counts) == set(range(len(labelled.label_names)))
        assert max(counts.values()) < 0.4 * len(examples)
    assert majority_baseline(labelled)["accuracy"] < 0.4


def test_encoded_texts(bert_tokenizer):
    rows = labelled_rows([("wave", 1), ("sea tide " * 50, 0)])
    dataset = encode_labelled(rows, bert_tokenizer, 16)
    short, long = dataset[0], dataset[1]
    ids = bert_tokenizer("wave")["input_ids"]
    assert short["input_ids"].tolist() == ids + [0] * (16 - len(ids))
    assert short["attention_mask"].sum() == len(ids)
    assert (long["input_ids"][0], long["input_ids"][-1]) == (2, 3)
    assert [int(dataset[i]["labels"]) for i in range(len(dataset))] == [1, 0]
    assert dataset[0]["labels"].dtype == short["input_ids"].dtype == torch.int64


def test_labelled_texts_are_read_and_encoded_once(tmp_path, bert_tokenizer):
    """What the cache gives is what is read; a file that has not changed is not read again."""
    source = write_tsv(tmp_path / "rows.tsv", ROWS, "text\tlabel")
    direct = load_classification(source)
    status = (tmp_path / "rows.tsv").stat()
    for _ in range(2):
        corpus = prepare_classification(source, tmp_path / "cache")
        assert corpus.label_names == direct.label_names
        assert pairs(corpus) == pairs(direct)
        parts = prepare_encoded(corpus, bert_tokenizer, 16)
        for rows, samples in zip((direct.train, direct.validation), parts, strict=True):
            expected = encode_labelled(rows, bert_tokenizer, 16)
            for name in ("input_ids", "attention_mask", "labels"):
                assert samples[:][name].tolist() == expected[:][name].tolist()
                assert samples[0][name].dtype == torch.int64
        (tmp_path / "rows.tsv").write_text("x" * status.st_size)
        os.utime(tmp_path / "rows.tsv", ns=(status.st_atime_ns, status.st_mtime_ns))
    entries = {*(tmp_path / "cache").iterdir()}
    prepare_encoded(corpus, bert_tokenizer, 8)
    assert {*(tmp_path / "cache").iterdir()} != entries
