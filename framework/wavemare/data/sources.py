# SPDX-License-Identifier: Apache-2.0
"""Documents from whatever ``--data`` names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from wavemare.data import default_corpus
from wavemare.data.cache import content_key
from wavemare.data.documents import (
    Corpus,
    Document,
    ReadDocuments,
    check_fraction,
    split_indices,
    split_text,
)
from wavemare.data.specs import Kind, Source, resolve
from wavemare.data.tables import ColumnDocuments, check_columns, load_splits
from wavemare.errors import DataError

__all__ = ["Kind", "Source", "all_documents", "load_documents", "resolve"]


def load_documents(
    spec: str | Source | None,
    *,
    text_column: str = "text",
    held_out_fraction: float = 0.05,
    cache_dir: Path | None = None,
) -> Corpus:
    """Load a corpus of text and split it into train and held-out documents.

    A text file is one document; a row of a table is one document. A ``datasets`` dataset with a
    validation or test split is evaluated on that split; any other corpus is split by the hash of
    each document's text, and a single document by position at a line end.

    Args:
        spec: The ``--data`` argument, or what ``resolve`` made of it.
        text_column: Column of a table that holds the text.
        held_out_fraction: Share of the documents that is held out.
        cache_dir: Where ``datasets`` keeps its Arrow files; None is its own default.

    Raises:
        DataError: The data is missing, empty, unreadable, has no such column, or is Megatron data,
            which holds tokens and not text.
        ConfigError: The fraction is out of range.
    """
    check_fraction(held_out_fraction)
    source = spec if isinstance(spec, Source) else resolve(spec)
    if source.kind is Kind.MEGATRON:
        reason = "Megatron data holds tokens, not text"
        raise DataError("--data", source.name, reason, "Use it where a model reads tokens")
    if source.kind is Kind.DEFAULT:
        return default_corpus.load_default_corpus(held_out_fraction)
    if source.kind is Kind.TEXT:
        return _load_text(source, held_out_fraction)
    return _load_table(source, text_column, held_out_fraction, cache_dir)


def all_documents(source: Source, *, text_column: str = "text") -> tuple[Sequence[Document], str]:
    """Open all documents of a source, none held out; each is read when it is asked for.

    Args:
        source: What to read.
        text_column: Column of a table that holds the text.

    Returns:
        The documents, blank ones among them, and a text that changes when they do.

    Raises:
        DataError: The data is missing, unreadable, has no such column, or is Megatron data.
    """
    if source.kind is Kind.MEGATRON:
        reason = "Megatron data holds tokens, not text"
        raise DataError("INPUT", source.name, reason, "Give text; merge tokens with data merge")
    if source.kind is Kind.DEFAULT:
        corpus = default_corpus.load_default_corpus()
        documents = [*corpus.train, *corpus.held_out]
        return documents, content_key(document.text for document in documents)
    if source.kind is Kind.TEXT:
        return FileDocuments(source), _identity(source)
    train_rows, held_out_rows = load_splits(source)
    if held_out_rows is not None:
        reason = "the dataset has a split to train on and one held out"
        raise DataError("INPUT", source.name, reason, "Save the split that you mean by itself")
    check_columns(source, train_rows, text_column, text_columns=[text_column])
    identity = content_key([str(train_rows._fingerprint), text_column])
    return ColumnDocuments(train_rows, text_column, source.name), identity


def _identity(source: Source) -> str:
    stats = ((file, file.stat()) for file in source.files)
    return content_key(f"{file.absolute()} {s.st_size} {s.st_mtime_ns}" for file, s in stats)


class FileDocuments(ReadDocuments):
    """Text files as documents."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._base = Path(os.path.commonpath([file.parent for file in source.files]))

    def __len__(self) -> int:
        return len(self._source.files)

    def read(self, index: int) -> Document:
        """Return the text of a file.

        Raises:
            DataError: It cannot be read, or is not UTF-8.
        """
        return _read(self._source, self._base, self._source.files[index])


def _load_text(source: Source, fraction: float) -> Corpus:
    documents = list(FileDocuments(source))
    train, held_out = split_indices((d.text for d in documents), fraction, name=source.name)
    if not held_out:
        start, end = split_text(documents[train[0]], fraction)
        return Corpus(source.name, [start], [end])
    return Corpus(source.name, [documents[i] for i in train], [documents[i] for i in held_out])


def _read(source: Source, base: Path, file: Path) -> Document:
    try:
        return Document(file.relative_to(base).as_posix(), file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        reason = f"{file} is not UTF-8 text: {error.reason} at byte {error.start}"
        raise DataError("--data", source.name, reason, "Convert the file to UTF-8") from error
    except OSError as error:
        reason = f"{file} cannot be read: {error.strerror}"
        raise DataError("--data", source.name, reason, "Check the permissions") from error


def _load_table(source: Source, column: str, fraction: float, cache_dir: Path | None) -> Corpus:
    train_rows, held_out_rows = load_splits(source, cache_dir)
    check_columns(source, train_rows, column, text_columns=[column])
    rows = ColumnDocuments(train_rows, column, source.name)
    if held_out_rows is not None:
        check_columns(source, held_out_rows, column, text_columns=[column])
        named = ColumnDocuments(held_out_rows, column, f"{source.name} (held out)")
        return Corpus(source.name, _filled(source, rows), _filled(source, named))
    train, held_out = split_indices(rows.texts(), fraction, name=source.name)
    if not held_out:
        start, end = split_text(rows[train[0]], fraction)
        return Corpus(source.name, [start], [end])
    return Corpus(source.name, rows.select(train), rows.select(held_out))


def _filled(source: Source, rows: ColumnDocuments) -> ColumnDocuments:
    filled = [i for i, text in enumerate(rows.texts()) if text and text.strip()]
    if not filled:
        reason = "a split of the dataset is empty: it holds no text besides blanks"
        raise DataError("--data", source.name, reason, "Give a dataset that holds text")
    return rows.select(filled)
