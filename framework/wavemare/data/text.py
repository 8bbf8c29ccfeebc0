# SPDX-License-Identifier: Apache-2.0
"""Texts by the ``datasets`` library: any source becomes a dataset with the column ``text``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wavemare.data.sources import Kind, Source, read_stdlib, resolve, stdlib_files
from wavemare.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

_VALIDATION_SPLITS = ("validation", "valid", "dev", "test")
_HUB_TIMEOUT_SECONDS = 10.0
_TEXT_BYTES, _TEXT_ROWS = 1 << 23, 1000
"""Of texts that are read at once."""
_VALIDATION = 0.05  # share of the documents
_TEXT_TYPES = ("string", "large_string", "null")

Columns = Mapping[str, bool]
"""Columns by name, and whether they hold text."""
_Record = dict[str, Any]


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
    if not len(second):
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
    column = "text" if source.kind is Kind.TEXT else column
    train, validation = load_rows(source, {column: True})
    if column == "text":
        return train, validation
    if validation is not None:
        validation = validation.rename_column(column, "text")
    return train.rename_column(column, "text"), validation


def iterate_texts(documents: Dataset) -> Iterator[str | None]:
    """Yield the column ``text`` in order, some megabytes at a time; a missing value is None."""
    texts = documents.select_columns(["text"])
    average = texts.data.nbytes // max(texts.data.num_rows, 1)
    rows = min(max(_TEXT_BYTES // (average + 1), 1), _TEXT_ROWS)
    for batch in texts.iter(batch_size=rows):
        yield from batch["text"]


def _without_blanks(source: Source, rows: Dataset) -> Dataset:
    filled = np.flatnonzero([bool(text and text.strip()) for text in iterate_texts(rows)])
    if not len(filled):
        reason = "a split of the dataset is empty: it holds no text besides blanks"
        raise DataError("--data", source.name, reason, "Give a dataset that holds text")
    return rows.select(filled)


def hash_fraction(key: str) -> float:
    """Map a text to a number in [0, 1) that is the same on every machine."""
    from wavemare.data.tokenizer import utf8_pieces

    digest = hashlib.sha256()
    for piece in utf8_pieces(key):
        digest.update(piece)
    return int.from_bytes(digest.digest()[:6]) / 2**48


def split_indices(
    keys: Iterable[str | None], fraction: float, *, name: str
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Split documents by the hash of a key, usually their text.

    Equal keys always fall on the same side, and a document keeps its side when others are added.
    Blank keys are on neither side.

    Returns:
        Ascending indices of the training and of the validation documents, int64. The second array
        is empty only if there is a single document.

    Raises:
        DataError: There is no text at all.
    """
    # 8 bytes for each document; 2 for a blank one.
    found = (hash_fraction(key) if key and key.strip() else 2.0 for key in keys)
    fractions = np.fromiter(found, dtype=np.float64)
    filled = np.flatnonzero(fractions <= 1)
    if not len(filled):
        reason = "the corpus is empty: it holds no text besides blanks"
        raise DataError("--data", name, reason, "Give files that hold text")
    if len(filled) == 1:
        return filled, filled[:0]
    fractions = fractions[filled]
    chosen = fractions < fraction
    if not chosen.any():
        chosen = fractions == fractions.min()
    if chosen.all():
        chosen = fractions != fractions.max()
    if not chosen.any():  # all documents are equal
        chosen[-1] = True
    return filled[~chosen], filled[chosen]


def _split_one(name: str, text: str) -> Corpus:
    """Split the only document by position, at a line end within half a share of the position."""
    from datasets import Dataset
    from datasets.fingerprint import generate_random_fingerprint as random_fingerprint
    from datasets.table import InMemoryTable

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
    train, validation = (
        # Without a fingerprint datasets would pickle the whole text for one.
        Dataset(InMemoryTable.from_pydict({"text": [part]}), fingerprint=random_fingerprint())
        for part in (text[:cut], text[cut:])
    )
    return Corpus(name, train, validation)


