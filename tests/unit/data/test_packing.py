# SPDX-License-Identifier: Apache-2.0

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wavemare.data.packing import PackedDataset, check_fits
from wavemare.errors import ConfigError, DataError


def slow_windows(documents, length):
    inputs = []
    labels = []
    for document in documents:
        for place, token in enumerate(document):
            inputs.append(token)
            labels.append(token if place > 0 else -100)
    cuts = range(0, len(inputs) - length + 1, length)
    return [(inputs[c : c + length], labels[c : c + length]) for c in cuts]


@given(
    documents=st.lists(st.lists(st.integers(0, 99), max_size=9), min_size=1, max_size=9),
    length=st.integers(2, 8),
)
def test_windows_equal_the_slow_twin(make_store, documents, length):
    expected = slow_windows(documents, length)
    if not expected:
        with pytest.raises(DataError, match="do not fill one window"):
            PackedDataset(make_store(documents), length)
        return
    packed = PackedDataset(make_store(documents), length)
    items = [packed[i] for i in range(len(packed))]
    assert [(i["input_ids"].tolist(), i["labels"].tolist()) for i in items] == expected
    assert {i["input_ids"].dtype for i in items} == {torch.int64}
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_writing_to_an_item_leaves_the_store(make_store):
    packed = PackedDataset(make_store([[1, 2, 3, 4]]), 2)
    packed[0]["input_ids"].fill_(0)
    assert packed[0]["input_ids"].tolist() == [1, 2]


def test_errors(make_store):
    with pytest.raises(DataError, match=r"--data = 'made'.*3 tokens .* window of 4.*smaller"):
        PackedDataset(make_store([[1, 2, 3]]), 4)
    with pytest.raises(ConfigError, match=r"sequence_length = 1.*at least 2"):
        PackedDataset(make_store([[1, 2, 3]]), 1)


def test_check_fits(make_store):
    store = make_store([[1, 2], [], [3, 7, 4]])
    check_fits(store, 8, 8, 8)
    with pytest.raises(ConfigError, match=r"sequence_length = 9.*8 positions.*at most 8"):
        check_fits(store, 9, 8, 8)
    message = r"position 1 of document 2 is token 7, beyond the model's 7.*model of 8 tokens"
    with pytest.raises(DataError, match=message):
        check_fits(store, 8, 8, 7)
    with pytest.raises(DataError, match=r"position 0 of document 1 is token -3, below 0.*again"):
        check_fits(make_store([[1], [-3]]), 8, 8, 7)
