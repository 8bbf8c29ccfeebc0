# SPDX-License-Identifier: Apache-2.0
"""Packed windows against a slow twin, and their masks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.encode import tokenize
from wavemare.data.samples import MaskedDataset, PackedDataset
from wavemare.errors import ConfigError, DataError

CLS, SEP, MASK = 2, 3, 4


@pytest.fixture
def store(tmp_path, documents, bert_tokenizer):
    return tokenize(documents, bert_tokenizer, tmp_path, name="made")


def test_frame_and_originals(store, bert_tokenizer):
    masked = MaskedDataset(store, 32, bert_tokenizer, seed=3)
    assert len(masked) == store.num_tokens // 30
    for i in range(len(masked)):
        item = masked[i]
        inputs, labels = item["input_ids"], item["labels"]
        assert inputs.shape == labels.shape == (32,)
        assert inputs.dtype == labels.dtype == torch.int64
        assert (inputs[0], inputs[-1]) == (CLS, SEP)
        restored = torch.where(labels == -100, inputs, labels)[1:-1]
        original = torch.from_numpy(store.tokens[30 * i : 30 * i + 30].astype("int64"))
        assert torch.equal(restored, original)
        chosen = labels != -100
        assert chosen.any()
        assert not (labels[chosen] < 5).any()  # no special token is asked for
        assert (inputs[chosen & (inputs < 5)] == MASK).all()  # nor put in, but [MASK]


def test_shares(make_store, bert_tokenizer):
    store = make_store([[*range(5, 205)] * 400], vocab_size=290)
    masked = MaskedDataset(store, 402, bert_tokenizer, seed=1)
    items = [masked[i] for i in range(len(masked))]
    inputs = torch.stack([item["input_ids"] for item in items])
    labels = torch.stack([item["labels"] for item in items])
    chosen = labels != -100
    hidden = (inputs == MASK) & chosen
    kept = (inputs == labels) & chosen
    count = int(chosen.sum())
    assert count / (inputs.numel() - 2 * len(items)) == pytest.approx(0.15, abs=0.005)
    assert int(hidden.sum()) / count == pytest.approx(0.8, abs=0.015)
    assert int(kept.sum()) / count == pytest.approx(0.1 + 0.1 / 285, abs=0.01)
    replaced = inputs[chosen & ~hidden & ~kept]
    assert replaced.min() >= 5
    assert len(replaced.unique()) > 200


def test_masks_depend_on_seed_epoch_and_index_alone(store, bert_tokenizer):
    def read(seed, index, epoch):
        return (
            MaskedDataset(store, 32, bert_tokenizer, seed=seed).at(index, epoch)["labels"].tolist()
        )

    one = MaskedDataset(store, 32, bert_tokenizer, seed=1)
    one.at(3, 0)
    assert one.at(2, 1)["labels"].tolist() == read(1, 2, 1)
    assert one[2]["labels"].tolist() == read(1, 2, 0)
    places = {
        tuple(i for i, label in enumerate(read(*key)) if label != -100)
        for key in ((1, 2, 1), (2, 2, 1), (1, 3, 1), (1, 2, 2), (1, 1, 2))
    }
    assert len(places) == 5


def test_one_token_at_least(store, bert_tokenizer):
    masked = MaskedDataset(store, 32, bert_tokenizer, probability=1e-9)
    counts = {int((masked[i]["labels"] != -100).sum()) for i in range(len(masked))}
    assert counts == {1}


def test_errors(store, make_store, bert_tokenizer, gpt_tokenizer):
    with refuses(DataError, "--tokenizer", ""):
        MaskedDataset(store, 32, gpt_tokenizer)
    with refuses(ConfigError, "mask_probability", 0.0):
        MaskedDataset(store, 32, bert_tokenizer, probability=0.0)
    with refuses(ConfigError, "sequence_length", 3):
        MaskedDataset(store, 3, bert_tokenizer)
    ends = make_store([[SEP]] * 9)
    with refuses(DataError, "--data", "made"):
        MaskedDataset(ends, 4, bert_tokenizer)[1]


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
        with refuses(DataError, "--data", "made"):
            PackedDataset(make_store(documents), length)
        return
    packed = PackedDataset(make_store(documents), length)
    items = [packed[i] for i in range(len(packed))]
    assert [(i["input_ids"].tolist(), i["labels"].tolist()) for i in items] == expected
    assert {i["input_ids"].dtype for i in items} == {torch.int64}
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_windows_that_cannot_be_made_are_refused(make_store):
    with refuses(DataError, "--data", "made"):
        PackedDataset(make_store([[1, 2, 3]]), 4)
    with refuses(ConfigError, "sequence_length", 1):
        PackedDataset(make_store([[1, 2, 3]]), 1)
