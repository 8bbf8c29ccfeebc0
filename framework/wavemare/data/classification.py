# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for sequence classification, as ``datasets`` with ``text`` and ``label``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.encode import definition_of, library_threads
from wavemare.data.sources import STDLIB, Kind, Source, read_stdlib
from wavemare.data.text import hash_fraction, load_records, source_key, split_indices
from wavemare.data.tokenizer import build_once, content_key
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerFast


_FORMAT_VERSION = 1  # part of every cache key: raise it when texts are read in another way
_PARTS = ("train", "validation")
_NAMES = "names.json"
_VALIDATION = 0.1  # share of the texts
_SENTENCE_COLUMN = "sentence"
_NUM_PACKAGES = 8
_FEWEST_FILES = 5  # so that a package can be split by file
_LINES_PER_SNIPPET = 8
_MOST_SNIPPETS = 600  # per package, so that no package prevails
# Generated character tables, which every model would tell from code at a glance.
_LEFT_OUT = frozenset({"encodings"})

_Row = tuple[str, str | int]


@dataclass(frozen=True)
class LabelledCorpus:
    """Labelled texts with the columns ``text`` and ``label``, an index of `label_names`.

    Attributes:
        name: The ``--data`` argument, for messages.
        train: Texts to train on.
        validation: Texts to validate on.
        label_names: Name of each label, at least two.
        folder: Entry of the cache that holds it; None if it is in memory alone.
    """

    name: str
    train: Dataset
    validation: Dataset
    label_names: tuple[str, ...]
    folder: Path | None = None

    def describe(self) -> dict[str, object]:
        """Return the rows of a start-up panel about the texts."""
        return {
            "name": self.name,
            "texts": f"{len(self.train)} to train, {len(self.validation)} for validation",
            "classes": ", ".join(self.label_names),
        }


def load_classification(
    source: Source, *, text_column: str = "text", label_column: str = "label"
) -> LabelledCorpus:
    """Load labelled texts.

    A validation or test split of the data is used; else 10 % of the rows, chosen by the hash of the
    text, are for validation.

    Args:
        source: A table (CSV, TSV, JSON lines, Parquet, a ``datasets`` dataset), or the default
            corpus for snippets of the standard library labelled by package.
        text_column: Column of the text; ``sentence`` is read where ``text`` does not exist.
        label_column: Column of the label, integers or texts.

    Raises:
        DataError: The data is missing, empty or of another kind, lacks a column, has a row without
            label, fewer than two labels, or validation labels that no training text has.
    """
    if source.kind in (Kind.TEXT, Kind.MEGATRON):
        reason = f"{source.kind} data has no labels"
        remedy = "Give a table (.tsv, .csv, .jsonl, .parquet) with a text and a label column"
        raise DataError("--data", source.name, reason, remedy)
    if source.kind is Kind.DEFAULT:
        return _package_snippets(read_stdlib())
    columns = [text_column] + ([_SENTENCE_COLUMN] if text_column == "text" else [])
    choices = [{column: True, label_column: False} for column in columns]
    records, other = load_records(source, *choices)
    rows = _labelled(source, records, label_column)
    if other is not None:
        return _corpus(source.name, rows, _labelled(source, other, label_column))
    first, second = split_indices((text for text, _ in rows), _VALIDATION, name=source.name)
    if not len(second):
        reason = "a single text cannot be split for evaluation"
        raise DataError("--data", source.name, reason, "Give more rows")
    return _corpus(source.name, [rows[i] for i in first], [rows[i] for i in second])


def prepare_classification(
    source: Source, cache_dir: Path, *, text_column: str = "text", label_column: str = "label"
) -> LabelledCorpus:
    """Load labelled texts once for each host, from the cache; see `load_classification`."""
    settings = ("labels", str(_FORMAT_VERSION), text_column, label_column, source_key(source))
    folder = Path(cache_dir) / f"labels-{content_key(settings)[:32]}"

    def build(target: Path) -> None:
        corpus = load_classification(source, text_column=text_column, label_column=label_column)
        for part in _PARTS:
            getattr(corpus, part).save_to_disk(target / part)
        names = [corpus.name, corpus.label_names]
        (target / _NAMES).write_text(json.dumps(names), encoding="utf-8")

    build_once(folder, build)

    from datasets import Dataset

    name, labels = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
    train, validation = (Dataset.load_from_disk(folder / part) for part in _PARTS)
    return LabelledCorpus(name, train, validation, tuple(labels), folder)


