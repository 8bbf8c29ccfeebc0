# SPDX-License-Identifier: Apache-2.0
"""Local texts and tables: files whose names are taken literally, and the columns that are used.

The packaged readers of ``datasets`` take names for patterns and URLs, and read all columns, which
must then agree in all rows and files.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, dropwhile, islice
from pathlib import Path
from typing import Any, TextIO

import pandas
import pyarrow
from pyarrow import parquet

from wavemare.data.sources import Kind, Source
from wavemare.errors import DataError
from wavemare.files import say_what_is_wrong, without_duplicates

_SEPARATORS: dict[Kind, dict[str, Any]] = {
    Kind.CSV: {},
    Kind.TSV: {"sep": "\t", "quoting": csv.QUOTE_NONE},
}
_ROWS = 1000
"""Rows of a table in a part."""
_CHARACTERS = 1 << 23
"""Characters of JSON in a part, about."""
_FIRST_ROWS = 1000
"""Rows of a JSON file that say which columns there are."""
_ROW = json.JSONDecoder(object_pairs_hook=without_duplicates)
_LIST_CHARACTERS = 1 << 20
_LIST_MARK = re.compile(r"\s*(,)?\s*")
_UNLIKE = (pyarrow.null(), pyarrow.large_string())


def read_tables(
    kind: Kind, file: str, columns: Sequence[str], texts: Sequence[str]
) -> Iterator[pyarrow.Table]:
    """Yield a file in parts.

    Args:
        kind: A kind of local files.
        file: Of it.
        columns: That are read; of a text file ``text``.
        texts: Those of them that hold text, whatever it looks like.

    Raises:
        Exception: Of any kind, that of the reader.
    """
    for table in _READERS[kind](kind, Path(file), columns, texts):
        table.validate(full=True)  # of texts, that they are UTF-8
        # A part in which all values are missing has the type of the others.
        fields = [
            field.with_type(pyarrow.string())
            if field.name in texts and field.type in _UNLIKE
            else field
            for field in table.schema
        ]
        yield table.cast(pyarrow.schema(fields))


def column_names(source: Source) -> list[str]:
    """Return the columns of the first file, which have names in its header or its first rows.

    Raises:
        DataError: A row of JSON is wrong, or the first row of a CSV file is wider than its header.
        Exception: Of any kind, that of the reader.
    """
    file = source.files[0]
    if source.kind is Kind.TEXT:
        return ["text"]
    if source.kind is Kind.JSON:
        rows = islice(read_json_rows(file), _FIRST_ROWS)
        return list(dict.fromkeys(name for row in rows for name in row))
    if source.kind is Kind.PARQUET:
        return list(parquet.read_schema(file).names)
    if source.kind is Kind.CSV:
        for each in source.files:
            _check_width(source, each)
    return list(_read_csv(source.kind, file, nrows=1).columns)


def read_json_rows(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of JSON lines, or of one list of objects; a bare text is a row with ``text``.

    Raises:
        DataError: A row is no object or no JSON.
    """
    with file.open(encoding="utf-8-sig") as lines:
        sign = " "
        while sign.isspace():
            sign = lines.read(1)
        lines.seek(0)
        if sign == "[":
            yield from _read_json_list(file, lines)
            return
        for number, line in enumerate(dropwhile(str.isspace, lines)):
            try:
                row, end = _ROW.raw_decode(line)
            except (ValueError, RecursionError):
                end = 0
            if end and line[end:] in {"\n", ""}:
                yield _row(file, number, row)
            elif line.strip():
                yield _row(file, number, _parse(file, number, line))


def _parse(file: Path, number: int, text: str) -> Any:
    """Parse the JSON of a row.

    Raises:
        DataError: It is no JSON.
    """
    try:
        return say_what_is_wrong(partial(json.loads, text, object_pairs_hook=without_duplicates))
    except ValueError as error:
        remedy = "Give one JSON object for each line, or a list of objects"
        raise DataError("--data", str(file), f"in row {number}: {error}", remedy) from None


