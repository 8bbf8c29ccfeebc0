# SPDX-License-Identifier: Apache-2.0
"""Tokens of many documents in one memory-mapped array: checks, split, and n-gram baselines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wavemare.errors import ConfigError, DataError

MOST_COUNTED = 10_000_000
"""Tokens of a corpus that its n-gram baselines count."""
_SCAN_TOKENS = 1 << 24
_PART_TOKENS = 1 << 19
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


def ngram_cross_entropies(
    train: TokenStore,
    validation: TokenStore,
    *,
    sequence_length: int | None = None,
    windows: int | None = None,
    most_tokens: int = MOST_COUNTED,
) -> dict[str, float]:
    r"""Return how well counts predict validation tokens, in nats per token.

    ``unigram`` predicts each token by its frequency ``q``, smoothed by adding one for each token of
    the vocabulary. ``bigram`` predicts it from the one before, by Witten-Bell interpolation with
    the unigram model, where ``c(h)`` counts what follows the token ``h`` and ``d(h)`` how many
    different tokens do:

    .. math:: p(w \mid h) = \frac{c(h, w) + d(h)\, q(w)}{c(h) + d(h)}

    After a token that never had a successor, ``p`` is ``q``. Pairs across documents are not
    counted, and the first token of a document is not predicted.

    Memory: 16 bytes for each different pair among the counted tokens, and a part of some millions
    of tokens.

    Args:
        train: Tokens to count, from the first one on.
        validation: Tokens to predict.
        sequence_length: If given, only the tokens that ``PackedDataset`` of this length asks for
            are predicted: neither the first of a window nor the rest after the last one.
        windows: How many of these windows, spread over all; None for all of them.
        most_tokens: Tokens that are counted at most, and predicted at most.

    Raises:
        DataError: There is no token to predict.
    """
    size = max(train.vocab_size, validation.vocab_size)
    counts = np.zeros(size, dtype=np.int64)
    keys = numbers = np.zeros(0, dtype=np.int64)
    for before, after in _pairs(train, range(1, min(train.num_tokens, most_tokens))):
        counts += np.bincount(after, minlength=size)
        found, times = np.unique(before * size + after, return_counts=True)
        keys, place = np.unique(np.concatenate([keys, found]), return_inverse=True)
        numbers = _add_up(place, np.concatenate([numbers, times]), len(keys))
    if not len(keys):
        raise _nothing_to_predict(train)
    unigram = (counts + 1.0) / (counts.sum() + size)
    total = _add_up(keys // size, numbers, size)
    distinct = np.bincount(keys // size, minlength=size)

    predicted, losses = 0, {"unigram": 0.0, "bigram": 0.0}
    for history, targets in _pairs(
        validation, *_scored(validation, sequence_length, windows, most_tokens)
    ):
        place = np.minimum(np.searchsorted(keys, history * size + targets), len(keys) - 1)
        seen = np.where(keys[place] == history * size + targets, numbers[place], 0)
        mass = total[history] + distinct[history]
        interpolated = seen + distinct[history] * unigram[targets]
        known = mass > 0
        bigram = np.where(known, interpolated / np.where(known, mass, 1), unigram[targets])
        losses["unigram"] -= float(np.log(unigram[targets]).sum())
        losses["bigram"] -= float(np.log(bigram).sum())
        predicted += len(targets)
    if not predicted:
        raise _nothing_to_predict(validation)
    return {name: loss / predicted for name, loss in losses.items()}


def spread(size: int, count: int) -> NDArray[np.int64]:
    """Return ``count`` of the numbers below ``size`` in equal distances, ascending."""
    return np.arange(count, dtype=np.int64) * size // count


def _scored(
    store: TokenStore, sequence_length: int | None, windows: int | None, most_tokens: int
) -> tuple[Sequence[int] | NDArray[np.int64], int]:
    """Return where stretches of predicted tokens begin, and how long each is."""
    if sequence_length is None:
        return range(1, min(store.num_tokens, most_tokens)), 1
    size = store.num_tokens // sequence_length
    most = max(most_tokens // sequence_length, 1)
    count = min(size, most, size if windows is None else windows)
    return spread(size, count) * sequence_length + 1, sequence_length - 1


def _pairs(
    store: TokenStore, begins: Sequence[int] | NDArray[np.int64], length: int = 1
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Yield the tokens before and the tokens at predicted positions, in parts, int64 [part] each.

    Args:
        store: The tokens.
        begins: Where each stretch of predicted positions begins, from 1.
        length: Of a stretch.
    """
    together = max(_PART_TOKENS // max(length, 1), 1)
    for first in range(0, len(begins), together):
        part = np.asarray(begins[first : first + together], dtype=np.int64)
        at = (part[:, None] + np.arange(length)).ravel()
        place = np.searchsorted(store.offsets, at)
        at = at[store.offsets[place] != at]  # nothing is predicted across documents
        if len(at):
            yield store.tokens[at - 1].astype(np.int64), store.tokens[at].astype(np.int64)


def _add_up(place: NDArray[np.int64], numbers: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the sums of the numbers at each place, exact below 2**53."""
    return np.bincount(place, weights=numbers, minlength=size).astype(np.int64)


def _nothing_to_predict(store: TokenStore) -> DataError:
    reason = f"its {store.num_tokens} tokens hold nothing to predict"
    return DataError("--data", store.name, reason, "Give more data")