def load_rows(
    source: Source, *choices: Columns, optional: Sequence[str] = ()
) -> tuple[Dataset, Dataset | None]:
    """Read the columns that are used, of text files or a table, by ``datasets``.

    Args:
        source: The data.
        choices: Sets of columns. The first set of which the data has all columns is read.
        optional: Columns that are read, too, if the data has them.

    Returns:
        The training rows, and the rows of a validation or test split if the dataset has one.

    Raises:
        DataError: The files cannot be parsed, the dataset cannot be found or reached, or it lacks
            a column or its text.
    """
    if source.kind is Kind.HUB:
        _check_reachable(source)
    with one_error(source):
        parts = _choose_splits(source, _load(source, choices, optional))
        train, validation = (
            None if part is None else _only_columns(source, part, choices, optional)
            for part in parts
        )
    assert train is not None
    return train, validation


def load_records(source: Source, *choices: Columns) -> tuple[list[_Record], list[_Record] | None]:
    """Read all rows into memory; see `iterate_records`."""
    parts = [list(iterate_records(source, part, *choices)) for part in (0, 1)[: _parts(source)]]
    return parts[0], parts[1] if parts[1:] else None


def has_validation(source: Source) -> bool:
    """Whether a dataset has a validation or test split."""
    return _parts(source) > 1


def _parts(source: Source) -> int:
    if source.kind not in (Kind.HUB, Kind.SAVED):
        return 1
    with one_error(source):
        return 1 if _choose_splits(source, _load(source, ()))[1] is None else 2


def iterate_records(
    source: Source, part: int, *choices: Columns, optional: Sequence[str] = ()
) -> Iterator[_Record]:
    """Yield the columns that are used, row by row; see `load_rows`.

    Values of JSON are what the file says, and may differ in form from row to row. A class label is
    its name.

    Args:
        source: The data.
        part: 0 for the training rows, 1 for those of a validation or test split.
        choices: Sets of columns, as of `load_rows`.
        optional: Further columns, as of `load_rows`. Of JSON, any row may have them.
    """
    if source.kind is Kind.JSON:
        yield from _json_records(source, choices, optional)
        return
    table = load_rows(source, *choices, optional=optional)[part]
    assert table is not None
    names: dict[str, Any] = {  # of a datasets.ClassLabel
        column: feature.names
        for column, feature in table.features.items()
        if getattr(feature, "names", None) is not None
    }
    for record in table:
        for column, labels in names.items():
            label = record[column]
            known = label is not None and 0 <= label < len(labels)
            record[column] = labels[label] if known else None
        yield {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: Any) -> Any:
    """Leave out fields of objects that only other rows have: a column of a table has one type."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _json_records(
    source: Source, choices: Sequence[Columns], optional: Sequence[str]
) -> Iterator[_Record]:
    from wavemare.data.tables import column_names, read_json_rows

    with one_error(source):
        # A column that only some rows have may begin behind those that name the columns.
        columns = {
            **_choose(source, column_names(source), choices),
            **dict.fromkeys(optional, False),
        }
        rows = (row for file in source.files for row in read_json_rows(file))
        for number, row in enumerate(rows):
            record = {name: row.get(name) for name in columns}
            json.dumps(record, ensure_ascii=False).encode()  # half a character has no bytes
            for name, value in record.items():
                if columns[name] and not isinstance(value, str | None):
                    reason = f"the column {name!r} of row {number} holds {value!r}, not text"
                    raise DataError("--data", source.name, reason, "Put it in quotes")
            yield record


def source_key(source: Source) -> str:
    """Return what tells data from other data, without reading it where it lies in files.

    Files are known by path, size and time of their last change.

    Raises:
        DataError: A dataset of the Hub cannot be found or reached, or a file cannot be looked at.
    """
    if source.kind is Kind.HUB:
        _check_reachable(source)
        with one_error(source):
            loaded: Any = _load(source, ())
            splits = loaded.values() if isinstance(loaded, dict) else [loaded]
            return repr([source.dataset, source.config, *(split._fingerprint for split in splits)])
    files = stdlib_files() if source.kind is Kind.DEFAULT else source.files
    if source.kind is Kind.SAVED:
        files = [file for file in sorted(source.files[0].rglob("*")) if file.is_file()]
    with one_error(source):
        stats = [(str(file.absolute()), file.stat()) for file in files]
    return repr([source.kind.value, *((name, s.st_size, s.st_mtime_ns) for name, s in stats)])


@contextmanager
def one_error(source: Source) -> Iterator[None]:
    """Raise a `DataError` for whatever a reader says about the data."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        import datasets  # half a second, of which a start without an error needs nothing
        from pyarrow import ArrowException

        readers = (datasets.exceptions.DatasetsError, ArrowException)
        if not isinstance(error, (*readers, OSError, ValueError, StopIteration)):
            raise
        cause = error.__cause__ or error
        if isinstance(cause, DataError):
            raise cause from None
        cache = Path(datasets.config.HF_DATASETS_CACHE)
        if isinstance(cause, OSError) and cause.filename in map(str, (cache, *cache.parents)):
            reason = f"datasets keeps what it reads there, and cannot write it ({cause.strerror})"
            remedy = "Set HF_HOME to a folder that can be written"
            raise DataError("HF_HOME", str(cache), reason, remedy) from error
        detail = (str(cause).strip() or type(cause).__name__).splitlines()[0].rstrip(".")
        reason = f"the data cannot be read as {source.kind}: {detail}"
        remedy = "Check that every file has the format and the columns of the others"
        if isinstance(cause, UnicodeError) or "UTF8" in detail:
            remedy = "Convert the files to UTF-8"
        raise DataError("--data", source.name, reason, remedy) from error


