# SPDX-License-Identifier: Apache-2.0
"""Rows to fine-tune on: chats, prompts with completions, or texts; read, formatted and packed."""

from __future__ import annotations

import json
import os
import re
import shutil
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from wavemare.data.encode import definition_of
from wavemare.data.indexed import IndexedData, IndexedWriter, open_indexed
from wavemare.data.row_format import CHAT_COLUMNS, IGNORED, Row, RowFormat
from wavemare.data.sources import Kind, Source, read_stdlib
from wavemare.data.text import (
    has_validation,
    iterate_records,
    one_error,
    source_key,
    split_indices,
)
from wavemare.data.tokenizer import build_once, content_key
from wavemare.errors import DataError
from wavemare.files import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


FATES = ("whole", "cut", "skipped", "empty")
"""What becomes of a row: kept, cut, left out as too long, left out as nothing in it is trained."""
_FORMAT_VERSION = 3  # part of every cache key: raise it when the files or the formatting change
UNENDED = "unended"
"""Counts the rows with an answer whose end is not trained."""
WITHOUT_END = (
    "an answer ends without a special token of the chat template: the model does not learn to stop "
    "there. Let the template write one, such as {{ eos_token }}, inside {% generation %}."
)
UNSAID = "unsaid"
"""Counts the rows of which a template leaves something out."""
LEFT_OUT = (
    "the chat template does not write all that the system or a user says, or a function: the model "
    "does not see it. Name another --chat_template."
)
_BATCH_ROWS = 100
_ROWS_PER_WORKER = 1000  # fewer are formatted sooner than a process starts
_VALIDATION = 0.05
_Iterate = Callable[[Source, int], Iterator[dict[str, Any]]]
"""Yields the rows of a split of some data."""
_DOCUMENTED = re.compile(r'^ *(def \w+\([^\n]*\):)\n +"""(\w[^\n"\\]{8,70}\.)', re.MULTILINE)


class EncodedRows(Sequence[Row]):
    """Formatted rows in a file, which all processes of a host map into their memory.

    The file is indexed data with a sequence for each row. A token that is not trained stands there
    as its complement, below 0.

    Args:
        data: The opened file.
        counts: How many rows there were by what became of them, a word of `FATES`.
        first: The first row that was kept, as it stands in the data.

    Attributes:
        lengths: Tokens of each row, int32 [number of rows].
    """

    def __init__(
        self, data: IndexedData, counts: Mapping[str, int], first: Mapping[str, Any]
    ) -> None:
        self._data = data
        self.lengths = data.lengths
        self.counts = counts
        self.first = first

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        tokens = self._data.tokens[self._data.starts[index] : self._data.starts[index + 1]]
        labels = np.where(tokens < 0, IGNORED, tokens)
        return Row(np.where(tokens < 0, ~tokens, tokens).tolist(), labels.tolist())


def lengths_of(rows: Sequence[Row]) -> NDArray[np.int32]:
    """Return the tokens of each row, int32 [number of rows]."""
    if isinstance(rows, EncodedRows):
        return rows.lengths
    return np.array([len(row.ids) for row in rows], np.int32)


def describe_fates(parts: Sequence[EncodedRows], max_length: int) -> str | None:
    """Say how many rows were too long, had nothing to train, do not end, or lack something.

    Returns:
        None if there is none.
    """
    names = ("rows", *FATES, UNENDED, UNSAID)
    counts = {name: sum(part.counts.get(name, 0) for part in parts) for name in names}
    told = []
    long = counts["cut"] + counts["skipped"]
    if long:
        told.append(
            f"{long:,} of {counts['rows']:,} rows are longer than {max_length} tokens: "
            f"{counts['cut']:,} are cut, {counts['skipped']:,} left out."
        )
    if counts["empty"]:
        told.append(f"In {counts['empty']:,} rows nothing is trained: they are left out.")
    if counts[UNENDED]:
        told.append(f"In {counts[UNENDED]:,} rows {WITHOUT_END}")
    if counts[UNSAID]:
        told.append(f"In {counts[UNSAID]:,} rows {LEFT_OUT}")
    return " ".join(told) or None