def majority_baseline(corpus: LabelledCorpus) -> dict[str, float]:
    """Score the most frequent training label, the first of equals, as the only answer.

    Returns:
        ``accuracy``, and ``macro_f1``: the mean over all labels of the F1 score, which is 0 for
        every other label.
    """
    counts = Counter(corpus.train["label"])
    label = min(counts, key=lambda candidate: (-counts[candidate], candidate))
    accuracy = Counter(corpus.validation["label"])[label] / len(corpus.validation)
    f1 = 2.0 * accuracy / (1.0 + accuracy)  # precision is the accuracy, recall is 1
    return {"accuracy": accuracy, "macro_f1": f1 / len(corpus.label_names)}


def encode_labelled(
    rows: Dataset,
    tokenizer: PreTrainedTokenizerFast,
    sequence_length: int,
    target: Path | None = None,
) -> Dataset:
    """Encode labelled texts with special tokens, cut or padded to one length.

    Args:
        rows: The texts, with their labels.
        tokenizer: With a padding token.
        sequence_length: Tokens of a sample.
        target: The file in which the samples lie; they are in memory without one.

    Returns:
        Samples ``{"input_ids": int64 [sequence_length], "attention_mask": int64 [sequence_length],
        "labels": int64 []}``.

    Raises:
        DataError: The tokenizer has no padding token.
    """
    if tokenizer.pad_token_id is None:
        reason = "its tokenizer has no padding token"
        raise DataError("--model", tokenizer.name_or_path, reason, "Add a pad_token to it")

    def encode(batch: Mapping[str, Any]) -> dict[str, Any]:
        options = {"padding": "max_length", "truncation": True, "max_length": sequence_length}
        encoded = tokenizer(list(batch["text"]), **options)
        kept = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        return {**kept, "labels": batch["label"]}

    # The fingerprint names no file: hashing the tokenizer would take long.
    encoded = rows.map(
        encode,
        batched=True,
        remove_columns=rows.column_names,
        new_fingerprint="encoded",
        cache_file_name=None if target is None else str(target),
        load_from_cache_file=False,
    )
    return encoded.with_format("torch")


def prepare_encoded(
    corpus: LabelledCorpus, tokenizer: PreTrainedTokenizerFast, sequence_length: int
) -> tuple[Dataset, Dataset]:
    """Encode the texts of `prepare_classification` once for each host; see `encode_labelled`.

    Returns:
        Samples to train on and to validate on.
    """
    from datasets import Dataset

    assert corpus.folder is not None
    settings = ("encoded", definition_of(tokenizer), str(tokenizer.pad_token_id), sequence_length)
    folder = corpus.folder.with_name(f"{corpus.folder.name}-{content_key(map(str, settings))[:32]}")

    def build(target: Path) -> None:
        for part in _PARTS:
            file = target / f"{part}.arrow"
            with library_threads():
                encode_labelled(getattr(corpus, part), tokenizer, sequence_length, file)

    build_once(folder, build)
    train, validation = (
        Dataset.from_file(str(folder / f"{part}.arrow")).with_format("torch") for part in _PARTS
    )
    return train, validation


def _labelled(source: Source, records: list[dict[str, Any]], label_column: str) -> list[_Row]:
    rows = []
    for number, record in enumerate(records):
        label = record.pop(label_column)
        (text,) = record.values()
        if text and text.strip():
            rows.append((text, _check_label(source, number, label_column, label)))
    if not rows:
        reason = "the corpus is empty: no row holds text"
        raise DataError("--data", source.name, reason, "Give rows that hold text")
    return rows


