# SPDX-License-Identifier: Apache-2.0
"""What a model that counts tokens would score: the floor that training has to beat."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wavemare.data.tokens import TokenStore
from wavemare.errors import DataError

__all__ = ["bigram_cross_entropy", "unigram_cross_entropy"]


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

    Args:
        train: Tokens to count; pairs across documents are not counted.
        validation: Tokens to predict, as in ``unigram_cross_entropy``.
        sequence_length: As in ``unigram_cross_entropy``.

    Raises:
        DataError: There is no token to predict.
    """
    unigram = _unigram(train, validation)
    size = len(unigram)
    pairs, counts = np.unique(_keys(*_pairs(train, None), size), return_counts=True)
    before = pairs // size
    total = np.bincount(before, weights=counts, minlength=size)
    distinct = np.bincount(before, minlength=size)

    history, targets = _pairs(validation, sequence_length)
    keys = _keys(history, targets, size)
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


def _keys(before: NDArray[np.int64], after: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return before * size + after


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
