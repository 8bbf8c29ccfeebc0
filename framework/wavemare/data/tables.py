# SPDX-License-Identifier: Apache-2.0
"""Tables with text columns, read by the ``datasets`` library."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavemare.data.documents import Document, ReadDocuments
from wavemare.data.specs import Kind, Source
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

__all__ = ["ColumnDocuments", "check_columns", "load_splits"]

_HELD_OUT_SPLITS = ("validation", "valid", "dev", "test")
_HUB_TIMEOUT_SECONDS = 10.0
_TEXT_TYPES = ("string", "large_string", "null")


class ColumnDocuments(ReadDocuments):
    """The text column of a dataset as documents."""

    def __init__(self, dataset: Dataset, column: str, name: str) -> None:
        self._dataset = dataset.select_columns([column])
        self._column = column
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset)

    def read(self, index: int) -> Document:
        """Return the text of a row."""
        return Document(f"{self._name}[{index}]", self._dataset[index][self._column])

    def __iter__(self) -> Iterator[Document]:
        for i, text in enumerate(self.texts()):
            yield Document(f"{self._name}[{i}]", text or "")

    def texts(self) -> Iterator[str | None]:
        """Yield the column's texts in order; a missing value is None."""
        for batch in self._dataset.iter(batch_size=1000):
            yield from batch[self._column]

    def select(self, indices: Sequence[int]) -> ColumnDocuments:
        """Return the documents at these rows."""
        return ColumnDocuments(self._dataset.select(indices), self._column, self._name)


def load_splits(source: Source, cache_dir: Path | None = None) -> tuple[Dataset, Dataset | None]:
    """Read a table.

    Args:
        source: A source of a kind that ``datasets`` reads.
        cache_dir: Where ``datasets`` keeps its Arrow files; None is its own default.

    Returns:
        The rows to train on, and the rows of a validation or test split if the dataset has one.

    Raises:
        DataError: The files cannot be parsed, or the dataset cannot be found or reached.
    """
    import datasets

    if source.kind is Kind.HUB:
        _check_reachable(source)
    try:
        loaded = _load(source, cache_dir)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, StopIteration) as error:
        cause = error.__cause__ or error
        detail = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        reason = f"the data cannot be read as {source.kind}: {detail}"
        remedy = "Check that every file has the format and the columns of the others"
        raise DataError("--data", source.name, reason, remedy) from error
    return _choose_splits(source, loaded)


def _load(source: Source, cache_dir: Path | None) -> Dataset | DatasetDict:
    import datasets

    cache = None if cache_dir is None else str(cache_dir)
    if source.kind is Kind.HUB:
        return datasets.load_dataset(source.dataset, source.config, cache_dir=cache)
    if source.kind is Kind.SAVED:
        return datasets.load_from_disk(str(source.files[0]))
    options: dict[str, Any] = {}
    if source.kind in (Kind.CSV, Kind.TSV):
        options["keep_default_na"] = False  # the word "null" is text
    if source.kind is Kind.CSV:
        for file in source.files:
            _check_width(source, file)
    if source.kind is Kind.TSV:
        options |= {"sep": "\t", "quoting": csv.QUOTE_NONE}
        options |= _names_if_headerless(source.files[0])
    files = [str(file) for file in source.files]
    builder = Kind.CSV if source.kind is Kind.TSV else source.kind
    return datasets.load_dataset(
        builder.value, data_files=files, split="train", cache_dir=cache, **options
    )


def _check_width(source: Source, path: Path) -> None:
    """Refuse a first row wider than the header: pandas would take its first fields for an index."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        try:
            header, row = islice(chain(csv.reader(file), ([], [])), 2)
        except csv.Error:  # which pandas will describe
            return
    if len(row) > len(header):
        reason = f"the first row of {path.name} has {len(row)} fields, its header {len(header)}"
        raise DataError("--data", source.name, reason, "Put texts with commas in quotes")


def _names_if_headerless(path: Path) -> dict[str, Any]:
    """Recognise a sentence-and-label file without a header: its first label is a number."""
    with path.open(encoding="utf-8", errors="replace") as file:
        fields = file.readline().rstrip("\r\n").split("\t")
    if len(fields) == 2 and fields[1].strip().lstrip("-").isdigit():  # noqa: PLR2004
        return {"names": ["text", "label"], "header": None}
    return {}


def _check_reachable(source: Source) -> None:
    # load_dataset would retry for half a minute before it says the same.
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        return
    name = str(source.dataset)
    remedy = "Check the name, or give local files"
    try:
        HfApi().dataset_info(name, timeout=_HUB_TIMEOUT_SECONDS)
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
    held_out = next((loaded[name] for name in _HELD_OUT_SPLITS if name in loaded), None)
    return train, None if held_out is train else held_out


def check_columns(
    source: Source, dataset: Dataset, *columns: str, text_columns: Sequence[str] = ()
) -> None:
    """Refuse a table that lacks a column, or whose text column holds something else.

    Raises:
        DataError: Names the columns that exist, or the column's type.
    """
    for column in columns:
        if column not in dataset.column_names:
            existing = ", ".join(map(repr, dataset.column_names))
            reason = f"there is no column {column!r}"
            raise DataError("--data", source.name, reason, f"The columns are {existing}")
    for column in text_columns:
        dtype = getattr(dataset.features[column], "dtype", "nested")
        if dtype not in _TEXT_TYPES:
            reason = f"the column {column!r} holds {dtype}, not text"
            raise DataError("--data", source.name, reason, "Name a column of text")
