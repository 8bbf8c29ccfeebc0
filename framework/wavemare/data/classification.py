# SPDX-License-Identifier: Apache-2.0
"""Labelled texts for sequence classification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data import default_corpus
from wavemare.data.documents import Document, check_fraction, hash_fraction, split_indices
from wavemare.data.specs import Kind, Source, resolve
from wavemare.data.tables import check_columns, load_splits
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = [
    "LabelledCorpus",
    "LabelledText",
    "MajorityBaseline",
    "load_classification",
    "majority_baseline",
    "package_snippets",
]

_SENTENCE_COLUMN = "sentence"
_NUM_PACKAGES = 8
_FEWEST_FILES = 5  # so that a package can be split by file
_LINES_PER_SNIPPET = 8
_MOST_SNIPPETS = 600  # per package, so that no package prevails
# Generated character tables, which every model would tell from code at a glance.
_NOT_ASKED_FOR = frozenset({"encodings"})


@dataclass(frozen=True, slots=True)
class LabelledText:
    """A text and the index of its label in ``LabelledCorpus.label_names``."""

    text: str
    label: int


@dataclass(frozen=True)
class LabelledCorpus:
    """Labelled texts to train on and others to evaluate on.

    Attributes:
        name: The data as the user knows it.
        train: Texts to train on.
        held_out: Texts to evaluate on.
        label_names: Name of each label, at least two.
    """

    name: str
    train: Sequence[LabelledText]
    held_out: Sequence[LabelledText]
    label_names: tuple[str, ...]


@dataclass(frozen=True)
class MajorityBaseline:
    """What the constant answer scores on the held-out texts.

    Attributes:
        label: The most frequent label of the train texts.
        accuracy: Share of the held-out texts that have this label.
        macro_f1: Mean over all labels of the F1 score, which is 0 for every other label.
    """

    label: int
    accuracy: float
    macro_f1: float


def load_classification(
    spec: str | Source | None,
    *,
    text_column: str = "text",
    label_column: str = "label",
    held_out: str | Source | None = None,
    held_out_fraction: float = 0.1,
    cache_dir: Path | None = None,
) -> LabelledCorpus:
    """Load labelled texts.

    Args:
        spec: The ``--data`` argument: a table (CSV, TSV, JSON lines, Parquet, a ``datasets``
            dataset), or None for snippets of the standard library labelled by package. A TSV file
            whose first line is a text and a number has no header: its columns are ``text`` and
            ``label``.
        text_column: Column of the text; ``sentence`` is taken where ``text`` does not exist.
        label_column: Column of the label, integers or texts.
        held_out: A second table to evaluate on. Without it a validation or test split is used, or
            else a part of the rows chosen by the hash of the text.
        held_out_fraction: Share of that part.
        cache_dir: Where ``datasets`` keeps its Arrow files; None is its own default.

    Raises:
        DataError: The data is missing, empty or of another kind, lacks a column, or has a row
            without label, fewer than two labels, or held-out labels that are not learned.
        ConfigError: The fraction is out of range.
    """
    check_fraction(held_out_fraction)
    source = _labelled_source(spec)
    if source.kind is Kind.DEFAULT:
        return package_snippets(default_corpus.read_standard_library(), held_out_fraction)
    table, held_out_table = load_splits(source, cache_dir)
    rows = _read_rows(source, table, text_column, label_column)
    if held_out is not None:
        held_out_source = _labelled_source(held_out)
        held_out_table, _ = load_splits(held_out_source, cache_dir)
    if held_out_table is not None:
        return _encode(source, rows, _read_rows(source, held_out_table, text_column, label_column))
    train, rest = split_indices((text for text, _ in rows), held_out_fraction, name=source.name)
    if not rest:
        reason = "a single text cannot be split for evaluation"
        raise DataError("--data", source.name, reason, "Give more rows")
    return _encode(source, [rows[i] for i in train], [rows[i] for i in rest])


def majority_baseline(labelled: LabelledCorpus) -> MajorityBaseline:
    """Score the answer that is always the most frequent train label, the first of equals."""
    counts = Counter(example.label for example in labelled.train)
    label = min(counts, key=lambda candidate: (-counts[candidate], candidate))
    hits = sum(example.label == label for example in labelled.held_out)
    accuracy = hits / len(labelled.held_out)
    f1 = 2.0 * accuracy / (1.0 + accuracy)  # precision is the accuracy, recall is 1
    return MajorityBaseline(label, accuracy, f1 / len(labelled.label_names))


def package_snippets(
    documents: Sequence[Document], held_out_fraction: float = 0.1
) -> LabelledCorpus:
    """Make the default task: tell which standard-library package a snippet comes from.

    The eight packages with the most source are asked for, among those of five files or more.
    A snippet is eight lines of one file, blank ones left out. Held-out snippets come from other
    files than train snippets.

    Args:
        documents: The standard library, as ``read_standard_library`` returns it.
        held_out_fraction: Share of the source of each package that is held out, as whole files.

    Raises:
        DataError: The library has fewer than two packages of that size.
    """
    packages = _largest_packages(documents)
    if len(packages) < 2:  # noqa: PLR2004
        reason = f"this Python's library has {len(packages)} packages that are large enough"
        raise DataError("--data", default_corpus.NAME, reason, "Give labelled data of your own")
    train: list[LabelledText] = []
    held_out: list[LabelledText] = []
    for label, name in enumerate(sorted(packages)):
        train_files, held_out_files = _split_files(packages[name], held_out_fraction)
        train += _snippets(train_files, label, _MOST_SNIPPETS)
        held_out += _snippets(held_out_files, label, int(_MOST_SNIPPETS * held_out_fraction))
    return LabelledCorpus(
        f"{default_corpus.NAME} by package", train, held_out, tuple(sorted(packages))
    )


def _labelled_source(spec: str | Source | None) -> Source:
    source = spec if isinstance(spec, Source) else resolve(spec)
    if source.kind in (Kind.TEXT, Kind.MEGATRON):
        reason = f"{source.kind} data has no labels"
        remedy = "Give a table (.tsv, .csv, .jsonl, .parquet) with a text and a label column"
        raise DataError("--data", source.name, reason, remedy)
    return source


def _read_rows(
    source: Source, table: Dataset, text_column: str, label_column: str
) -> list[tuple[str, str | int]]:
    if text_column == "text" and "text" not in table.column_names:
        text_column = _SENTENCE_COLUMN if _SENTENCE_COLUMN in table.column_names else text_column
    check_columns(source, table, text_column, label_column, text_columns=[text_column])
    names = getattr(table.features[label_column], "names", None)  # of a datasets.ClassLabel
    rows: list[tuple[str, str | int]] = []
    for number, row in enumerate(table):
        text, label = row[text_column], row[label_column]
        if not text or not text.strip():
            continue
        rows.append((text, _check_label(source, number, label_column, label, names)))
    if not rows:
        reason = "the corpus is empty: no row holds text"
        raise DataError("--data", source.name, reason, "Give rows that hold text")
    return rows


def _check_label(
    source: Source, number: int, column: str, label: Any, names: list[str] | None
) -> str | int:
    if names is not None and isinstance(label, int) and 0 <= label < len(names):
        return names[label]
    if names is not None or not isinstance(label, str | int) or label == "":
        reason = f"row {number} has the label {label!r} in the column {column!r}"
        remedy = "Give every row a label that is an integer or a text"
        raise DataError("--data", source.name, reason, remedy)
    return label


def _encode(
    source: Source, train: list[tuple[str, str | int]], held_out: list[tuple[str, str | int]]
) -> LabelledCorpus:
    labels = sorted(
        {label for _, label in train}, key=lambda label: (isinstance(label, str), label)
    )
    if len(labels) < 2:  # noqa: PLR2004
        reason = f"the train texts have one label only, {labels[0]!r}"
        raise DataError("--data", source.name, reason, "Give texts of two labels or more")
    codes = {label: code for code, label in enumerate(labels)}
    unknown = sorted({str(label) for _, label in held_out if label not in codes})
    if unknown:
        reason = f"held-out texts have labels that no train text has: {', '.join(unknown)}"
        raise DataError("--data", source.name, reason, "Give train texts of every label")
    return LabelledCorpus(
        source.name,
        [LabelledText(text, codes[label]) for text, label in train],
        [LabelledText(text, codes[label]) for text, label in held_out],
        tuple(map(str, labels)),
    )


def _largest_packages(documents: Sequence[Document]) -> dict[str, list[Document]]:
    packages: dict[str, list[Document]] = {}
    for document in documents:
        name = default_corpus.package_of(document.name)
        if "/" in document.name and name not in _NOT_ASKED_FOR:
            packages.setdefault(name, []).append(document)
    large = {name: files for name, files in packages.items() if len(files) >= _FEWEST_FILES}
    by_size = sorted(large, key=lambda name: (-sum(len(d.text) for d in large[name]), name))
    return {name: large[name] for name in by_size[:_NUM_PACKAGES]}


def _split_files(
    files: Sequence[Document], fraction: float
) -> tuple[list[Document], list[Document]]:
    """Hold out files in the order of their hash, between the share and its double if they can."""
    target = fraction * sum(len(file.text) for file in files)
    held_out: list[Document] = []
    size = 0
    for file in sorted(files, key=lambda file: hash_fraction(file.name)):
        if size < target and size + len(file.text) <= 2 * target:
            held_out.append(file)
            size += len(file.text)
    held_out = held_out or [min(files, key=lambda file: len(file.text))]
    return [file for file in files if file not in held_out], held_out


def _snippets(files: Sequence[Document], label: int, most: int) -> list[LabelledText]:
    texts = [text for file in files for text in _cut(file.text)]
    if len(texts) > most:
        texts = [texts[i * len(texts) // most] for i in range(most)]
    return [LabelledText(text, label) for text in texts]


def _cut(text: str) -> Iterator[str]:
    lines = [line for line in text.splitlines() if line.strip()]
    for start in range(0, len(lines) - _LINES_PER_SNIPPET + 1, _LINES_PER_SNIPPET):
        yield "\n".join(lines[start : start + _LINES_PER_SNIPPET])