def _check_label(source: Source, number: int, column: str, label: Any) -> str | int:
    if not isinstance(label, str | int) or label == "":
        reason = f"row {number} has the label {label!r} in the column {column!r}"
        remedy = "Give every row a label that is an integer or a text"
        raise DataError("--data", source.name, reason, remedy)
    return label


def _corpus(name: str, train: list[_Row], validation: list[_Row]) -> LabelledCorpus:
    from datasets import Dataset

    labels = sorted({label for _, label in train}, key=lambda x: (isinstance(x, str), x))
    if len(labels) < 2:  # noqa: PLR2004
        reason = f"the train texts have one label only, {labels[0]!r}"
        raise DataError("--data", name, reason, "Give texts of two labels or more")
    codes = {label: code for code, label in enumerate(labels)}
    unknown = sorted({str(label) for _, label in validation if label not in codes})
    if unknown:
        reason = f"validation texts have labels that no train text has: {', '.join(unknown)}"
        raise DataError("--data", name, reason, "Give train texts of every label")

    def table(rows: list[_Row]) -> Dataset:
        columns = {"text": [t for t, _ in rows], "label": [codes[label] for _, label in rows]}
        return Dataset.from_dict(columns)

    return LabelledCorpus(name, table(train), table(validation), tuple(map(str, labels)))


def _package_snippets(library: Dataset) -> LabelledCorpus:
    """Make the default task: tell which standard-library package a snippet comes from.

    The labels are the eight packages with the most source, among the packages of five files or
    more. A snippet is eight lines of one file without its blank lines. Validation snippets come
    from other files than training snippets.
    """
    packages: dict[str, dict[str, str]] = {}
    for row in library:
        package, slash, _ = row["name"].partition("/")
        if slash and package not in _LEFT_OUT:
            packages.setdefault(package, {})[row["name"]] = row["text"]
    large = {name: files for name, files in packages.items() if len(files) >= _FEWEST_FILES}
    by_size = sorted(large, key=lambda name: (-sum(map(len, large[name].values())), name))
    train: list[_Row] = []
    validation: list[_Row] = []
    for name in sorted(by_size[:_NUM_PACKAGES]):
        chosen = _validation_files(large[name])
        rest = [text for file, text in large[name].items() if file not in chosen]
        train += _snippets(rest, name, _MOST_SNIPPETS)
        held = [text for file, text in large[name].items() if file in chosen]
        validation += _snippets(held, name, int(_MOST_SNIPPETS * _VALIDATION))
    if len(by_size) < 2:  # noqa: PLR2004
        reason = f"this Python's library has {len(by_size)} packages that are large enough"
        raise DataError("--data", STDLIB, reason, "Give labelled data of your own")
    return _corpus(f"{STDLIB} by package", train, validation)


def _validation_files(files: Mapping[str, str]) -> set[str]:
    """Choose files in the order of their hash, between the share and its double if they can."""
    target = _VALIDATION * sum(map(len, files.values()))
    chosen: set[str] = set()
    size = 0
    for file in sorted(files, key=hash_fraction):
        if size < target and size + len(files[file]) <= 2 * target:
            chosen.add(file)
            size += len(files[file])
    return chosen or {min(files, key=lambda file: len(files[file]))}


def _snippets(texts: list[str], label: str, most: int) -> list[_Row]:
    found = [snippet for text in texts for snippet in _cut(text)]
    if len(found) > most:
        found = [found[i * len(found) // most] for i in range(most)]
    return [(snippet, label) for snippet in found]


def _cut(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    for start in range(0, len(lines) - _LINES_PER_SNIPPET + 1, _LINES_PER_SNIPPET):
        yield "\n".join(lines[start : start + _LINES_PER_SNIPPET])


def scores(confusion: Any) -> dict[str, float]:
    """Return accuracy and macro F1 of a confusion matrix: rows are labels, columns answers."""
    right = confusion.diag().double()
    f1 = 2 * right / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return {"accuracy": float(right.sum() / confusion.sum()), "macro_f1": float(f1.mean())}
