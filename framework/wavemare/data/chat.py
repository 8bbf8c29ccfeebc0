# SPDX-License-Identifier: Apache-2.0
"""Rows to fine-tune on: chats, prompts with completions, or texts; formatted, masked and packed."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset

from wavemare.data.sources import Kind, Source, read_stdlib
from wavemare.data.text import load_records, split_indices
from wavemare.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


_COLUMNS = ({"messages": False}, {"prompt": True, "completion": True}, {"text": True})
_IGNORED = -100
_VALIDATION = 0.05
_DOCUMENTED = re.compile(r'^ *(def \w+\([^\n]*\):)\n +"""(\w[^\n"\\]{8,70}\.)', re.MULTILINE)
_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Row(NamedTuple):
    """A formatted row: token ids, and labels that are -100 where nothing is trained."""

    ids: list[int]
    labels: list[int]


def load_chats(source: Source) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train on and to validate on, each with one of the known sets of columns.

    A validation or test split of the data is used; else 5 % of the rows, chosen by their hash. The
    default data are functions of the standard library, to be completed by their description.

    Raises:
        DataError: The data cannot be read, or its columns are unknown.
    """
    if source.kind is Kind.MEGATRON:
        reason = "Megatron data holds tokens, not rows"
        raise DataError("--data", source.name, reason, "Give a .jsonl file")
    if source.kind is Kind.DEFAULT:
        found = (pair for text in read_stdlib()["text"] for pair in _DOCUMENTED.findall(text))
        rows = [{"prompt": f'{head}\n    """', "completion": f'{line}"""'} for head, line in found]
        other = None
    else:
        rows, other = load_records(source, *_COLUMNS)
    if other is not None:
        return rows, other
    keys = (json.dumps(row, sort_keys=True, default=str) for row in rows)
    first, second = split_indices(keys, _VALIDATION, name=source.name)
    if not second:
        reason = "a single row cannot be split for validation"
        raise DataError("--data", source.name, reason, "Give more rows")
    return [rows[i] for i in first], [rows[i] for i in second]


def encode_rows(
    rows: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast, max_length: int
) -> list[Row]:
    """Format and tokenize rows, and cut them to a length.

    Trained are the assistant's turns of a chat, the completion of a prompt, or all of a text, each
    with the token that ends it.

    Raises:
        DataError: A row has another form or no trained token, or the tokenizer lacks a chat
            template or an end token.
    """
    if tokenizer.eos_token_id is None:
        reason = "it has no eos_token, with which a turn ends"
        raise DataError("tokenizer", tokenizer.name_or_path, reason, "Add one to it")
    return [_encode(row, tokenizer, max_length) for row in rows]


def _encode(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast, max_length: int) -> Row:
    end = tokenizer.eos_token_id
    if "messages" in row:
        ids, trained = _encode_chat(row, tokenizer)
        for i in range(1, len(ids)):
            trained[i] = trained[i] or (ids[i] == end and trained[i - 1])
    else:
        for name, value in row.items():
            if not isinstance(value, str):
                raise DataError("--data", row, f"the {name} of this row is no text", "Give texts")
        before: list[int] = tokenizer(row["prompt"])["input_ids"] if "prompt" in row else []
        answer = row.get("completion", row.get("text"))
        # A text begins as the tokenizer begins texts; a completion goes on.
        after: list[int] = tokenizer(answer, add_special_tokens="text" in row)["input_ids"]
        after += [end] if after[-1:] != [end] else []
        ids, trained = before + after, [False] * len(before) + [True] * len(after)
    ids = ids[:max_length]
    # Nothing predicts the first token.
    labels = [ids[i] if i and trained[i] else _IGNORED for i in range(len(ids))]
    if all(label == _IGNORED for label in labels):
        reason = f"none of the first {max_length} tokens of this row is trained"
        raise DataError("--data", row, reason, "Give --max-length more, or remove the row")
    return Row(ids, labels)


def _encode_chat(
    row: Mapping[str, Any], tokenizer: PreTrainedTokenizerFast
) -> tuple[list[int], list[bool]]:
    """Return a chat's tokens, and which of them the assistant says."""
    try:
        template = tokenizer.get_chat_template()
    except ValueError:
        reason = "the rows are chats, and the tokenizer has no chat template"
        raise DataError("--chat-template", None, reason, "Name a file with one") from None
    try:
        turns = [{k: v for k, v in turn.items() if v is not None} for turn in row["messages"]]
        if not _GENERATION.search(template):
            return _mask_by_prefix(turns, tokenizer)
        encoded: Any = tokenizer.apply_chat_template(
            turns, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], [bool(each) for each in encoded["assistant_masks"]]
    except Exception as error:  # of any kind, which the template decides
        reason = f"the chat template does not take this row ({error})"
        remedy = "Give messages with role and content, or another --chat-template"
        raise DataError("--data", row, reason, remedy) from error


def _mask_by_prefix(turns: list[Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Find the assistant's turns as what the template adds for each."""

    def render(count: int, *, asks: bool = False) -> str:
        return tokenizer.apply_chat_template(
            turns[:count], tokenize=False, add_generation_prompt=asks
        )

    whole, spans = render(len(turns)), []
    for count, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        before, after = render(count, asks=True), render(count + 1)
        if not (after.startswith(before) and whole.startswith(after)):
            raise ValueError("it changes earlier turns; mark {% generation %} in it")
        # Behind the end of a turn comes at most what joins it to the next one.
        length = after.rfind(tokenizer.eos_token, len(before))
        stop = len(after) if length < 0 else length + len(tokenizer.eos_token)
        spans.append(range(len(before), stop))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    starts = (start for start, _ in encoded["offset_mapping"])
    return encoded["input_ids"], [any(start in span for span in spans) for start in starts]


def mark_trained(row: Row, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return a row's text with its trained tokens in »«."""
    parts = groupby(zip(*row, strict=True), key=lambda pair: pair[1] != _IGNORED)
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

    Models with masks by position (``position_ids`` without ``attention_mask``) attend within a row
    alone. What fills up a sample is a row of its own, without labels.

    Args:
        rows: Formatted rows.
        max_length: Tokens of a sample.
        fill: Token that fills up.
        packs: Whether to put several rows into a sample.
        positions: Whether to give ``position_ids``.
    """

    def __init__(
        self, rows: Sequence[Row], max_length: int, fill: int, *, packs: bool, positions: bool
    ) -> None:
        lengths = [len(row.ids) for row in rows]
        self._rows, self._length, self._fill = rows, max_length, fill
        self._packed = pack(lengths, max_length) if packs else [[i] for i in range(len(rows))]
        self._positions = positions

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        rows = [self._rows[i] for i in self._packed[index]]
        rest = self._length - sum(len(row.ids) for row in rows)
        rows.append(Row([self._fill] * rest, [_IGNORED] * rest))
        sample = {
            "input_ids": torch.tensor([i for row in rows for i in row.ids]),
            "labels": torch.tensor([label for row in rows for label in row.labels]),
        }
        if self._positions:
            sample["position_ids"] = torch.cat([torch.arange(len(row.ids)) for row in rows])
        return sample
