# SPDX-License-Identifier: Apache-2.0
import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.samples import PackedDataset
from wavemare.data.tokens import (
    TokenStore,
    check_fits,
    largest_token,
    ngram_cross_entropies,
    split_store,
)
from wavemare.errors import ConfigError, DataError


@pytest.mark.parametrize("place", [0, 7, 1 << 24, (1 << 24) + 8])
def test_the_largest_token_and_its_first_place(place):
    tokens = np.zeros((1 << 24) + 10, dtype=np.uint8)
    tokens[[place, -1]] = 9
    tokens[place // 2] += 1
    assert largest_token(TokenStore(tokens, np.array([0, len(tokens)]))) == (tokens.max(), place)


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=60))
def test_split_store_by_document(make_store, documents):
    train, validation = split_store(make_store(documents))
    assert train.num_documents >= 1
    assert validation.num_documents == max(round(0.05 * len(documents)), 1)
    both = [
        part.document(i).tolist() for part in (train, validation) for i in range(part.num_documents)
    ]
    assert both == documents


def test_split_store_of_one_document(make_store):
    train, validation = split_store(make_store([list(range(100))]))
    assert (train.num_tokens, validation.num_tokens) == (95, 5)
    assert validation.document(0).tolist() == [95, 96, 97, 98, 99]
    with refuses(DataError, "--data", "made"):
        split_store(make_store([[1]]))


def test_check_fits(make_store):
    store = make_store([[1, 2], [], [3, 7, 4]])
    check_fits(store, 8, 8, 8)
    with refuses(ConfigError, "--sequence_length", 9):
        check_fits(store, 9, 8, 8)
    with refuses(DataError, "--data", "made"):
        check_fits(store, 8, 8, 7)
    with refuses(DataError, "--data", "made"):
        check_fits(make_store([[1], [-3]]), 8, 8, 7)


VOCABULARY = 6
DOCUMENTS = st.lists(
    st.lists(st.integers(0, VOCABULARY - 1), max_size=12), min_size=1, max_size=6
).filter(lambda documents: any(len(d) > 1 for d in documents))


def pairs_of(documents):
    return [pair for d in documents for pair in pairwise(d)]


def slow_unigram(train):
    counts = Counter(after for _, after in pairs_of(train))
    return [(counts[w] + 1) / (counts.total() + VOCABULARY) for w in range(VOCABULARY)]


def slow_bigram(train, before):
    unigram = slow_unigram(train)
    after = Counter(w for h, w in pairs_of(train) if h == before)
    if not after:
        return unigram
    distinct = len(after)
    return [
        (after[w] + distinct * unigram[w]) / (after.total() + distinct) for w in range(VOCABULARY)
    ]


@given(DOCUMENTS, DOCUMENTS, st.none() | st.integers(2, 5), st.none() | st.integers(1, 4))
def test_both_equal_the_slow_twin(make_store, train, validation, length, windows):
    """With a length, of the positions that a packed model of such sequences is scored on."""
    store = make_store(validation, VOCABULARY)
    scored = [] if length else pairs_of(validation)
    if length and store.num_tokens >= length:
        packed = PackedDataset(store, length)
        count = len(packed) if windows is None else min(windows, len(packed))
        for i in (n * len(packed) // count for n in range(count)):
            inputs, labels = packed[i]["input_ids"].tolist(), packed[i]["labels"].tolist()
            scored += [(h, w) for h, w in zip(inputs, labels[1:], strict=False) if w != -100]
    arguments = make_store(train, VOCABULARY), store
    if not scored:
        with refuses(DataError, "--data", "made"):
            ngram_cross_entropies(*arguments, sequence_length=length, windows=windows)
        return
    unigram = -sum(math.log(slow_unigram(train)[w]) for _, w in scored) / len(scored)
    bigram = -sum(math.log(slow_bigram(train, h)[w]) for h, w in scored) / len(scored)
    found = ngram_cross_entropies(*arguments, sequence_length=length, windows=windows)
    assert found == pytest.approx({"unigram": unigram, "bigram": bigram}, rel=1e-12)


@pytest.mark.long
def test_a_bounded_part_of_a_large_corpus_is_counted():
    """Of 8 million tokens, in several parts: as much as of the part by itself."""
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 50, 8_000_000, dtype=np.uint16)
    offsets = np.arange(0, len(tokens) + 1, 1000)
    whole, part = TokenStore(tokens, offsets), TokenStore(tokens[:3_000_000], offsets[:3001])
    held = TokenStore(tokens[-100_000:], np.array([0, 100_000]), vocab_size=50)
    expected = ngram_cross_entropies(part, held, sequence_length=100)
    assert ngram_cross_entropies(whole, held, sequence_length=100) != expected
    tracemalloc.start()
    found = ngram_cross_entropies(whole, held, sequence_length=100, most_tokens=3_000_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == expected
    assert peak < 32 * 3_000_000