def prepare_chats(
    source: Source,
    tokenizer: PreTrainedTokenizerFast,
    max_length: int,
    cache_dir: Path,
    *,
    long_rows: str = "cut",
    workers: int | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    pairs: bool = False,
) -> tuple[EncodedRows, EncodedRows]:
    """Return the rows to train on and to validate on, formatted and tokenized once for each host.

    A validation or test split of the data is used; else 5 % of the rows, chosen by their hash. The
    default data are functions of the standard library, to be completed by their description.

    `RowFormat` says what is trained. Of several processes that call this at once, one formats the
    rows, by several workers, and the others wait. The entry of the cache is named by the data
    (files are known by path, size and time), the tokenizer with its template, and the options.

    Args:
        source: The data.
        tokenizer: With an end token, and a chat template where the rows are chats.
        max_length: Tokens of a row at most.
        cache_dir: Folder of the cache.
        long_rows: ``cut``: of a longer row only the first tokens are read, and it is left out where
            none of these is trained; ``skip``: it is left out.
        workers: Processes that format; by default as many as there are cores.
        template_arguments: What the chat template is given with each chat.
        pairs: Whether the data are preferences. Each becomes two rows, which follow each other, and
            are left out together.

    Raises:
        DataError: The data cannot be read, its columns are unknown, a row has another form, no row
            is left, the tokenizer lacks a chat template or an end token, or the cache cannot be
            written.
    """
    if tokenizer.eos_token_id is None:
        reason = "its tokenizer has no eos_token, with which a turn ends"
        raise DataError("--model", tokenizer.name_or_path, reason, "Add one to it")
    rows = RowFormat(tokenizer, template_arguments)
    own = (
        definition_of(tokenizer),
        str(tokenizer.chat_template),
        str(tokenizer.special_tokens_map),
    )
    given = json.dumps(template_arguments, sort_keys=True)
    kind = "pairs" if pairs else "rows"
    settings = (kind, str(_FORMAT_VERSION), *own, given, str(max_length), long_rows)
    folder = Path(cache_dir) / f"{kind}-{content_key((*settings, source_key(source)))[:32]}"
    iterate, split = iterate_rows, _alone
    if pairs:
        from wavemare.data.preferences import iterate_pairs, sides_of  # which imports this module

        iterate, split = iterate_pairs, sides_of
    encode = partial(_encode_batch, rows=rows, max_length=max_length, mode=long_rows, split=split)
    workers = workers or len(os.sched_getaffinity(0))
    build_once(folder, lambda target: _build_rows(source, target, iterate, encode, workers))
    return _open_rows(folder / "train"), _open_rows(folder / "validation")


def _open_rows(prefix: Path) -> EncodedRows:
    facts = read_json(prefix.with_suffix(".json"), DataError, "--cache", "Remove this folder")
    return EncodedRows(open_indexed(prefix), facts["counts"], facts["first"])


