# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from wavemare.data.classification import (
    LabelledCorpus,
    LabelledText,
    load_classification,
    majority_baseline,
    package_snippets,
)
from wavemare.data.default_corpus import read_standard_library
from wavemare.data.documents import Document
from wavemare.data.encoding import EncodedDataset
from wavemare.errors import DataError


def pairs(labelled: LabelledCorpus) -> list[tuple[str, str]]:
    return [(e.text, labelled.label_names[e.label]) for e in (*labelled.train, *labelled.held_out)]


def write_tsv(path: Path, rows: list[tuple[str, object]], header: str | None = None) -> str:
    lines = [f"{text}\t{label}" for text, label in rows]
    path.write_text("\n".join([*([header] if header else []), *lines]) + "\n")
    return str(path)


ROWS: list[tuple[str, object]] = [(f'text "{i}', i % 3 + 8) for i in range(60)]


@pytest.mark.parametrize("header", [None, "text\tlabel", "sentence\tlabel"])
def test_tsv_with_and_without_header(tmp_path: Path, header: str | None) -> None:
    spec = write_tsv(tmp_path / "rows.tsv", ROWS, header)
    labelled = load_classification(spec, cache_dir=tmp_path / "cache")
    assert sorted(pairs(labelled)) == sorted((text, str(label)) for text, label in ROWS)
    assert labelled.label_names == ("8", "9", "10")
    assert 0 < len(labelled.held_out) < 20


def test_named_columns_and_text_labels(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"body": f"text {i}", "kind": "ab"[i % 2], "n": 1} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    labelled = load_classification(
        str(path), text_column="body", label_column="kind", cache_dir=tmp_path / "cache"
    )
    assert labelled.label_names == ("a", "b")
    assert sorted(pairs(labelled)) == sorted((str(r["body"]), str(r["kind"])) for r in rows)


def test_a_second_file_is_held_out(tmp_path: Path) -> None:
    train = write_tsv(tmp_path / "train.tsv", ROWS)
    held_out = write_tsv(tmp_path / "dev.tsv", ROWS[:5])
    labelled = load_classification(train, held_out=held_out, cache_dir=tmp_path / "cache")
    assert len(labelled.train) == 60
    assert [e.text for e in labelled.held_out] == [text for text, _ in ROWS[:5]]


