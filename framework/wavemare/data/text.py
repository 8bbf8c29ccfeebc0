# SPDX-License-Identifier: Apache-2.0
"""Texts by the ``datasets`` library: any source becomes a dataset with the column ``text``."""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.sources import Kind, Source, read_stdlib, resolve
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")
_HUB_TIMEOUT_SECONDS = 10.0
_VALIDATION = 0.05  # share of the documents
_TEXT_TYPES = ("string", "large_string", "null")


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and to validate on, with a column ``text`` each.

    Attributes:
        name: The ``--data`` argument, for messages.
        train: At least one document.
        validation: At least one document.
    """

    name: str
    train: Dataset
    validation: Dataset


def load_text(spec: str | Source | None, *, text_column: str = "text") -> Corpus:
    """Load a corpus of text and split it into training and validation documents.

    A text file is one document, and so is a row of a table. A dataset's own validation or test
    split is used. Of any other corpus 5 % of the documents are for validation, by the hash of the
    text (in the standard library, of the path); a single document is split near its end.

    Args:
        spec: The ``--data`` argument, or its `Source`.
        text_column: Column of a table that holds the text.

    Raises:
        DataError: The data is missing, empty, unreadable, has no such column, or is Megatron data.
    """
    source = spec if isinstance(spec, Source) else resolve(spec)
    train, validation = _load_columns(source, "--data", text_column)
    if validation is not None:
        return Corpus(
            source.name, _without_blanks(source, train), _without_blanks(source, validation)
        )
    # Modules of the standard library stay on their side when a version of Python changes them.
    keys = train["name"] if source.kind is Kind.DEFAULT else iterate_texts(train)
    first, second = split_indices(keys, _VALIDATION, name=source.name)
    if not second:
        return _split_one(source.name, str(train[first[0]]["text"]))
    train = train.select_columns(["text"])
    return Corpus(source.name, train.select(first), train.select(second))


def load_texts_to_build(source: Source, *, text_column: str = "text") -> Dataset:
    """Load all documents of a source, none held back.

    Raises:
        DataError: The data is missing, unreadable, has no such column, has several splits, or is
            Megatron data.
    """
    documents, validation = _load_columns(source, "INPUT", text_column)
    if validation is not None:
        reason = "the dataset has a training and a validation split"
        raise DataError("INPUT", source.name, reason, "Save the split that you mean by itself")
    return documents


def _load_columns(source: Source, option: str, column: str) -> tuple[Dataset, Dataset | None]:
    if source.kind is Kind.MEGATRON:
        reason = "Megatron data holds tokens, not text"
        raise DataError(option, source.name, reason, "Give text, or use it where tokens are read")
    if source.kind is Kind.DEFAULT:
        return read_stdlib(), None
    parts = load_rows(source)
    train, validation = (
        None if rows is None else _only_text(source, rows, column) for rows in parts
    )
    assert train is not None
    return train, validation


def _only_text(source: Source, rows: Dataset, column: str) -> Dataset:
    if source.kind is Kind.TEXT:
        column = "text"
    check_text_column(source, rows, column)
    rows = rows.select_columns([column])
    return rows if column == "text" else rows.rename_column(column, "text")


def iterate_texts(documents: Dataset) -> Iterator[str | None]:
    """Yield the column ``text`` in order; a missing value is None."""
    for batch in documents.select_columns(["text"]).iter(batch_size=1000):
        yield from batch["text"]


def _without_blanks(source: Source, rows: Dataset) -> Dataset:
    filled = [i for i, text in enumerate(iterate_texts(rows)) if text and text.strip()]
    if not filled:
        reason = "a split of the dataset is empty: it holds no text besides blanks"
        raise DataError("--data", source.name, reason, "Give a dataset that holds text")
    return rows.select(filled)


def hash_fraction(key: str) -> float:
    """Map a text to a number in [0, 1) that is the same on every machine."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6]) / 2**48


def split_indices(
    keys: Iterable[str | None], fraction: float, *, name: str
) -> tuple[list[int], list[int]]:
    """Split documents by the hash of a key, usually their text.

    Equal keys always fall on the same side, and a document keeps its side when others are added.
    Blank keys are on neither side.

    Returns:
        Ascending indices of the training and of the validation documents. The second list is empty
        only if there is a single document.

    Raises:
        DataError: There is no text at all.
    """
    fractions = {i: hash_fraction(key) for i, key in enumerate(keys) if key and key.strip()}
    if not fractions:
        reason = "the corpus is empty: it holds no text besides blanks"
        raise DataError("--data", name, reason, "Give files that hold text")
    if len(fractions) == 1:
        return list(fractions), []
    chosen = {i for i, value in fractions.items() if value < fraction}
    if not chosen:
        chosen = {i for i, value in fractions.items() if value == min(fractions.values())}
    if len(chosen) == len(fractions):
        chosen -= {i for i, value in fractions.items() if value == max(fractions.values())}
    if not chosen:  # all documents are equal
        chosen = {max(fractions)}
    return [i for i in fractions if i not in chosen], sorted(chosen)