def _load(
    source: Source, choices: Sequence[Columns], optional: Sequence[str] = ()
) -> Dataset | DatasetDict:
    import datasets

    if source.kind is Kind.HUB:
        return datasets.load_dataset(source.dataset, source.config)
    if source.kind is Kind.SAVED:
        return datasets.load_from_disk(str(source.files[0]))
    from wavemare.data.builder import read_table
    from wavemare.data.tables import column_names

    names = column_names(source)
    others = (replace(source, files=(file,)) for file in source.files[1:] if optional)
    # One that only later files have is not left out: reading says that the files differ.
    names += [name for each in others for name in column_names(each) if name in optional]
    columns = _choose(source, names, choices, optional)
    texts = [name for name in columns if columns[name] or name in optional]
    return read_table(source, list(columns), texts)


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


def _choose(
    source: Source,
    names: Sequence[str],
    choices: Sequence[Columns],
    optional: Sequence[str] = (),
) -> Columns:
    """Return the first set of columns that the data has, and those of the others that it has."""
    missing = [[name for name in columns if name not in names] for columns in choices]
    for columns, lacking in zip(choices, missing, strict=True):
        if not lacking:
            return {**columns, **dict.fromkeys([n for n in optional if n in names], False)}
    nearest = min(missing, key=len)
    existing = ", ".join(map(repr, names))
    wanted = ", or ".join(" and ".join(columns) for columns in choices)
    remedy = f"The columns are {existing}; give {wanted}"
    raise DataError("--data", source.name, f"there is no column {nearest[0]!r}", remedy)


def _only_columns(
    source: Source, rows: Dataset, choices: Sequence[Columns], optional: Sequence[str]
) -> Dataset:
    """Select the columns that are used, and refuse those that do not hold the text they should."""
    columns = _choose(source, rows.column_names, choices, optional)
    for name, is_text in columns.items():
        dtype = getattr(rows.features[name], "dtype", "nested")
        if is_text and dtype not in _TEXT_TYPES:
            reason = f"the column {name!r} holds {dtype}, not text"
            raise DataError("--data", source.name, reason, "Name a column of text")
        for part in rows.data.column(name).chunks:
            part.validate(full=True)  # of texts, that they are UTF-8
    return rows.select_columns(list(columns))
