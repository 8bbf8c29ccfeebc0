# SPDX-License-Identifier: Apache-2.0
"""Tokens of many documents in one memory-mapped array: checks, split, and n-gram baselines."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavemare.errors import ConfigError, DataError

_SCAN_TOKENS = 1 << 24
_VALIDATION = 0.05  # share of the last documents


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
        self.num_tokens = len(tokens)
        self.num_documents = len(offsets) - 1
        self.name = name
        self._declared_vocab_size = vocab_size

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
    """Raise ConfigError if the sequences are longer than the model."""
    if sequence_length > model_positions:
        reason = f"the sequences are longer than the {model_positions} positions of the model"
        remedy = f"Give at most {model_positions}, or a model with more positions"
        raise ConfigError("--sequence_length", sequence_length, reason, remedy)


def split_store(store: TokenStore) -> tuple[TokenStore, TokenStore]:
    """Split tokens by position into training and validation tokens, as Megatron's ``--split`` does.

    The last 5 % of the documents, at least one, are for validation. The only document of a store is
    cut before its last 5 % of tokens.

    Raises:
        DataError: There are fewer than two tokens.
    """
    if store.num_documents > 1:
        last = min(max(round(store.num_documents * _VALIDATION), 1), store.num_documents - 1)
        cut = store.num_documents - last
        return store.select(0, cut), store.select(cut, store.num_documents)
    if store.num_tokens < 2:  # noqa: PLR2004
        reason = f"{store.num_tokens} tokens cannot be split for evaluation"
        raise DataError("--data", store.name, reason, "Give more data")
    cut = min(max(round(store.num_tokens * (1.0 - _VALIDATION)), 1), store.num_tokens - 1)
    offsets = np.array([0, cut, store.num_tokens], dtype=np.int64)
    halves = TokenStore(
        store.tokens, offsets, vocab_size=store._declared_vocab_size, name=store.name
    )
    return halves.select(0, 1), halves.select(1, 2)


def check_fits(
    store: TokenStore, sequence_length: int, model_positions: int, model_vocab_size: int
) -> None:
    """Check that a model takes every window of a store; each token is read once.

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
    return f"position {where - int(store.offsets[document])} of document {document}"


def unigram_cross_entropy(
    train: TokenStore, validation: TokenStore, *, sequence_length: int | None = None
) -> float:
    """Return the cross-entropy of predicting each token by its frequency, in nats per token.

    Counts come from ``train`` and are smoothed by adding one for each token of the vocabulary.

    Args:
        train: Tokens to count.
        validation: Tokens to predict; the first token of a document is not predicted.
        sequence_length: If given, only the tokens that ``PackedDataset`` of this length asks for
            are predicted: neither the first of a window nor the rest after the last one.

    Raises:
        DataError: There is no token to predict.
    """
    _, targets = _pairs(validation, sequence_length)
    return -float(np.log(_unigram(train, validation)[targets]).mean())


def bigram_cross_entropy(
    train: TokenStore, validation: TokenStore, *, sequence_length: int | None = None
) -> float:
    r"""Return the cross-entropy of predicting each token from the one before, in nats per token.

    Witten-Bell interpolation with the unigram model ``q``, where ``c(h)`` counts what follows the
    token ``h`` and ``d(h)`` how many different tokens do:

    .. math:: p(w \mid h) = \frac{c(h, w) + d(h)\, q(w)}{c(h) + d(h)}

    After a token that never had a successor, ``p`` is ``q``. Memory: some 32 bytes per train token.

    Pairs across documents are not counted. Arguments and errors are `unigram_cross_entropy`'s.
    """
    unigram = _unigram(train, validation)
    size = len(unigram)
    first, second = _pairs(train, None)
    pairs, counts = np.unique(first * size + second, return_counts=True)
    before = pairs // size
    total = np.bincount(before, weights=counts, minlength=size)
    distinct = np.bincount(before, minlength=size)

    history, targets = _pairs(validation, sequence_length)
    keys = history * size + targets
    place = np.minimum(np.searchsorted(pairs, keys), len(pairs) - 1)
    seen = np.where(pairs[place] == keys, counts[place], 0)
    mass = total[history] + distinct[history]
    interpolated = seen + distinct[history] * unigram[targets]
    known = mass > 0
    probability = np.where(known, interpolated / np.where(known, mass, 1.0), unigram[targets])
    return -float(np.log(probability).mean())


def _unigram(train: TokenStore, validation: TokenStore) -> NDArray[np.float64]:
    size = max(train.vocab_size, validation.vocab_size)
    _, targets = _pairs(train, None)
    counts = np.bincount(targets, minlength=size) + 1.0
    return counts / counts.sum()


def _pairs(
    store: TokenStore, sequence_length: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return each predicted token and the token before it, int64 [number of predictions] each."""
    predicted = np.ones(store.num_tokens, dtype=np.bool_)
    predicted[:1] = False
    starts = store.offsets[:-1]
    predicted[starts[starts < store.num_tokens]] = False
    if sequence_length is not None:
        predicted[::sequence_length] = False
        predicted[store.num_tokens // sequence_length * sequence_length :] = False
    positions = np.flatnonzero(predicted)
    if not len(positions):
        reason = f"its {store.num_tokens} tokens hold nothing to predict"
        raise DataError("--data", store.name, reason, "Give more data")
    tokens = np.asarray(store.tokens)
    return tokens[positions - 1].astype(np.int64), tokens[positions].astype(np.int64)
