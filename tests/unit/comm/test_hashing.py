# SPDX-License-Identifier: Apache-2.0
"""Hashing of ids against Python's dictionaries and integers, and against its probabilities."""

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wavemare.comm.hashing import HashBitmap, owner_of, unique_by_hash
from wavemare.errors import ConfigError

INT64 = st.integers(-(2**63), 2**63 - 1)
# Few values, so that many are alike, and the whole range with both of its ends.
IDS = st.lists(st.integers(-3, 5) | INT64 | st.sampled_from([2**63 - 1, -(2**63)]), max_size=80)
both = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def hashing(imported):
    return imported("wavemare.comm.hashing")


def slow_place(number, key, count):
    h = (number + key) % 2**64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    return ((h ^ h >> 31) >> 32) * count >> 32


def slow_insert(ids, keys, count):
    """Return (cells, first, left) of a table, with a list for each round."""
    cells, first, waiting = [-1] * count, {}, list(range(len(ids)))
    for key in keys:
        again = []
        for i in waiting:
            cell = slow_place(ids[i], key, count)
            if cells[cell] == -1:
                cells[cell] = i
            if ids[cells[cell]] == ids[i]:
                first[i] = cells[cell]
            else:
                again.append(i)
        waiting = again
    return cells, first, waiting


def distinct(n, seed=0):
    numbers = np.random.default_rng(seed).integers(-(2**63), 2**63 - 1, 2 * n)
    return torch.from_numpy(np.unique(numbers)[:n].copy())


@both
@given(ids=IDS, probes=st.integers(1, 4), load=st.sampled_from([0.1, 0.25, 1.0]))
def test_no_id_is_lost(hashing, ids, probes, load):
    numbers = torch.tensor(ids, dtype=torch.int64)
    found = hashing.unique_by_hash(numbers, probes=probes, load=load)
    assert found.unique.tolist() == list(dict.fromkeys(ids))
    assert found.unique[found.inverse].tolist() == ids
    assert 0 <= found.serial <= len(found.unique)


def test_ids_of_32_bits_are_the_same_ids(hashing):
    ids = torch.tensor([5, -7, 5, 2**31 - 1], dtype=torch.int32)
    found = hashing.unique_by_hash(ids)
    assert found.unique.dtype == found.inverse.dtype == torch.int64
    assert found.unique.tolist() == [5, -7, 2**31 - 1]
    assert torch.equal(hashing.owner_of(ids, 1000), hashing.owner_of(ids.long(), 1000))
    strided = torch.arange(40)[::3]
    assert torch.equal(hashing.unique_by_hash(strided).unique, strided)


@both
@given(ids=IDS, keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=4), data=st.data())
def test_table_is_that_of_the_slow_twin(hashing, ids, keys, data):
    count = data.draw(st.integers(1, 2 * len(ids) + 1))
    numbers = np.array(ids, dtype=np.int64)
    for key in keys:
        expected = [slow_place(i, key, count) for i in ids]
        assert hashing.place(numbers, np.uint64(key), count).tolist() == expected
    cells, first = np.full(count, -1, dtype=np.int32), np.full(len(ids), -9)
    left = hashing.insert(numbers, np.array(keys, dtype=np.uint64), cells, first)
    slow_cells, slow_first, slow_left = slow_insert(ids, keys, count)
    assert cells.tolist() == slow_cells
    assert left.tolist() == slow_left
    assert first.tolist() == [slow_first.get(i, -9) for i in range(len(ids))]


@pytest.mark.parametrize(
    ("load", "expected"), [(0.5, [21.3, 9.0, 4.2, 2.0]), (0.25, [11.5, 2.7, 0.66, 0.16])]
)
def test_few_ids_are_left_for_the_serial_area(hashing, load, expected):
    ids = distinct(100_000)
    for probes, percent in enumerate(expected, start=1):
        found = hashing.unique_by_hash(ids, probes=probes, load=load)
        assert torch.equal(found.unique, ids)
        deviation = 100 * math.sqrt(percent / 100 / len(ids))
        assert abs(100 * found.serial / len(ids) - percent) < 0.03 * percent + 4 * deviation


def test_ids_of_one_owner_fill_the_table_like_any_others():
    ids = torch.arange(400_000)
    ids = ids[owner_of(ids, 16, seed=3) == 5]
    assert unique_by_hash(ids, probes=1, seed=3).serial / len(ids) < 0.13


