# SPDX-License-Identifier: Apache-2.0
"""Documents laid end to end and cut into windows of equal length."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import Dataset

from wavemare.data.tokens import TokenStore, check_length, largest_token
from wavemare.errors import ConfigError, DataError

__all__ = ["IGNORED", "PackedDataset", "Sample", "check_fits"]

IGNORED = -100
"""The label that the loss leaves out."""

Sample = dict[str, torch.Tensor]


class PackedDataset(Dataset[Sample]):
    """Windows of ``sequence_length`` tokens; what remains after the last whole one is left out.

    An item is ``{"input_ids": int64 [sequence_length], "labels": int64 [sequence_length]}``. Labels
    follow the Hugging Face convention: they equal the inputs and the model shifts them. The label
    of the first token of each document is -100: nothing is predicted across a document boundary.

    Args:
        store: The tokens.
        sequence_length: Tokens per window.

    Raises:
        ConfigError: The length is below 2, so that nothing could be predicted.
        DataError: The store does not fill one window.
    """

    def __init__(self, store: TokenStore, sequence_length: int) -> None:
        if sequence_length < 2:  # noqa: PLR2004
            reason = "a window needs two tokens for one prediction"
            raise ConfigError("sequence_length", sequence_length, reason, "Give at least 2")
        if store.num_tokens < sequence_length:
            reason = f"its {store.num_tokens} tokens do not fill one window of {sequence_length}"
            remedy = "Give more data or a smaller sequence length"
            raise DataError("--data", store.name, reason, remedy)
        self.store = store
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        return self.store.num_tokens // self.sequence_length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} of {len(self)}")
        start = index * self.sequence_length
        end = start + self.sequence_length
        input_ids = self.store.tokens[start:end].astype(np.int64)
        labels = input_ids.copy()
        offsets = self.store.offsets
        first, last = np.searchsorted(offsets, [start, end])
        labels[offsets[first:last] - start] = IGNORED
        return {"input_ids": torch.from_numpy(input_ids), "labels": torch.from_numpy(labels)}


def check_fits(
    store: TokenStore, sequence_length: int, model_positions: int, model_vocab_size: int
) -> None:
    """Check that a model can read every window of a store; each token is looked at once.

    Args:
        store: The tokens.
        sequence_length: Tokens per window.
        model_positions: Number of positions of the model.
        model_vocab_size: Number of rows of the model's embedding.

    Raises:
        ConfigError: The sequences are longer than the model.
        DataError: A token is negative or beyond the model's vocabulary.
    """
    check_length(sequence_length, model_positions)
    token, where = largest_token(store)
    if token >= model_vocab_size:
        reason = f"{_place(store, where)} is token {token}, beyond the model's {model_vocab_size}"
        remedy = f"Use the tokenizer of this model, or a model of {token + 1} tokens or more"
        raise DataError("--data", store.name, reason, remedy)
    if np.issubdtype(store.tokens.dtype, np.signedinteger):
        where = int(store.tokens.argmin())
        if store.tokens[where] < 0:
            reason = f"{_place(store, where)} is token {store.tokens[where]}, below 0"
            raise DataError("--data", store.name, reason, "Build the data again")


def _place(store: TokenStore, where: int) -> str:
    document = int(np.searchsorted(store.offsets, where, side="right")) - 1
    position = where - int(store.offsets[document])
    return f"position {position} of document {document}"