def _build_rows(
    source: Source, target: Path, iterate: _Iterate, encode: Callable[..., Any], workers: int
) -> None:
    scratch = target / "scratch"
    parts = zip(("train", "validation"), read_chats(source, scratch, iterate), strict=True)
    for name, rows in parts:
        encoded = rows.map(
            encode,
            batched=True,
            batch_size=_BATCH_ROWS,
            remove_columns=["row"],
            features=_encoded_features(),
            num_proc=min(workers, len(rows) // _ROWS_PER_WORKER) or None,
            cache_file_name=str(scratch / f"{name}.arrow"),
            new_fingerprint=name,  # hashing the tokenizer would take long
        )
        _write_rows(source, target / name, rows, encoded)
    shutil.rmtree(scratch)


def _encoded_features() -> Any:
    from datasets import Features, Sequence, Value

    flags = {"fate": Value("int8"), UNENDED: Value("bool"), UNSAID: Value("bool")}
    return Features({"tokens": Sequence(Value("int32")), **flags})


def _write_rows(source: Source, prefix: Path, rows: Any, encoded: Any) -> None:
    """Write the rows that are left out of none, and what became of all of them."""
    counts, first, place = Counter[str](), None, 0
    with IndexedWriter(prefix, np.int32) as writer:
        for batch in encoded.with_format("arrow").iter(batch_size=_BATCH_ROWS):
            flags = (batch[name].to_pylist() for name in ("fate", UNENDED, UNSAID))
            for tokens, fate, unended, unsaid in zip(batch["tokens"], *flags, strict=True):
                counts.update([FATES[fate], "rows", *[UNENDED] * unended, *[UNSAID] * unsaid])
                if len(tokens.values):
                    writer.add_sequence(tokens.values.to_numpy())
                    writer.end_document()
                    first = place if first is None else first
                place += 1
        if first is None:
            reason = f"none of the {place} rows for the {prefix.name} part has a trained token"
            remedy = "Give rows with answers, or a larger --sequence_length"
            raise DataError("--data", source.name, reason, remedy)
    each = len(encoded) // len(rows)  # a pair becomes two rows
    facts = {"counts": counts, "first": json.loads(rows[first // each]["row"])}
    prefix.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


def read_chats(source: Source, cache_dir: Path, iterate: _Iterate | None = None) -> tuple[Any, Any]:
    """Return the rows to train on and to validate on, each with one of the known sets of columns.

    Args:
        source: The data.
        cache_dir: Where the rows will lie.
        iterate: Yields the rows of a split; `iterate_rows` if omitted.

    Returns:
        Two ``datasets.Dataset``, which lie in a folder, with the column ``row``: its JSON.

    Raises:
        DataError: The data cannot be read, or its columns are unknown.
    """
    from datasets import Dataset, Features, Value

    def write(part: int) -> Any:
        with one_error(source):
            return Dataset.from_generator(
                _row_texts,
                gen_kwargs={"source": source, "part": part, "iterate": iterate or iterate_rows},
                features=Features({"row": Value("large_string")}),
                cache_dir=str(cache_dir),
                fingerprint=f"part-{part}",
            )

    if has_validation(source):
        return write(0), write(1)
    rows = write(0)
    texts = (text for batch in rows.iter(batch_size=_BATCH_ROWS) for text in batch["row"])
    # The order of a row's keys, which a template may show, does not choose its side.
    keys = (json.dumps(json.loads(text), sort_keys=True) for text in texts)
    first, second = split_indices(keys, _VALIDATION, name=source.name)
    if not len(second):
        reason = "a single row cannot be split for validation"
        raise DataError("--data", source.name, reason, "Give more rows")
    return rows.select(first), rows.select(second)


def _row_texts(source: Source, part: int, iterate: _Iterate) -> Iterator[dict[str, str]]:
    for row in iterate(source, part):
        yield {"row": json.dumps(row, default=str)}


def iterate_rows(source: Source, part: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split: 0 to train on, 1 to validate on.

    A chat has its columns `CHAT_COLUMNS` only where they hold something.

    Raises:
        DataError: The data cannot be read, or its columns are unknown.
    """
    check_kind(source)
    if source.kind is Kind.DEFAULT:
        found = (pair for text in read_stdlib()["text"] for pair in _DOCUMENTED.findall(text))
        for head, line in found:
            yield {"prompt": f'{head}\n    """', "completion": f'{line}"""'}
        return
    # A prompt may be a list of messages, but not where each value is written as text.
    texts = source.kind in (Kind.CSV, Kind.TSV)
    choices = ({"messages": texts}, {"prompt": texts, "completion": texts}, {"text": True})
    records = iterate_records(source, part, *choices, optional=CHAT_COLUMNS)
    for row in optional_columns(records):
        for name in ("prompt", "completion"):
            value = row.get(name)
            if not isinstance(value, str | list | None):
                kind = type(value).__name__
                reason = f"the column {name!r} has a value of the type {kind}"
                remedy = "Write texts, or lists of messages"
                raise DataError("--data", source.name, reason, remedy)
        yield row


def check_kind(source: Source) -> None:
    """Refuse data that has no rows.

    Raises:
        DataError: It is Megatron data.
    """
    if source.kind is Kind.MEGATRON:
        reason = "Megatron data holds tokens, not rows"
        raise DataError("--data", source.name, reason, "Give a .jsonl file")


def optional_columns(records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield rows without those of the columns `CHAT_COLUMNS` that hold nothing."""
    for row in records:
        yield {k: v for k, v in row.items() if v is not None or k not in CHAT_COLUMNS}


def _alone(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row]


def _encode_batch(
    batch: Mapping[str, Sequence[str]],
    rows: RowFormat,
    max_length: int,
    mode: str,
    split: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> dict[str, list[Any]]:
    formatted, fitted = [], []
    for text in batch["row"]:
        parts = [rows.encode(each) for each in split(json.loads(text))]
        fits = [fit_row(each.row, max_length, mode) for each in parts]
        lost = next((fit for fit in fits if not fit[0].ids), None)
        formatted += parts
        fitted += fits if lost is None else [lost] * len(fits)  # they are left out together
    tokens = [
        [i if label != IGNORED else ~i for i, label in zip(*row, strict=True)] for row, _ in fitted
    ]
    return {
        "tokens": tokens,
        "fate": [FATES.index(fate) for _, fate in fitted],
        UNENDED: [each.unended > 0 for each in formatted],
        UNSAID: [bool(each.unsaid) for each in formatted],
    }


def fit_row(row: Row, max_length: int, mode: str = "cut") -> tuple[Row, str]:
    """Return what is left of a row, nothing if it is left out, and its fate."""
    if all(label == IGNORED for label in row.labels):
        return Row([], []), "empty"
    if len(row.ids) <= max_length:
        return row, "whole"
    cut = Row(row.ids[:max_length], row.labels[:max_length])
    if mode == "skip" or all(label == IGNORED for label in cut.labels):
        return Row([], []), "skipped"
    return cut, "cut"


def encode_row(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast) -> Row:
    """Format and tokenize a row, as `RowFormat` does.

    Raises:
        DataError: It has another form, or it is a chat and the tokenizer lacks a template.
    """
    return RowFormat(tokenizer).encode(row).row


def mark_trained(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a row's text with its trained tokens in »«."""
    parts = groupby(zip(*row, strict=True), key=lambda pair: pair[1] != IGNORED)
    texts = ((trained, tokenizer.decode([i for i, _ in pairs])) for trained, pairs in parts)
    return "".join(f"»{text}«" if trained else str(text) for trained, text in texts)


def pack(lengths: Sequence[int], max_length: int) -> list[list[int]]:
    """Return the rows of each sample: the longest first, each where it leaves the least room."""
    packed: list[list[int]] = []
    room: list[tuple[int, int]] = []  # in each sample that is not full, ascending
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        place = bisect_left(room, (lengths[row], -1))
        left, sample = room.pop(place) if place < len(room) else (max_length, len(packed))
        if sample == len(packed):
            packed.append([])
        packed[sample].append(row)
        if left > lengths[row]:
            insort(room, (left - lengths[row], sample))
    return packed


class ChatSamples(Dataset[dict[str, torch.Tensor]]):
    """Samples of one length: a row each, or several whose positions begin anew.

    A sample has ``input_ids``; ``trained``, which is true where a token is to be learned; and with
    ``positions`` also ``position_ids``. Models with masks by position (``position_ids`` without
    ``attention_mask``) attend within a row alone. What fills up a sample is a row of its own, of
    which nothing is trained.

    Args:
        rows: Formatted rows.
        max_length: Tokens of a sample.
        fill: Token that fills up.
        packs: Whether to put several rows into a sample.
        positions: Whether to give ``position_ids``.
        chosen: The places of the rows that are used; None for all rows.

    Raises:
        DataError: A row is longer than a sample.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        max_length: int,
        fill: int,
        *,
        packs: bool,
        positions: bool,
        chosen: Sequence[int] | None = None,
    ) -> None:
        known = lengths_of(rows)
        used = range(len(rows)) if chosen is None else chosen
        lengths = [int(known[i]) for i in used]
        if max(lengths, default=0) > max_length:
            reason = f"a row has {max(lengths)} tokens, more than a sample"
            raise DataError("max_length", max_length, reason, "Give more, or cut the row: fit_row")
        self._rows, self._length, self._fill = rows, max_length, fill
        groups = pack(lengths, max_length) if packs else [[i] for i in range(len(used))]
        self._packed = [[used[i] for i in group] for group in groups]
        self._positions = positions

    def fill_up(self, multiple: int) -> None:
        """Add samples without a row, so that their number is a multiple of this one."""
        self._packed += [[] for _ in range(-len(self) % multiple)]

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = [self._rows[i] for i in self._packed[index]]
        rest = self._length - sum(len(row.ids) for row in rows)
        rows.append(Row([self._fill] * rest, [IGNORED] * rest))
        sample = {
            "input_ids": torch.tensor([i for row in rows for i in row.ids]),
            "trained": torch.tensor([label != IGNORED for row in rows for label in row.labels]),
        }
        if self._positions:
            sample["position_ids"] = torch.cat([torch.arange(len(row.ids)) for row in rows])
        return sample


def last_question(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    template_arguments: Mapping[str, Any] | None = None,
) -> str:
    """Return what the assistant is asked by a row: all before its last answer."""
    return RowFormat(tokenizer, template_arguments).question(row)
