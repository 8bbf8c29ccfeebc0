# SPDX-License-Identifier: Apache-2.0
"""Labelled texts as model inputs of fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from wavemare.data.classification import LabelledText
from wavemare.data.packing import Sample
from wavemare.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["EncodedDataset"]


class EncodedDataset(Dataset[Sample]):
    """Labelled texts, encoded with special tokens, cut or padded to one length.

    An item is ``{"input_ids": int64 [sequence_length], "attention_mask": int64 [sequence_length],
    "labels": int64 []}``.

    Args:
        examples: The texts and labels.
        tokenizer: A fast tokenizer with a padding token.
        sequence_length: Tokens per sample, special tokens included.

    Raises:
        DataError: There are no examples, or the tokenizer has no padding token.
    """

    def __init__(
        self,
        examples: Sequence[LabelledText],
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
    ) -> None:
        if not examples:
            raise DataError("--data", 0, "there are no labelled texts", "Give rows that hold text")
        if tokenizer.pad_token_id is None:
            reason = "it has no padding token"
            raise DataError("--tokenizer", tokenizer.name_or_path, reason, "Add a pad_token to it")
        encoded = tokenizer(
            [example.text for example in examples],
            padding="max_length",
            truncation=True,
            max_length=sequence_length,
            return_tensors="pt",
        )
        self._input_ids: torch.Tensor = encoded["input_ids"]
        self._attention_mask: torch.Tensor = encoded["attention_mask"]
        self._labels = torch.tensor([example.label for example in examples])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Sample:
        return {
            "input_ids": self._input_ids[index],
            "attention_mask": self._attention_mask[index],
            "labels": self._labels[index],
        }
