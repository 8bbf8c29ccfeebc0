# SPDX-License-Identifier: Apache-2.0
"""Rows of preferences: a prompt with a chosen and a rejected answer, as two rows of one pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from wavemare.data.chat import check_kind, iterate_rows, lengths_of, optional_columns
from wavemare.data.row_format import CHAT_COLUMNS, IGNORED, Row, row_error
from wavemare.data.sources import Kind, Source
from wavemare.data.text import iterate_records

SIDES = ("chosen", "rejected")


def iterate_pairs(source: Source, part: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the rows of a split with ``prompt``, ``chosen`` and ``rejected``.

    By default the answers are descriptions of functions of the standard library: of the function
    that the prompt shows, and of another one.

    Args:
        source: The data.
        part: 0 to train on, 1 to validate on.

    Raises:
        DataError: The data cannot be read, or lacks one of these columns.
    """
    check_kind(source)
    if source.kind is Kind.DEFAULT:
        for other, row in pairwise(iterate_rows(source)):
            answers = {"chosen": row["completion"], "rejected": other["completion"]}
            if row["completion"] != other["completion"]:
                yield {"prompt": row["prompt"], **answers}
        return
    texts = source.kind in (Kind.CSV, Kind.TSV)
    columns = dict.fromkeys(("prompt", *SIDES), texts)
    yield from optional_columns(iterate_records(source, part, columns, optional=CHAT_COLUMNS))


def sides_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pair as two rows for `RowFormat`: the prompt with each of its answers.

    Raises:
        DataError: The row lacks an answer, or has one of another form than its prompt.
    """
    for name in SIDES:
        if not row.get(name):
            reason = f"this row has no pair: its {name} answer is missing"
            raise row_error(row, reason, "Give each row a chosen and a rejected answer")
        if isinstance(row.get("prompt"), list) != isinstance(row[name], list):
            reason = f"the prompt and the {name} answer of this row have unlike forms"
            raise row_error(row, reason, "Give texts, or lists of messages")
    rest = {name: value for name, value in row.items() if name not in SIDES}
    return [{**rest, "completion": row[name]} for name in SIDES]


class PairSamples(Dataset[dict[str, torch.Tensor]]):
    """Pairs of one length: the chosen row, then the rejected one, each filled up at its end.

    A sample has ``input_ids``, ``attention_mask`` and ``labels``, (2, max_length), and
    ``reference``, (2,).

    Args:
        rows: Formatted rows, two for each pair.
        max_length: Tokens of a row.
        fill: Token that fills up.

    Attributes:
        lengths: Tokens of each row, int32 [pairs, 2].
        reference: The reference's log-probabilities of the answers, float32 [pairs, 2]. They are
            zero until they are known.
    """

    def __init__(self, rows: Sequence[Row], max_length: int, fill: int) -> None:
        self._rows, self._length, self._fill = rows, max_length, fill
        self.lengths = lengths_of(rows).reshape(-1, 2)
        self.reference = np.zeros(self.lengths.shape, np.float32)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.full((2, self._length), self._fill)
        labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
        for side in range(2):
            row = self._rows[2 * index + side]
            length = len(row.ids)
            ids[side, :length] = torch.tensor(row.ids)
            labels[side, :length] = torch.tensor(row.labels)
            mask[side, :length] = 1
        reference = torch.from_numpy(self.reference[index])
        return {"input_ids": ids, "attention_mask": mask, "labels": labels, "reference": reference}