def test_class_labels_of_a_saved_dataset(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    datasets.DatasetDict({"train": rows, "validation": rows}).save_to_disk(str(tmp_path / "saved"))
    labelled = load_classification(str(tmp_path / "saved"))
    assert labelled.label_names == ("neg", "pos")
    assert labelled.held_out == [LabelledText("a", 1), LabelledText("b", 0)]


@pytest.mark.parametrize(
    ("rows", "header", "message"),
    [
        (
            [("a", 0), ("b", 1)],
            "words\tlabel",
            "no column 'text'. The columns are 'words', 'label'",
        ),
        ([("a", 0), ("b", 1)], "text\tclass", "no column 'label'"),
        ([("a", 0), ("b", 0)], "text\tlabel", "one label only.*two labels or more"),
        ([("a", "x"), ("b", "")], "text\tlabel", "row 1 has the label ''.*integer or a text"),
        ([("a", 0.5), ("b", 1.5)], "text\tlabel", "row 0 has the label 0.5"),
        ([("a", 0)], "text\tlabel", "single text cannot be split"),
        ([(" ", 0)], "text\tlabel", "no row holds text"),
    ],
)
def test_errors(tmp_path: Path, rows: list[tuple[str, object]], header: str, message: str) -> None:
    spec = write_tsv(tmp_path / "rows.tsv", rows, header)
    with pytest.raises(DataError, match=message) as caught:
        load_classification(spec, cache_dir=tmp_path / "cache")
    assert caught.value.key == "--data"


def test_unknown_held_out_labels_and_unlabelled_text(tmp_path: Path) -> None:
    train = write_tsv(tmp_path / "train.tsv", ROWS)
    other = write_tsv(tmp_path / "dev.tsv", [("x", 8), ("y", 77)])
    with pytest.raises(DataError, match=r"labels that no train text has: 77.*every label"):
        load_classification(train, held_out=other, cache_dir=tmp_path / "cache")
    (tmp_path / "book.txt").write_text("text")
    with pytest.raises(DataError, match=r"text data has no labels.*\.tsv"):
        load_classification(str(tmp_path / "book.txt"))


def test_majority_baseline() -> None:
    train = [LabelledText("", label) for label in (2, 2, 1, 1, 0)]
    truth = [0, 1, 1, 2, 1]
    labelled = LabelledCorpus("x", train, [LabelledText("", t) for t in truth], ("a", "b", "c"))
    baseline = majority_baseline(labelled)
    assert baseline.label == 1  # as frequent as 2, and before it
    assert baseline.accuracy == pytest.approx(3 / 5)
    scores = []
    for label in range(3):
        hits = sum(t == label == 1 for t in truth)
        wrong = sum(t != label for t in truth) if label == 1 else 0
        missed = sum(t == label for t in truth) if label != 1 else 0
        scores.append(2 * hits / (2 * hits + wrong + missed))
    assert baseline.macro_f1 == pytest.approx(sum(scores) / 3)


def test_the_default_task() -> None:
    labelled = load_classification(None)
    assert 4 <= len(labelled.label_names) <= 8
    assert 2000 < len(labelled.train) < 10_000
    assert len(labelled.held_out) > 150
    assert load_classification("stdlib") == labelled
    for examples in (labelled.train, labelled.held_out):
        counts = Counter(e.label for e in examples)
        assert set(counts) == set(range(len(labelled.label_names)))
        assert max(counts.values()) < 0.4 * len(examples)
    assert majority_baseline(labelled).accuracy < 0.4
    sources = {d.name: d.text for d in read_standard_library()}
    for example in labelled.held_out[::50]:
        name = labelled.label_names[example.label]
        lines = example.text.splitlines()
        assert any(
            all(line in text for line in lines)
            for path, text in sources.items()
            if path.startswith(f"{name}/")
        )


def test_snippets_of_a_file_stay_on_one_side() -> None:
    made = [
        Document(f"{package}/{i}.py", "".join(f"{package} {i} {j}\n\n" for j in range(80)))
        for package in ("one", "two")
        for i in range(12)
    ]
    labelled = package_snippets([*made, Document("small/a.py", "x\n" * 50)], 0.2)
    assert labelled.label_names == ("one", "two")

    def files(examples: object) -> set[str]:
        return {" ".join(line.split()[:2]) for e in examples for line in e.text.splitlines()}  # type: ignore[attr-defined]

    assert files(labelled.train).isdisjoint(files(labelled.held_out))
    assert len(files(labelled.train)) + len(files(labelled.held_out)) == 24
    assert all(len(e.text.splitlines()) == 8 for e in labelled.train)
    with pytest.raises(DataError, match=r"1 packages that are large enough.*of your own"):
        package_snippets(made[:12])


def test_encoded_dataset(bert_tokenizer: PreTrainedTokenizerFast) -> None:
    examples = [LabelledText("wave", 1), LabelledText("sea tide " * 50, 0)]
    dataset = EncodedDataset(examples, bert_tokenizer, 16)
    short, long = dataset[0], dataset[1]
    ids = bert_tokenizer("wave")["input_ids"]
    assert short["input_ids"].tolist() == ids + [0] * (16 - len(ids))
    assert short["attention_mask"].sum() == len(ids)
    assert (long["input_ids"][0], long["input_ids"][-1]) == (2, 3)
    assert [int(dataset[i]["labels"]) for i in range(len(dataset))] == [1, 0]
    with pytest.raises(DataError, match="no labelled texts"):
        EncodedDataset([], bert_tokenizer, 16)