PATTERNS = {
    "rows": torch.arange,
    "negative": lambda n: -torch.arange(n),
    "every 4096th": lambda n: torch.arange(n) * 4096,
    "upper half": lambda n: torch.arange(n) << 40,
    "random": distinct,
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("num_owners", [2, 3, 16, 100])
def test_owners_are_balanced_but_for_the_root_of_their_rows(pattern, num_owners):
    for n in (1000, 30_000):
        counts = owner_of(PATTERNS[pattern](n), num_owners, seed=7).bincount(minlength=num_owners)
        assert len(counts) == num_owners
        mean = n / num_owners
        # Of all these counts, one in 16 000 would be further off.
        assert (counts - mean).abs().max() < 4 * math.sqrt(mean)


def test_owners_depend_on_id_and_seed_alone(hashing):
    ids = distinct(50_000)
    owners = hashing.owner_of(ids, 16, seed=1)
    turned = torch.randperm(len(ids))
    assert torch.equal(hashing.owner_of(ids[turned], 16, seed=1), owners[turned])
    others = hashing.owner_of(ids, 16, seed=2)
    assert abs((owners == others).double().mean() - 1 / 16) < 0.01
    # Pinned, as all ranks and resumed runs must agree.
    pinned = hashing.owner_of(torch.tensor([0, 1, 2, -1, 2**62]), 1000, seed=1)
    assert pinned.tolist() == [643, 198, 622, 804, 456]


def all_rows(bitmap):
    return bitmap.decode(torch.full((bitmap.num_bytes,), 255, dtype=torch.uint8))


@both
@given(
    num_rows=st.integers(0, 300),
    num_owners=st.integers(1, 9),
    seed=st.integers(0, 3),
    data=st.data(),
)
def test_bitmaps_bring_back_each_owner_its_rows(hashing, num_rows, num_owners, seed, data):
    rows = st.integers(0, num_rows - 1) if num_rows else st.nothing()
    ids = torch.tensor(data.draw(st.lists(rows)), dtype=torch.int64)
    owners = hashing.owner_of(ids, num_owners, seed)
    total = 0
    for owner in range(num_owners):
        bitmap = hashing.HashBitmap(num_rows, num_owners, owner, seed)
        own = ids[owners == owner]
        bits = bitmap.encode(own)
        assert bits.dtype == torch.uint8
        assert len(bits) == bitmap.num_bytes == math.ceil(len(bitmap) / 8)
        assert bitmap.decode(bits).tolist() == sorted(set(own.tolist()))
        total += len(bitmap)
    assert total == num_rows


def test_bitmaps_of_all_owners_take_a_bit_per_row():
    num_rows = 2**20 + 999  # rows are hashed in parts of 2**20
    bitmaps = [HashBitmap(num_rows, 5, owner) for owner in range(5)]
    sizes = [bitmap.num_bytes for bitmap in bitmaps]
    assert num_rows / 8 <= sum(sizes) < num_rows / 8 + 5
    assert max(sizes) < num_rows / 8 / 5 * 1.02
    rows = [all_rows(bitmap) for bitmap in bitmaps]
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(num_rows))


def test_bit_of_a_row_is_its_rank_among_the_rows_of_its_owner():
    own = [row for row in range(500) if owner_of(torch.tensor([row]), 7, 2) == 4]
    bitmap = HashBitmap(500, 7, 4, 2)
    for j, row in enumerate(own):
        bits = bitmap.encode(torch.tensor([row, row], dtype=torch.int32))
        assert bits.nonzero().flatten().tolist() == [j // 8]
        assert bits[j // 8] == 1 << j % 8
    assert all_rows(bitmap).tolist() == own


def test_a_row_of_another_owner_is_refused():
    bitmap = HashBitmap(500, 7, int(owner_of(torch.tensor([0]), 7)))
    own = all_rows(bitmap).tolist()
    assert own[0] == 0
    others = [row for row in range(500) if row not in own]
    # Those that differ by 2^32 from a row would be it if they were cut to 32 bits.
    beyond = [-1, 500, 2**31, 2**62, -(2**63), own[1] + 2**32, own[1] - 2**32]
    for foreign in [*others, *beyond]:
        with pytest.raises(ConfigError) as caught:
            bitmap.encode(torch.tensor([own[0], foreign]))
        assert (caught.value.key, caught.value.value) == ("ids", foreign)


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: owner_of(torch.arange(4), 0), "num_owners"),
        (lambda: owner_of(torch.arange(4.0), 2), "ids"),
        (lambda: owner_of(torch.zeros(2, 2, dtype=torch.int64), 2), "ids"),
        (lambda: owner_of(torch.arange(4, device="meta"), 2), "ids"),
        (lambda: unique_by_hash(torch.arange(4), probes=0), "probes"),
        (lambda: unique_by_hash(torch.arange(4), load=0.0), "load"),
        (lambda: unique_by_hash(torch.arange(4), load=1.5), "load"),
        (lambda: HashBitmap(-1, 2, 0), "num_rows"),
        (lambda: HashBitmap(10, 2, 2), "owner"),
        (lambda: HashBitmap(10, 2, -1), "owner"),
        (lambda: HashBitmap(80, 1, 0).decode(torch.zeros(9, dtype=torch.uint8)), "bits"),
    ],
)
def test_what_cannot_be_used_is_refused(call, key):
    with pytest.raises(ConfigError) as caught:
        call()
    assert caught.value.key == key
