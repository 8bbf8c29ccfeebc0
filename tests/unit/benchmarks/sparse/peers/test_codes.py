# SPDX-License-Identifier: Apache-2.0
"""Quantized values, the nearly largest elements, and owners by hashing, against slow twins."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sparse.peers.base import decode, encode
from benchmarks.sparse.peers.hitopk import ms_topk
from benchmarks.sparse.peers.zen import hash_partition, owners


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("numel", "block"), [(0, 4), (1, 4), (37, 5), (64, 16), (10, 512)])
def test_codes_are_one_of_both_neighbours_and_right_on_average(bits, numel, block):
    random = np.random.default_rng(3)
    values = torch.from_numpy(random.standard_normal(numel).astype(np.float32))
    values[::7] = 0
    values[:5] *= 1e-20
    steps = 127 if bits == 8 else 7
    scales = [values[start : start + block].abs().max() for start in range(0, numel, block)]
    step = torch.tensor([float(scales[place // block]) / steps for place in range(numel)])
    total, draws = torch.zeros(numel, dtype=torch.float64), 500
    for _ in range(draws):
        codes, found = encode(values, block, bits, random)
        assert codes.nbytes == -(-len(scales) * block * bits // 8)
        assert found.tolist() == scales
        result = decode(codes, found, numel, block, bits)
        assert ((result - values).abs() <= 1.0001 * step).all()
        multiples = result / step.clamp(min=1e-38)
        assert ((multiples - multiples.round()).abs() < 1e-3).all()
        assert (result[values == 0] == 0).all()
        total += result
    # Five standard deviations of a mean of coins with two sides a step apart.
    assert ((total / draws - values).abs() <= 5 * step / 2 / draws**0.5).all()


class Largest:
    """Draws the largest number below 1 only."""

    def random(self, shape, dtype):
        return np.full(shape, np.nextafter(dtype(1), dtype(0)), dtype)


@pytest.mark.parametrize("bits", [8, 4])
def test_the_largest_value_stays_itself_whatever_is_drawn(bits):
    values = torch.full((4,), 3.0)
    codes, scales = encode(values, 4, bits, Largest())
    found = decode(codes, scales, 4, 4, bits)
    assert torch.allclose(found, values, rtol=1e-6)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 60))
def test_the_largest_are_chosen_also_among_equal_ones(values, k):
    k = min(k, len(values))
    chosen = ms_topk(torch.tensor(values, dtype=torch.float32), k).tolist()
    assert len(set(chosen)) == k
    assert sorted(values[place] for place in chosen) == sorted(values)[-k:]


def slow_owner(number, ranks):
    """MurmurHash3's 64-bit finalizer; of 1 it is 0xB456BCFC34C2CB2C."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = (number ^ number >> 33) * factor % 2**64
    return (number ^ number >> 33) % ranks


@pytest.mark.parametrize("ranks", [1, 3, 16])
def test_each_id_goes_to_its_owner_whatever_numbers_there_are(ranks):
    assert slow_owner(1, 2**64) == 0xB456BCFC34C2CB2C
    ids = np.random.default_rng(0).integers(2**62, size=3000)
    for some in (ids, ids[:1], ids[:0], np.arange(500)):
        parts = hash_partition(some, ranks)
        assert sorted(torch.cat(parts).tolist()) == list(range(len(some)))
        for owner, places in enumerate(parts):
            assert {slow_owner(int(number), ranks) for number in some[places.numpy()]} <= {owner}


def test_owners_are_balanced_whichever_rows_are_likely():
    weights = np.arange(1, 100_001) ** -1.1
    drawn = np.random.default_rng(1).choice(len(weights), 20_000, False, weights / weights.sum())
    for ids in (drawn, np.arange(0, 400_000, 16)):
        counts = np.bincount(owners(ids, 16))
        assert counts.max() < 1.1 * counts.mean()
