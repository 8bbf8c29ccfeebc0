# SPDX-License-Identifier: Apache-2.0
"""Megatron's sample order against a slow twin that walks token by token, and Megatron-core."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.refusals import refuses
from wavemare.data.megatron_order import (
    blend_index,
    blend_sizes,
    blended_samples,
    build_gpt_index,
    split_ranges,
)
from wavemare.data.tokens import TokenStore
from wavemare.errors import ConfigError, DataError


class Twin:
    """Reads one token at a time, and shuffles lists."""

    def __init__(self, lengths, documents, wanted, length, seed):
        state = np.random.RandomState(seed)
        tokens = sum(lengths[d] for d in documents)
        epochs = 1
        while wanted is not None and epochs * tokens < wanted * length + 1:
            epochs += 1
        apart = False
        before = ((epochs - 1) * tokens - 1) // length
        if epochs > 1 and wanted is not None:
            apart = wanted - before < int(0.8 * ((tokens - 1) // length))
        self.documents = []
        for repeats in [epochs - 1, 1] if apart else [epochs]:
            part = [d for _ in range(repeats) for d in documents]
            state.shuffle(part)
            self.documents += part
        self.samples = [(0, 0)]
        walk = [(i, t) for i, d in enumerate(self.documents) for t in range(lengths[d])]
        count = (len(walk) - 1) // length
        self.samples += [walk[n * length] for n in range(1, count + 1)]
        cut = before if apart else count
        self.shuffle = []
        for part in [list(range(cut)), list(range(cut, count))][: 1 if cut == count else 2]:
            state.shuffle(part)
            self.shuffle += part
        self.texts = [
            [(self.documents[i], t) for i, t in walk[n * length : n * length + length + 1]]
            for n in self.shuffle
        ]


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12),
    wanted=st.none() | st.integers(1, 60),
    length=st.integers(2, 7),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_the_slow_twin(lengths, wanted, length, seed, data):
    first = data.draw(st.integers(0, len(lengths) - 1))
    last = data.draw(st.integers(first + 1, len(lengths)))
    chosen = list(range(first, last))
    arguments = {"num_samples": wanted, "sequence_length": length, "seed": seed}
    sizes, numbers = np.array(lengths, np.int32), np.array(chosen, np.int32)
    if sum(lengths[d] for d in chosen) < length + 1:
        with refuses(DataError, "--data", length):
            build_gpt_index(sizes, numbers, **arguments)
        return
    twin = Twin(lengths, chosen, wanted, length, seed)
    found = build_gpt_index(sizes, numbers, **arguments)
    assert found.documents.tolist() == twin.documents
    assert found.samples.tolist() == [list(sample) for sample in twin.samples]
    assert found.shuffle.tolist() == twin.shuffle
    assert found.documents.dtype == found.samples.dtype == np.int32
    assert found.shuffle.dtype == np.uint32
    tokens = [100 * d + t for d, n in enumerate(lengths) for t in range(n)]
    store = TokenStore(np.array(tokens), np.cumsum([0, *lengths]))
    part = store.select(first, last)
    samples = blended_samples([part], None, extra_token=True, **arguments)
    texts = [samples[i]["input_ids"].tolist() for i in range(len(samples))]
    assert texts == [[100 * d + t for d, t in text] for text in twin.texts]


def test_without_the_extra_token_samples_do_not_overlap():
    store = TokenStore(np.arange(12), np.array([0, 4, 4, 9, 12]))
    samples = blended_samples([store], None, num_samples=4, sequence_length=3, seed=1)
    texts = [samples[i]["input_ids"].tolist() for i in range(len(samples))]
    assert len(texts) == 4
    assert sorted(token for text in texts for token in text) == list(range(12))
    assert all(len(text) == 3 for text in texts)


@pytest.mark.parametrize(
    ("split", "count", "expected"),
    [
        ("969,30,1", 1000, [(0, 969), (969, 999), (999, 1000)]),
        ("969,30,1", 10, [(0, 10), (10, 10), (10, 10)]),
        ("1", 7, [(0, 7), (7, 7), (7, 7)]),
        ("99,1,0", 150, [(0, 148), (148, 150), (150, 150)]),
        ("0,1,1", 4, [(0, 0), (0, 2), (2, 4)]),
        (".5, .25, .25", 8, [(0, 4), (4, 6), (6, 8)]),
    ],
)
def test_splits(split, count, expected):
    assert [(r.start, r.stop) for r in split_ranges(split, count)] == expected


def greedy(weights, count):
    total = sum(weights)
    taken = [0] * len(weights)
    sources, places = [], []
    for i in range(count):
        errors = [w / total * max(i, 1) - t for w, t in zip(weights, taken, strict=True)]
        best = errors.index(max(errors))
        sources.append(best)
        places.append(taken[best])
        taken[best] += 1
    return sources, places


def test_blending_is_the_greedy_rule():
    draw = random.Random(5)
    for _ in range(20):
        weights = [draw.choice([1.0, 2.0, 0.25, 3.0]) for _ in range(draw.randint(1, 5))]
        sources, places = blend_index(weights, 97)
        assert (sources.tolist(), places.tolist()) == greedy(weights, 97)
    sources, _ = blend_index([0.3, 0.7], 1000)
    assert np.bincount(sources).tolist() == [300, 700]
    assert blend_sizes([3, 1], 10, 0.005) == [math.ceil(8 * 1.005), math.ceil(3 * 1.005)]
    for bad in ([], [-1, 2], [0, 0], [float("nan")]):
        with refuses(ConfigError, "--data", bad):
            blend_index(bad, 3)


def test_a_blend_draws_from_its_parts_in_order():
    stores = [TokenStore(np.arange(base, base + 40), np.array([0, 25, 40])) for base in (0, 1000)]
    blend = blended_samples(stores, [1, 3], num_samples=16, sequence_length=5, seed=2)
    assert len(blend) == 16
    sources, places = greedy([1, 3], 16)
    for i, (source, place) in enumerate(zip(sources, places, strict=True)):
        expected = blend.dataset.datasets[source][place]["input_ids"]
        assert blend[i]["input_ids"].tolist() == expected.tolist()
        assert (expected >= 1000).all() == (source == 1)


def test_of_weight_0_nothing_is_read():
    sizes, weights = (40, 3, 40), (1, 0, 3)
    stores = [TokenStore(np.arange(size), np.array([0, size])) for size in sizes]
    options = {"num_samples": 16, "sequence_length": 5, "seed": 2}
    blend = blended_samples(stores, weights, **options)
    expected = blended_samples(stores[::2], weights[::2], **options)
    assert [blend[i]["input_ids"].tolist() for i in range(16)] == [
        expected[i]["input_ids"].tolist() for i in range(16)
    ]


def test_megatron_core_makes_the_same_arrays():
    reason = "megatron-core is not installed (pip install megatron-core)"
    megatron = pytest.importorskip("megatron.core.datasets.helpers", reason=reason)
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset")
    draw = np.random.default_rng(1)
    for seed in range(30):
        lengths = draw.integers(0, 40, size=draw.integers(2, 30)).astype(np.int32)
        documents = np.arange(len(lengths), dtype=np.int32)
        length, wanted = int(draw.integers(2, 30)), int(draw.integers(1, 200))
        tokens = int(lengths.sum())
        if tokens < length + 1:
            continue
        found = build_gpt_index(
            lengths, documents, num_samples=wanted, sequence_length=length, seed=seed
        )
        epochs = len(found.documents) // len(documents)
        before = ((epochs - 1) * tokens - 1) // length
        apart = epochs > 1 and wanted - before < int(0.8 * ((tokens - 1) // length))
        state = np.random.RandomState(seed)
        order = gpt._build_document_index(documents, epochs, state, apart)
        samples = megatron.build_sample_idx(lengths, order, length, epochs, tokens)
        total = len(samples) - 1
        shuffle = gpt._build_shuffle_index(before if apart else total, total, state)
        ours = (found.documents, found.samples, found.shuffle)
        for mine, theirs in zip(ours, (order, samples, shuffle), strict=True):
            assert mine.dtype == theirs.dtype
            assert np.array_equal(mine, theirs)