def _read_json_list(file: Path, rest: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the rows of a list, of which a part is in memory at a time."""
    text, number, size = rest.read(_LIST_CHARACTERS), 0, _LIST_CHARACTERS
    at = text.find("[") + 1
    while True:
        mark = _LIST_MARK.match(text, at)
        try:
            if mark is None or (mark[1] is None) != (number == 0):
                raise ValueError
            row, end = _ROW.raw_decode(text, mark.end())
            if end == len(text):  # what ends it, or more of it, may follow
                raise ValueError
        except (ValueError, RecursionError):
            more = rest.read(size)
            if not more:
                break
            text, at, size = text[at:] + more, 0, 2 * size
            continue
        yield _row(file, number, {"text": row} if isinstance(row, str) else row)
        at, number, size = end, number + 1, _LIST_CHARACTERS
    if not re.fullmatch(r"\s*\]\s*", text[at:]):  # the parser says what is wrong
        for row in _parse(file, 0, file.read_text(encoding="utf-8-sig"))[number:]:
            yield _row(file, number, row)


def _row(file: Path, number: int, row: Any) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    reason = f"row {number} is no object but {type(row).__name__}"
    raise DataError("--data", str(file), reason, 'Give rows such as {"text": "..."}')


def _read_csv(kind: Kind, file: Path, **options: Any) -> Any:
    # The word "null" is text.
    settings = {"keep_default_na": False, "encoding": "utf-8-sig", **_SEPARATORS[kind]}
    return pandas.read_csv(file, **settings, **options)


def _check_width(source: Source, path: Path) -> None:
    """Refuse a first row wider than the header: pandas would take its first fields for an index."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        try:
            header, row = islice(chain(csv.reader(file), ([], [])), 2)
        except csv.Error:  # pandas describes it
            return
    if len(row) > len(header):
        reason = f"the first row of {path.name} has {len(row)} fields, its header {len(header)}"
        raise DataError("--data", source.name, reason, "Put texts with commas in quotes")


def _text_tables(_: Kind, file: Path, *__: Sequence[str]) -> Iterator[pyarrow.Table]:
    # Not as Python's text, which takes up to four times the bytes.
    text = file.read_bytes().removeprefix(codecs.BOM_UTF8)
    if b"\r" in text:
        text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    try:
        column = pyarrow.array([text], pyarrow.binary()).cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        text.decode()  # says where it is wrong
        raise
    yield pyarrow.table({"text": column})


def _json_tables(
    _: Kind, file: Path, columns: Sequence[str], __: Sequence[str]
) -> Iterator[pyarrow.Table]:
    part: list[list[Any]] = []
    size = 0
    for row in read_json_rows(file):
        values = [row.get(name) for name in columns]
        part.append(values)
        size += sum(len(value) for value in values if isinstance(value, str))
        if len(part) == _ROWS or size > _CHARACTERS:
            yield _columns_of(part, columns)
            part, size = [], 0
    if part:
        yield _columns_of(part, columns)


def _columns_of(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> pyarrow.Table:
    return pyarrow.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))


def _csv_tables(
    kind: Kind, file: Path, columns: Sequence[str], texts: Sequence[str]
) -> Iterator[pyarrow.Table]:
    options = {"usecols": list(columns), "dtype": dict.fromkeys(texts, str)}
    for part in _read_csv(kind, file, chunksize=_ROWS, **options):
        yield pyarrow.Table.from_pandas(part[list(columns)], preserve_index=False)


def _parquet_tables(
    _: Kind, file: Path, columns: Sequence[str], __: Sequence[str]
) -> Iterator[pyarrow.Table]:
    with parquet.ParquetFile(file) as opened:
        for part in opened.iter_batches(_ROWS, columns=list(columns)):
            yield pyarrow.Table.from_batches([part]).select(list(columns))


_Reader = Callable[[Kind, Path, Sequence[str], Sequence[str]], Iterator[pyarrow.Table]]
_READERS: dict[Kind, _Reader] = {
    Kind.TEXT: _text_tables,
    Kind.JSON: _json_tables,
    Kind.CSV: _csv_tables,
    Kind.TSV: _csv_tables,
    Kind.PARQUET: _parquet_tables,
}
