# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.tokens import TokenStore, largest_token, split_store
from wavemare.errors import DataError


def test_vocab_size_is_counted_where_it_is_not_declared(make_store):
    assert make_store([[1, 9], [4]]).vocab_size == 10
    assert make_store([[1, 9], [4]], vocab_size=50).vocab_size == 50


@pytest.mark.parametrize("place", [0, 7, 1 << 24, (1 << 24) + 8])
def test_the_largest_token_and_its_first_place(place):
    tokens = np.zeros((1 << 24) + 10, dtype=np.uint8)
    tokens[[place, -1]] = 9
    tokens[place // 2] += 1
    assert largest_token(TokenStore(tokens, np.array([0, len(tokens)]))) == (tokens.max(), place)


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=2, max_size=30),
    st.floats(0.01, 0.99),
)
def test_split_store_by_document(make_store, documents, fraction):
    train, validation = split_store(make_store(documents), fraction)
    assert train.num_documents >= 1
    assert validation.num_documents >= 1
    both = [
        part.document(i).tolist() for part in (train, validation) for i in range(part.num_documents)
    ]
    assert both == documents
    assert abs(validation.num_documents - fraction * len(documents)) <= 1


def test_split_store_of_one_document(make_store):
    train, validation = split_store(make_store([list(range(100))]), 0.05)
    assert (train.num_tokens, validation.num_tokens) == (95, 5)
    assert validation.document(0).tolist() == [95, 96, 97, 98, 99]
    with pytest.raises(DataError, match=r"1 tokens cannot be split.*Give more"):
        split_store(make_store([[1]]))