def _split_one(name: str, text: str) -> Corpus:
    """Split the only document by position, at a line end within half a share of the position."""
    from datasets import Dataset

    first = len(text) - len(text.lstrip()) + 1  # neither part may be blank
    last = len(text.rstrip()) - 1
    if first > last:
        reason = f"a single document of {len(text)} characters cannot be split for evaluation"
        raise DataError("--data", name, reason, "Give more text")
    target = min(max(int(len(text) * (1.0 - _VALIDATION)), first), last)
    around = (text.rfind("\n", first, target) + 1, text.find("\n", target, last) + 1)
    reach = len(text) * _VALIDATION / 2
    near = [end for end in around if first <= end <= last and abs(end - target) <= reach]
    cut = min(near, key=lambda end: abs(end - target), default=target)
    train, validation = (Dataset.from_dict({"text": [part]}) for part in (text[:cut], text[cut:]))
    return Corpus(name, train, validation)


def load_rows(source: Source) -> tuple[Dataset, Dataset | None]:
    """Read text files or a table by ``datasets``.

    Returns:
        The training rows, and the rows of a validation or test split if the dataset has one.

    Raises:
        DataError: The files cannot be parsed, or the dataset cannot be found or reached.
    """
    import datasets

    if source.kind is Kind.HUB:
        _check_reachable(source)
    try:
        loaded = _load(source)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, StopIteration) as error:
        cause = error.__cause__ or error
        detail = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        reason = f"the data cannot be read as {source.kind}: {detail}"
        remedy = "Check that every file has the format and the columns of the others"
        if isinstance(cause, UnicodeDecodeError):
            remedy = "Convert the files to UTF-8"
        raise DataError("--data", source.name, reason, remedy) from error
    return _choose_splits(source, loaded)


def _load(source: Source) -> Dataset | DatasetDict:
    import datasets

    if source.kind is Kind.HUB:
        return datasets.load_dataset(source.dataset, source.config)
    if source.kind is Kind.SAVED:
        return datasets.load_from_disk(str(source.files[0]))
    options: dict[str, Any] = {}
    if source.kind is Kind.TEXT:
        options["sample_by"] = "document"
    if source.kind in (Kind.CSV, Kind.TSV):
        options["keep_default_na"] = False  # the word "null" is text
    if source.kind is Kind.CSV:
        for file in source.files:
            _check_width(source, file)
    if source.kind is Kind.TSV:
        options |= {"sep": "\t", "quoting": csv.QUOTE_NONE}
    files = [str(file) for file in source.files]
    builder = Kind.CSV if source.kind is Kind.TSV else source.kind
    return datasets.load_dataset(builder.value, data_files=files, split="train", **options)


def _check_width(source: Source, path: Path) -> None:
    """Refuse a first row wider than the header: pandas would take its first fields for an index."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            header, row = islice(chain(csv.reader(file), ([], [])), 2)
        except csv.Error:  # pandas describes it
            return
    if len(row) > len(header):
        reason = f"the first row of {path.name} has {len(row)} fields, its header {len(header)}"
        raise DataError("--data", source.name, reason, "Put texts with commas in quotes")


def _check_reachable(source: Source) -> None:
    # load_dataset would retry for half a minute before it says the same.
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    remedy = "Check the name, or give local files"
    try:
        HfApi().dataset_info(str(source.dataset), timeout=_HUB_TIMEOUT_SECONDS)
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = "neither a local file nor a dataset of the Hugging Face Hub has this name"
        raise DataError("--data", source.name, reason, remedy) from error
    except Exception as error:  # the HTTP library's errors share no public base
        reason = (
            f"no local file has this name, and the Hugging Face Hub cannot be reached ({error})"
        )
        remedy += "; set HF_HUB_OFFLINE=1 to use a copy that was downloaded before"
        raise DataError("--data", source.name, reason, remedy) from error


def _choose_splits(source: Source, loaded: Dataset | DatasetDict) -> tuple[Dataset, Dataset | None]:
    import datasets

    if not isinstance(loaded, datasets.DatasetDict):
        return loaded, None
    names = list(loaded)
    if "train" not in loaded and len(names) != 1:
        reason = f"the dataset has no split 'train' but {', '.join(map(repr, names))}"
        raise DataError("--data", source.name, reason, "Save the split that you mean by itself")
    train = loaded["train" if "train" in loaded else names[0]]
    validation = next((loaded[name] for name in _VALIDATION_SPLITS if name in loaded), None)
    return train, None if validation is train else validation


def check_text_column(source: Source, dataset: Dataset, column: str, *others: str) -> None:
    """Refuse a table that lacks a column, or whose text column does not hold text.

    Raises:
        DataError: Names the columns that exist, or the column's type.
    """
    for name in (column, *others):
        if name not in dataset.column_names:
            existing = ", ".join(map(repr, dataset.column_names))
            reason = f"there is no column {name!r}"
            raise DataError("--data", source.name, reason, f"The columns are {existing}")
    dtype = getattr(dataset.features[column], "dtype", "nested")
    if dtype not in _TEXT_TYPES:
        reason = f"the column {column!r} holds {dtype}, not text"
        raise DataError("--data", source.name, reason, "Name a column of text")
