# SPDX-License-Identifier: Apache-2.0
import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.encode import tokenize
from wavemare.data.samples import PackedDataset
from wavemare.data.statistics import bigram_cross_entropy, unigram_cross_entropy
from wavemare.data.text import load_text
from wavemare.data.tokenizer import cached_tokenizer
from wavemare.errors import DataError

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


@given(DOCUMENTS, DOCUMENTS, st.none() | st.integers(2, 5))
def test_both_equal_the_slow_twin(make_store, train, validation, length):
    """With a length, of the positions that a packed model of such sequences is scored on."""
    store = make_store(validation, VOCABULARY)
    scored = [] if length else pairs_of(validation)
    if length and store.num_tokens >= length:
        packed = PackedDataset(store, length)
        for i in range(len(packed)):
            inputs, labels = packed[i]["input_ids"].tolist(), packed[i]["labels"].tolist()
            scored += [(h, w) for h, w in zip(inputs, labels[1:], strict=False) if w != -100]
    arguments = make_store(train, VOCABULARY), store
    if not scored:
        message = rf"--data = 'made'.*{store.num_tokens} tokens hold nothing to predict.*more data"
        for entropy in (unigram_cross_entropy, bigram_cross_entropy):
            with pytest.raises(DataError, match=message):
                entropy(*arguments, sequence_length=length)
        return
    unigram = -sum(math.log(slow_unigram(train)[w]) for _, w in scored) / len(scored)
    bigram = -sum(math.log(slow_bigram(train, h)[w]) for h, w in scored) / len(scored)
    found = unigram_cross_entropy(*arguments, sequence_length=length)
    assert found == pytest.approx(unigram, rel=1e-12)
    found = bigram_cross_entropy(*arguments, sequence_length=length)
    assert found == pytest.approx(bigram, rel=1e-12)


def test_the_default_corpus(tmp_path):
    corpus = load_text(None)
    train = corpus.train.select(range(0, len(corpus.train), 30))
    validation = corpus.validation.select(range(0, len(corpus.validation), 6))
    tokenizer = cached_tokenizer(train, 512, "gpt", tmp_path)
    stores = [tokenize(part, tokenizer, tmp_path, name="made") for part in (train, validation)]
    unigram, bigram = unigram_cross_entropy(*stores), bigram_cross_entropy(*stores)
    assert 2.0 < bigram < unigram - 0.5 < math.log(len(tokenizer)) - 1.0
