# SPDX-License-Identifier: Apache-2.0
"""Tokens of many documents in one memory-mapped array."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavemare.data.text import check_fraction
from wavemare.errors import ConfigError, DataError

__all__ = ["TokenStore", "check_length", "largest_token", "split_store"]

_SCAN_TOKENS = 1 << 24


class TokenStore:
    """Tokens of documents, end to end.

    Args:
        tokens: All tokens, integer [num_tokens]; usually memory-mapped.
        offsets: Where each document starts, and the end of the last, int64 [num_documents + 1].
        vocab_size: Size of the vocabulary; None means the largest token plus one.
        name: Origin of the tokens, for messages.
    """

    def __init__(
        self,
        tokens: NDArray[Any],
        offsets: NDArray[np.int64],
        *,
        vocab_size: int | None = None,
        name: str = "tokens",
    ) -> None:
        self.tokens = tokens
        self.offsets = offsets
        self.name = name
        self._declared_vocab_size = vocab_size

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @cached_property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary, or the largest token plus one."""
        if self._declared_vocab_size is not None:
            return self._declared_vocab_size
        return largest_token(self)[0] + 1

    def document(self, index: int) -> NDArray[Any]:
        """Return the tokens of one document, integer [length]."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def select(self, first: int, last: int) -> TokenStore:
        """Return the documents ``first`` to ``last - 1``; nothing is copied."""
        offsets = self.offsets[first : last + 1]
        tokens = self.tokens[offsets[0] : offsets[-1]]
        return TokenStore(
            tokens, offsets - offsets[0], vocab_size=self._declared_vocab_size, name=self.name
        )


def largest_token(store: TokenStore) -> tuple[int, int]:
    """Return the largest token of a store and its first position."""
    best, where = -1, -1
    for start in range(0, store.num_tokens, _SCAN_TOKENS):
        chunk = store.tokens[start : start + _SCAN_TOKENS]
        position = int(chunk.argmax())
        if chunk[position] > best:
            best, where = int(chunk[position]), start + position
    return best, where


def check_length(sequence_length: int, model_positions: int) -> None:
    """Check that a model takes sequences of a length.

    Raises:
        ConfigError: The sequences are longer than the model.
    """
    if sequence_length > model_positions:
        reason = f"the sequences are longer than the {model_positions} positions of the model"
        remedy = f"Give at most {model_positions}, or a model with more positions"
        raise ConfigError("--sequence_length", sequence_length, reason, remedy)


def split_store(store: TokenStore, fraction: float = 0.05) -> tuple[TokenStore, TokenStore]:
    """Split tokens by position into training and validation tokens, as Megatron's ``--split`` does.

    Args:
        store: The tokens.
        fraction: Share of the last documents to validate on, at least one. The only document of a
            store is cut by that share of its tokens.

    Raises:
        DataError: There are fewer than two tokens.
        ConfigError: The fraction is out of range.
    """
    check_fraction(fraction)
    if store.num_documents > 1:
        last = min(max(round(store.num_documents * fraction), 1), store.num_documents - 1)
        cut = store.num_documents - last
        return store.select(0, cut), store.select(cut, store.num_documents)
    if store.num_tokens < 2:  # noqa: PLR2004
        reason = f"{store.num_tokens} tokens cannot be split for evaluation"
        raise DataError("--data", store.name, reason, "Give more data")
    cut = min(max(round(store.num_tokens * (1.0 - fraction)), 1), store.num_tokens - 1)
    offsets = np.array([0, cut, store.num_tokens], dtype=np.int64)
    halves = TokenStore(
        store.tokens, offsets, vocab_size=store._declared_vocab_size, name=store.name
    )
    return halves.select(0, 1), halves.select(1, 2)
